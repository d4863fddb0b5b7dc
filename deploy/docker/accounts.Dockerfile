# The accounts service: Python and the locked packages of requirements/accounts.lock, no compiler, no llama.cpp.
# Built from the top of the checkout: `make images`. What is in it and how it is run: docs/docker.md.

FROM python:3.12.12-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONDONTWRITEBYTECODE=1
WORKDIR /src
COPY requirements/build.lock requirements/accounts.lock requirements/
RUN python -m venv /opt/paddock \
    && /opt/paddock/bin/python -m pip install --no-compile --no-deps --require-hashes --requirement requirements/accounts.lock
RUN python -m venv /opt/build \
    && /opt/build/bin/python -m pip install --no-compile --no-deps --require-hashes --requirement requirements/build.lock
COPY pyproject.toml README.md LICENSE ./
COPY accounts accounts
COPY gateway gateway
COPY workers workers
COPY deploy/demo/paddock-demo.gguf deploy/demo/paddock-demo.gguf
ARG VERSION
RUN /opt/build/bin/python -c "import sys, gateway; sys.exit(None if gateway.__version__ == '$VERSION' else f'this checkout is {gateway.__version__}, not the VERSION $VERSION')" \
    && /opt/build/bin/python -m pip wheel --no-deps --no-index --no-build-isolation --wheel-dir /tmp/wheel . \
    && /opt/paddock/bin/python -m pip install --no-compile --no-deps --no-index /tmp/wheel/*.whl \
    && /opt/paddock/bin/python -m compileall -q /opt/paddock/lib \
    && /opt/paddock/bin/python -m pip uninstall --yes --quiet pip

FROM python:3.12.12-slim-bookworm AS run
ARG VERSION
LABEL org.opencontainers.image.title="paddock-accounts" \
    org.opencontainers.image.description="One OpenAI-compatible address for a team's own llama.cpp fleet: the accounts service" \
    org.opencontainers.image.licenses="MIT" \
    org.opencontainers.image.version="$VERSION"
RUN groupadd --gid 10001 paddock \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/paddock --shell /usr/sbin/nologin paddock \
    && install --directory --owner=10001 --group=10001 --mode=0700 /var/lib/paddock
COPY --from=build /opt/paddock /opt/paddock
ENV PATH=/opt/paddock/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/var/lib/paddock \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PADDOCK_STATE_DIR=/var/lib/paddock \
    PADDOCK_ACCOUNTS_LISTEN=0.0.0.0:8082 \
    PADDOCK_LOG_FORMAT=json
USER 10001:10001
WORKDIR /var/lib/paddock
EXPOSE 8082
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python3", "-I", "-S", "-c", "import os, socket; socket.create_connection(('127.0.0.1', int(os.environ['PADDOCK_ACCOUNTS_LISTEN'].rpartition(':')[2])), timeout=4).close()"]
ENTRYPOINT ["paddock"]
CMD ["accounts"]
