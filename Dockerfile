# Paceline with Ray and everything that the Helm chart's pods need: three targets.
#
#   docker build --target cpu -t paceline:0.1.0 --build-arg TORCH_INDEX=URL .  # PyTorch's CPU builds
#   docker build --target cuda -t paceline:0.1.0-cuda .      # CUDA comes with torch's wheel
#   docker build --target vllm -t paceline:0.1.0-vllm .      # the engine vLLM, for CUDA
#
# BASE is any image of Debian with Python 3.11 to 3.13 and its venv module.
ARG BASE=python:3.11-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE} AS base
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python3 -m venv /opt/venv

# The wheel brings the kernels of every instruction set; each pod takes its processor's.
FROM base AS wheel
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && \
    rm -rf /var/lib/apt/lists/*
COPY constraints.txt pyproject.toml setup.py README.md LICENSE ./
COPY paceline/ paceline/
COPY rpc/ rpc/
COPY deployments/ deployments/
COPY cluster/ cluster/
COPY tuning/ tuning/
RUN grep '^setuptools==' constraints.txt > first.txt && pip install --no-cache-dir -r first.txt && \
    pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

# torch first and by its pin: nothing after it brings another one along.
FROM base AS packages
COPY constraints.txt ./
RUN grep -E '^(torch|setuptools)==' constraints.txt > first.txt
COPY --from=wheel /wheels /wheels

# In both: torch has test helpers in the syntax of newer Pythons, which an older one cannot compile.
# Nothing imports them, and no other file may fail.
FROM packages AS cpu-packages
# An index with torch's builds for CPUs. Without it, the one that pip is set to.
ARG TORCH_INDEX=""
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r first.txt && \
    pip install --no-cache-dir -c constraints.txt \
      "$(echo /wheels/*.whl)[serve,tune,train,tracing]" && \
    python -m compileall -q -x '/torch/testing/_internal/py3[0-9]+_' /opt/venv/lib

FROM packages AS cuda-packages
RUN pip install --no-cache-dir -r first.txt && \
    pip install --no-cache-dir -c constraints.txt \
      "$(echo /wheels/*.whl)[serve,tune,train,tracing]" && \
    python -m compileall -q -x '/torch/testing/_internal/py3[0-9]+_' /opt/venv/lib

# vLLM pins its own torch, so our constraints do not hold here. It installs as root, like the rest.
# Debian's pip tries versions of these packages for hours, this one for a minute.
FROM wheel AS vllm-packages
RUN pip install --no-cache-dir pip==26.3 && \
    pip install --no-cache-dir "$(echo /wheels/*.whl)[serve,tracing,vllm]"

# No compiler: the kernels are compiled above. libgomp for builds of torch that bring none, or under
# another name.
# hadolint ignore=DL3006
FROM ${BASE} AS runtime
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install -y --no-install-recommends libgomp1 && \
    rm -rf /var/lib/apt/lists/* && \
    useradd --uid 1000 --create-home paceline
# `python tuning/sweep.py` is what a sweep's job runs.
COPY tuning/ /opt/paceline/tuning/
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0
WORKDIR /opt/paceline
CMD ["paceline", "--help"]

FROM runtime AS vllm
# Triton compiles launchers for CUDA with a C compiler when vLLM starts.
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install -y --no-install-recommends gcc libc6-dev && \
    rm -rf /var/lib/apt/lists/*
COPY --from=vllm-packages /opt/venv /opt/venv
USER 1000:1000

FROM runtime AS cuda
COPY --from=cuda-packages /opt/venv /opt/venv
USER 1000:1000

# The last target is the one that a build without --target makes.
FROM runtime AS cpu
COPY --from=cpu-packages /opt/venv /opt/venv
USER 1000:1000
