# The environment of CI, and the package in it.
#
#   docker build -t lit-efficient .                                     for CPUs
#   docker build -t lit-efficient --build-arg DEVICE=cu130 .            for GPUs: a CUDA build of PyTorch's own index
#   docker run --rm lit-efficient fit -c language_model                 with --gpus all for the second
#   docker run --rm -w /lit_efficient --entrypoint pytest lit-efficient the tests
ARG PYTHON=3.11
FROM python:${PYTHON}-slim

# PyTorch's compiler calls g++.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*

WORKDIR /lit_efficient
ARG DEVICE=cpu
ENV PIP_NO_CACHE_DIR=1
COPY constraints.txt .
# First and alone: it is by far the largest, and changes less often than the sources.
RUN pip install -c constraints.txt --index-url "https://download.pytorch.org/whl/${DEVICE}" torch
COPY . .
RUN .ci/install

# Runs and caches are written here: docker run -v "$PWD/runs:/data" ...
WORKDIR /data
ENTRYPOINT ["python", "-m", "lit_efficient"]
CMD ["--help"]
