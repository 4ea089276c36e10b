# The worker: serves the model, torch included.
#
# Build arguments, all empty by default (pip's own default index): PIP_INDEX_URL, PIP_EXTRA_INDEX_URL,
# PIP_FIND_LINKS and TORCH_INDEX_URL, the index that torch alone comes from. On the default index torch for Linux
# is the CUDA build, which runs on the CPU as well; PyTorch's CPU index gives an image some gigabytes smaller.

ARG PYTHON_TAG=3.11.14-slim-bookworm

FROM python:${PYTHON_TAG} AS build
ARG PIP_INDEX_URL=
ARG PIP_EXTRA_INDEX_URL=
ARG PIP_FIND_LINKS=
ARG TORCH_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/slipstream
WORKDIR /src
COPY constraints.txt ./
# What torch needs comes with the next step: an index for torch alone may not have it in the pinned versions.
RUN /opt/slipstream/bin/pip install --no-deps \
    ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md ./
COPY worker ./worker
COPY controller ./controller
RUN /opt/slipstream/bin/pip install -c constraints.txt '.[worker]'

FROM python:${PYTHON_TAG}
RUN useradd --uid 10001 --no-create-home --home-dir /data --shell /usr/sbin/nologin slipstream \
    && install -d -o slipstream -g slipstream /models /data
COPY --from=build /opt/slipstream /opt/slipstream
ENV PATH=/opt/slipstream/bin:$PATH \
    HOME=/data \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    HF_HUB_OFFLINE=1 \
    SPEC_MODELS_DIR=/models
# The root file system may be read-only: only /models, /data (what is measured once per machine) and /tmp are
# written to.
WORKDIR /
USER 10001
EXPOSE 8100 8101
STOPSIGNAL SIGTERM
# The first start fetches and converts the model, so the start period is long; ready ends it at once.
HEALTHCHECK --interval=5s --timeout=5s --start-period=1800s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:8100/readyz', timeout=4)"]
ENTRYPOINT ["spec-worker"]
CMD ["run"]
