# automodel_rl for CUDA, with vLLM beside it in an environment of its own.
#
#   docker build --tag automodel-rl .
#   docker run --gpus all --ipc host --volume $PWD/runs:/runs automodel-rl automodel-rl doctor --vllm /opt/vllm/bin/python
#
# torch's wheels bring CUDA's libraries. The image needs only the driver of the host, and a compiler for Triton's kernels.

FROM python:3.12-slim-bookworm

ARG VLLM_VERSION=0.33.0

RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libnuma1 git \
    && rm -rf /var/lib/apt/lists/*

# First what changes least: vLLM, then what the package needs, then the package.
RUN python -m venv /opt/vllm \
    && /opt/vllm/bin/pip install --no-cache-dir "vllm==${VLLM_VERSION}"

WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY automodel_rl automodel_rl
RUN pip install --no-cache-dir --constraint constraints.txt '.[serve,ray,track,audio]'

WORKDIR /runs
CMD ["automodel-rl", "--help"]
