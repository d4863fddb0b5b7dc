# A worker for processors: llama.cpp compiled for all x86-64 with AVX2 (level v3: Intel since 2013, AMD since 2015), on
# ARM for all of ARMv8. CMAKE_ARGS builds it for others, or for the processor of the machine that builds.
# Built from the top of the checkout: `make images`. What is in it and how it is run: docs/docker.md.

FROM python:3.12.12-slim-bookworm AS engine
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONDONTWRITEBYTECODE=1
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ gcc make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY requirements/build.lock requirements/worker.lock requirements/
RUN python3 -m venv /opt/build \
    && /opt/build/bin/python -m pip install --no-compile --no-deps --require-hashes --requirement requirements/build.lock
ARG CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
RUN awk '/^[a-z]/ { wanted = /^llama-cpp-python==/ } wanted' requirements/worker.lock > /tmp/engine.lock \
    && CMAKE_ARGS="$CMAKE_ARGS" PATH="/opt/build/bin:$PATH" /opt/build/bin/python -m pip wheel --no-deps --require-hashes \
    --no-build-isolation --no-binary=llama-cpp-python --wheel-dir /opt/engine --requirement /tmp/engine.lock

FROM engine AS build
RUN python3 -m venv /opt/paddock \
    && awk '/^[a-z]/ { wanted = !/^llama-cpp-python==/ } wanted' requirements/worker.lock > /tmp/others.lock \
    && /opt/paddock/bin/python -m pip install --no-compile --no-deps --require-hashes --requirement /tmp/others.lock \
    && /opt/paddock/bin/python -m pip install --no-compile --no-deps --no-index /opt/engine/*.whl
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
LABEL org.opencontainers.image.title="paddock-worker" \
    org.opencontainers.image.description="One OpenAI-compatible address for a team's own llama.cpp fleet: a worker on processors" \
    org.opencontainers.image.licenses="MIT" \
    org.opencontainers.image.version="$VERSION"
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 paddock \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/paddock --shell /usr/sbin/nologin paddock \
    && install --directory --owner=10001 --group=10001 --mode=0700 /var/lib/paddock \
    && install --directory --owner=10001 --group=10001 --mode=0755 /models
COPY --from=build /opt/paddock /opt/paddock
ENV PATH=/opt/paddock/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/var/lib/paddock \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PADDOCK_STATE_DIR=/var/lib/paddock \
    PADDOCK_MODELS_DIR=/models \
    PADDOCK_WORKER_HOST=0.0.0.0 \
    PADDOCK_WORKER_PORT=8081 \
    PADDOCK_LOG_FORMAT=json
USER 10001:10001
WORKDIR /var/lib/paddock
EXPOSE 8081
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \
    CMD ["python3", "-I", "-S", "-c", "import http.client, os; ask = http.client.HTTPConnection('127.0.0.1', int(os.environ['PADDOCK_WORKER_PORT']), timeout=4); ask.request('GET', '/health'); raise SystemExit(ask.getresponse().status != 200)"]
ENTRYPOINT ["paddock"]
CMD ["worker"]
