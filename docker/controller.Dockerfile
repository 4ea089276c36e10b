# The controller: no torch, no model. Of the worker package it uses worker/protocol.py alone.
#
# Build arguments, empty by default (pip's own default index): PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS.

ARG PYTHON_TAG=3.11.14-slim-bookworm

FROM python:${PYTHON_TAG} AS build
ARG PIP_INDEX_URL=
ARG PIP_EXTRA_INDEX_URL=
ARG PIP_FIND_LINKS=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/slipstream
WORKDIR /src
COPY pyproject.toml README.md constraints.txt ./
COPY worker ./worker
COPY controller ./controller
RUN /opt/slipstream/bin/pip install -c constraints.txt .

FROM python:${PYTHON_TAG}
RUN useradd --uid 10001 --no-create-home --home-dir /data --shell /usr/sbin/nologin slipstream \
    && install -d -o slipstream -g slipstream /data
COPY --from=build /opt/slipstream /opt/slipstream
ENV PATH=/opt/slipstream/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
# The root file system may be read-only: only /data (the journal) and /tmp are written to.
WORKDIR /
USER 10001
EXPOSE 8200
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:8200/readyz', timeout=4)"]
ENTRYPOINT ["spec-controller"]
CMD ["run"]
