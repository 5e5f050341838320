# Paceline with Ray and everything that the Helm chart's pods need.
#
#   docker build -t paceline:0.1.0 --build-arg TORCH_INDEX=URL .   # CPU: URL of PyTorch's CPU builds
#   docker build -t paceline:0.1.0-cuda --build-arg DEVICE=cuda .  # CUDA comes with torch's wheel
ARG PYTHON=3.11
# cpu or cuda
ARG DEVICE=cpu

FROM python:${PYTHON}-slim-bookworm AS base
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt ./
# torch first and by its pin: nothing after it brings another one along.
RUN python -m venv /opt/venv && grep -E '^(torch|setuptools)==' constraints.txt > first.txt

FROM base AS torch-cpu
# An index with torch's builds for CPUs. Without it, the one that pip is set to.
ARG TORCH_INDEX=""
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r first.txt

FROM base AS torch-cuda
RUN pip install --no-cache-dir -r first.txt

# hadolint ignore=DL3006
FROM torch-${DEVICE} AS build
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY paceline/ paceline/
COPY rpc/ rpc/
COPY deployments/ deployments/
COPY cluster/ cluster/
COPY tuning/ tuning/
# The wheel brings the kernels of every instruction set; each pod takes its processor's.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && \
    rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir --no-build-isolation -c constraints.txt ".[serve,tune,train,tracing]" && \
    python -m compileall -q /opt/venv/lib

FROM python:${PYTHON}-slim-bookworm
# No compiler: the kernels are compiled above. libgomp for builds of torch that bring none, or under
# another name.
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install -y --no-install-recommends libgomp1 && \
    rm -rf /var/lib/apt/lists/* && \
    useradd --uid 1000 --create-home paceline
COPY --from=build /opt/venv /opt/venv
# `python tuning/sweep.py` is what a sweep's job runs.
COPY tuning/ /opt/paceline/tuning/
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0
WORKDIR /opt/paceline
USER 1000:1000
CMD ["paceline", "--help"]
