# ds_zo for NVIDIA GPUs. docs/index.md has the commands to build and to run, and explains their options.

# `devel` has nvcc, with which DeepSpeed compiles its own CUDA kernels on first use. Its major version must be that of
# the CUDA that torch in constraints.txt was built for.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# Triton compiles a small C file against Python.h, DeepSpeed compiles C++. The distribution's newest patches are wanted.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/venv/bin:$PATH
RUN python3 -m venv /opt/venv

# torch comes first: a change of the package's code leaves this layer as it is.
WORKDIR /opt/ds_zo
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt torch ninja

COPY pyproject.toml ds_zo_autoload.py README.md LICENSE ./
COPY ds_zo ds_zo
RUN pip install --no-cache-dir --constraint constraints.txt ".[gpu,peft]"
COPY ds_configs ds_configs
COPY launch launch

# Any user id may write here, so that `docker run --user "$(id -u)"` works. USER has a value because torch asks for a
# name, and an unknown id has none.
RUN mkdir -p /cache /workspace && chmod 1777 /cache /workspace
ENV HOME=/workspace \
    USER=trainer \
    HF_HOME=/cache/huggingface \
    TORCH_EXTENSIONS_DIR=/cache/torch_extensions \
    TRITON_CACHE_DIR=/cache/triton
USER 1000
WORKDIR /workspace

# Checks the machine: GPU, link, pinned memory, host memory.
CMD ["ds-zo", "report"]
