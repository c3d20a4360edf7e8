# Image with the package in the environment of CI.
#
#   docker build -t lit-efficient .                            for CPUs
#   docker build -t lit-efficient --build-arg DEVICE=cu130 .   for GPUs, with a CUDA build from PyTorch's index
#   docker run --rm lit-efficient fit -c language_model        add --gpus all on a GPU
#   docker run --rm -w /lit_efficient --entrypoint pytest lit-efficient     run the tests
ARG PYTHON=3.11
FROM python:${PYTHON}-slim

# torch.compile calls g++.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*

WORKDIR /lit_efficient
ARG DEVICE=cpu
ENV PIP_NO_CACHE_DIR=1
COPY constraints.txt .
# torch has a layer of its own: it is by far the largest package and changes less often than the sources.
RUN pip install -c constraints.txt --index-url "https://download.pytorch.org/whl/${DEVICE}" torch
COPY . .
RUN .ci/install

# Runs and caches are written to this folder: docker run -v "$PWD/runs:/data" ...
WORKDIR /data
ENTRYPOINT ["python", "-m", "lit_efficient"]
CMD ["--help"]
