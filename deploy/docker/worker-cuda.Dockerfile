# A worker for NVIDIA GPUs: llama.cpp compiled with CUDA for the architectures in CUDA_ARCHITECTURES (75 Turing, 80 and 86
# Ampere, 89 Ada, 90 Hopper, 100 and 120 Blackwell; 90 and 120 also as PTX, which the driver compiles on others that are newer:
# 120's does not do for 10.3), its processor part as in worker.Dockerfile.
# Built from the top of the checkout: `make images`. What is in it and how it is run: docs/docker.md.

FROM nvidia/cuda:12.8.1-devel-ubuntu24.04 AS engine
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONDONTWRITEBYTECODE=1
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ gcc make python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY requirements/build.lock requirements/worker.lock requirements/
RUN python3 -m venv /opt/build \
    && /opt/build/bin/python -m pip install --no-compile --no-deps --require-hashes --requirement requirements/build.lock
ARG CUDA_ARCHITECTURES="75-real;80-real;86-real;89-real;90;100-real;120"
ARG CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
RUN awk '/^[a-z]/ { wanted = /^llama-cpp-python==/ } wanted' requirements/worker.lock > /tmp/engine.lock \
    && CMAKE_ARGS="$CMAKE_ARGS -DGGML_CUDA=on -DCMAKE_CUDA_ARCHITECTURES=$CUDA_ARCHITECTURES -DCMAKE_EXE_LINKER_FLAGS=-Wl,--allow-shlib-undefined" PATH="/opt/build/bin:$PATH" /opt/build/bin/python -m pip wheel --no-deps --require-hashes \
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

FROM nvidia/cuda:12.8.1-runtime-ubuntu24.04 AS run
ARG VERSION
LABEL org.opencontainers.image.title="paddock-worker-cuda" \
    org.opencontainers.image.description="One OpenAI-compatible address for a team's own llama.cpp fleet: a worker on NVIDIA GPUs" \
    org.opencontainers.image.licenses="MIT" \
    org.opencontainers.image.version="$VERSION"
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 python3 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 paddock \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/paddock --shell /usr/sbin/nologin paddock \
    && install --directory --owner=10001 --group=10001 --mode=0700 /var/lib/paddock \
    && install --directory --owner=10001 --group=10001 --mode=0755 /models
COPY --from=build /opt/paddock /opt/paddock
ENV PATH=/opt/paddock/bin:/usr/local/nvidia/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
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
