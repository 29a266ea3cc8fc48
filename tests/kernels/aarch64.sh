#!/bin/sh
# Puts an aarch64 Python with torch into a folder, for an emulator: `tests/kernels/aarch64.sh FOLDER` prints the command that
# runs it, which tests/kernels/test_neon.py wants in AARCH64_PYTHON. On Debian 12, with a Python 3.11 of this machine's own:
#   apt-get install g++-aarch64-linux-gnu qemu-user
# The compiler runs on this machine itself and not in the emulator. Everything that is fetched stays in the folder. To be run in
# the root of the checkout.
set -eu
folder=$(mkdir -p "$1" && cd "$1" && pwd)
python=${PYTHON:-python3.11}
apt="-o Dir::State=$folder/apt -o Dir::State::status=$folder/apt/status -o Dir::Cache=$folder/apt
     -o APT::Architecture=arm64 -o APT::Architectures=arm64"
if [ ! -x "$folder/root/usr/bin/python3.11" ]; then
  mkdir -p "$folder/apt/lists/partial" "$folder/apt/archives/partial" "$folder/debs" "$folder/root"
  : > "$folder/apt/status"
  apt-get $apt -q update >&2
  (cd "$folder/debs" && apt-get $apt -q download python3.11 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 \
    libgcc-s1 libstdc++6 libgomp1 zlib1g libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 libcrypt1 >&2)
  for package in "$folder"/debs/*.deb; do dpkg -x "$package" "$folder/root"; done
fi
if [ ! -d "$folder/site/torch" ]; then
  # The last torch whose wheel for aarch64 on PyPI is a CPU build, setuptools, which its `cpp_extension` imports, and what the
  # kernels' tests import besides. No dependencies: pip would judge them by this machine.
  wheels="--target $folder/site --no-deps --only-binary=:all: --python-version 3.11 --implementation cp --platform manylinux_2_28_aarch64
          --platform manylinux_2_27_aarch64 --platform manylinux_2_24_aarch64 --platform manylinux_2_17_aarch64
          --platform manylinux2014_aarch64"
  names="Jinja2|MarkupSafe|PyYAML|Pygments|accelerate|anyio|charset-normalizer|dill|filelock|fsspec|gguf|greenlet|h11|httpcore|httpx"
  names="$names|httpcore2|httpx2|huggingface-hub|idna|iniconfig|mpmath|networkx|numpy|packaging|pillow|pluggy|protobuf|psutil|pytest"
  names="$names|regex|requests|safetensors|scipy|sympy|tokenizers|tqdm|transformers|truststore|typing-extensions|urllib3"
  "$python" -m pip install -q $wheels torch==2.10.0 setuptools $(grep -iE "^($names)==" constraints.txt) >&2
fi
command="$folder/python"
cat > "$command" <<END
#!/bin/sh
export QEMU_LD_PREFIX="$folder/root" PYTHONPATH="\${PYTHONPATH-.}:$folder/site" CXX=aarch64-linux-gnu-g++
export WORKBENCH_CACHE="$folder/cache"
exec qemu-aarch64 "$folder/root/usr/bin/python3.11" "\$@"
END
chmod +x "$command"
echo "$command"
