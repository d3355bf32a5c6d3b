# For machines with GPUs of NVIDIA. torch brings CUDA along, so the machine needs the driver and its container toolkit alone.
#
#     docker build --tag rallypoint .
#     docker run --gpus all --shm-size 16g --volume rallypoint:/data rallypoint train gsm8k-grpo
#
# Runs, and what is downloaded from the hub, are in /data. For Kubernetes and for CPUs: examples/cluster/Dockerfile.
FROM python:3.11.14-slim-bookworm

# bubblewrap is the sandbox of programs that a model writes, gcc what Triton compiles launchers with. Debian keeps one
# version of each in a release, so a version written here would soon not be found.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 rally \
    && install --directory --owner rally /data

# torch is most of the image, and changes less often than the source: a layer of its own.
WORKDIR /opt/rallypoint
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt torch==2.13.0
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --constraint constraints.txt ".[ray,plot,math,json,serve,tensorboard]"

ENV HF_HOME=/data/hub RAY_USAGE_STATS_ENABLED=0
USER 1000
WORKDIR /data
ENTRYPOINT ["rally"]
CMD ["--help"]
