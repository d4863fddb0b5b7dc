"""Runs one worker process, from its settings to its exit code; `chat_worker` and `pooled_worker` make its parts."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Coroutine
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import uvloop
from msgspec.structs import replace

from workers.chat.answers import FamilyUnknown
from workers.chat.template import TemplateUnusable
from workers.chat_worker import open_chat_worker
from workers.engine.disk.fingerprint import parts_of, system_fingerprint
from workers.engine.disk.folder import DISK_TROUBLE, CacheFolderUnusable
from workers.engine.watchdog import Watchdog
from workers.llama.header_cache import FOLDER, HeaderCache
from workers.llama.model import Model, ModelError, ModelTooLarge
from workers.llama.native import AdapterError, build_id, library_digest
from workers.llama.pooling import is_pooled
from workers.models.catalog import CatalogError
from workers.models.cores import cores_of, text_of
from workers.models.files import ADAPTER, DRAFT, PROJECTOR, first_part, plain_name
from workers.models.spec import NO_PROJECTOR, ModelSpec
from workers.pooled_worker import open_pooled_worker
from workers.process import log_lines
from workers.process.black_box import BlackBox, describe, take
from workers.process.helper_process import Launch, launched
from workers.process.limits import isolate, keep_little, keep_to_cores, started_threads
from workers.process.signals import ending_at_once
from workers.process.sockets import PortTaken, listen
from workers.protocol.exits import Exit
from workers.protocol.requests import NAME_PATTERN
from workers.served_text import TemplateFileUnusable
from workers.service.calls.call_record import CallRecords
from workers.service.lifecycle import Lifecycle, is_shortage
from workers.service.server import WorkerIdentity, WorkerServer
from workers.settings import SettingUnusable, WorkerSettings
from workers.tracing.tracer import Tracer, TracingUnusable, tracing

SWITCH_INTERVAL_S = 0.0005
"""Value for `sys.setswitchinterval`: seconds after which the event loop must hand the interpreter's lock to the
engine's waiting thread. Measurements: docs/performance.md."""

logger = logging.getLogger(__name__)

ASIDE = 8
"""Number of threads in the event loop's default executor, for work that would block the loop."""


def prepare() -> None:
    """Do what every worker does at its start, whatever its model and settings, in a process that is to be forked: it
    starts neither threads nor a backend of llama.cpp, which would look for GPUs."""
    _version()
    library_digest()
    msgspec.json.decode(b'{"name":"m","path":"m.gguf"}', type=ModelSpec)


def main(settings: WorkerSettings, launch: Launch = launched) -> int:
    """Set limits and malloc's settings of this process, which must run nothing but the worker; then call `run`.
    `launch` starts helper processes."""
    isolate(core_dumps=settings.core_dumps)
    keep_little()
    return run(settings, launch)


def run(settings: WorkerSettings, launch: Launch = launched) -> int:
    """Serve until a signal or a failure ends the worker; return the exit code (`workers.protocol.exits`)."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # at once: threads that load beside each other hand over sooner, too
    log_lines.configure(settings.log_level, settings.log_format)
    try:
        return _run(settings, launch)
    except (SettingUnusable, CatalogError, TracingUnusable, FamilyUnknown, TemplateFileUnusable) as error:
        return _complain(error, Exit.USAGE)
    except PortTaken as error:
        return _complain(error, Exit.PORT_TAKEN)
    except ModelTooLarge as error:
        return _complain(error, Exit.NO_MEMORY)
    except (ModelError, AdapterError, TemplateUnusable) as error:
        return _complain(error, Exit.BAD_MODEL)
    except CacheFolderUnusable as error:
        return _complain(error, Exit.USAGE)
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_shortage(error):
            raise
        return _complain(MemoryError(f"out of memory at the start ({error}); give the worker more"), Exit.NO_MEMORY)


def _run(settings: WorkerSettings, launch: Launch) -> int:
    spec = spec_of(settings)
    _keep_to(spec.llama.cpus)
    path = Path(spec.path or "")
    with contextlib.ExitStack() as opened:
        tracer = opened.enter_context(_tracing(settings))
        sock = opened.enter_context(_listen(settings))
        with ending_at_once():
            black_box = opened.enter_context(kept_box(settings))
            black_box.loading(0.0)
            headers = HeaderCache(settings.state_dir / FOLDER)
            model = opened.enter_context(Model.load(path, spec.llama, on_progress=black_box.loading, headers=headers))
            watchdog = opened.enter_context(Watchdog(settings.step_timeout_s, black_box))
            open_worker = open_pooled_worker if is_pooled(model, spec.llama) else open_chat_worker
            worker = open_worker(opened, model, settings, spec, watchdog, launch)
            black_box.loaded()
        identity = _identity(settings, spec, model)

        async def serve() -> Exit:
            life = Lifecycle()
            served = worker.wire(identity, life, CallRecords(tracer, identity.worker, identity.model))
            return await WorkerServer(identity, sock, life, served, hung_s=watchdog.hung_s).run()

        return _on_loop(serve)


def _on_loop(serve: Callable[[], Coroutine[None, None, Exit]]) -> Exit:
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.get_loop().set_default_executor(started_threads("paddock-aside", ASIDE))
        return runner.run(serve())


def spec_of(settings: WorkerSettings) -> ModelSpec:
    """Return the spec of the model to serve: the supervisor's (`model_spec`), or one made from the settings.

    Raises SettingUnusable for a setting that is missing or wrong, CatalogError for one that must be JSON and is not."""
    if settings.model is None and settings.model_spec is None:
        raise SettingUnusable("model is unset: a worker serves one GGUF file; give --model FILE.gguf")
    if not settings.redis_url:
        raise SettingUnusable("redis_url is unset: gateways find a worker through Redis; give --redis-url")
    if not settings.worker_secret:
        raise SettingUnusable(
            "worker_secret is unset: give gateways and workers the same PADDOCK_WORKER_SECRET, or use `paddock up`"
        )
    if settings.model_spec is not None:
        try:
            return msgspec.json.decode(settings.model_spec.read_bytes(), type=ModelSpec)
        except (OSError, ValueError) as error:  # msgspec's own, and UnicodeDecodeError
            raise SettingUnusable(f"model_spec: {settings.model_spec}: {error}; leave it out") from None
    path = first_part((settings.model or Path()).expanduser())
    name = settings.alias or path.stem
    if not re.fullmatch(NAME_PATTERN, name):
        raise SettingUnusable(
            f"alias: {name!r} can't be a model's name: use at most 128 letters, digits and . _ : / @ + -, with --alias"
        )
    try:
        return _with_companions(msgspec.convert(settings.entry(name=name, path=str(path)), ModelSpec), settings.model)
    except msgspec.ValidationError as error:
        found = re.search(r"\$\.(\w+)", str(error))
        raise SettingUnusable(
            f"{found[1] if found else 'settings'}: {error}; see docs/catalog.md for what it takes"
        ) from None


def _with_companions(spec: ModelSpec, model: Path | None) -> ModelSpec:
    """Return the spec with the files of its projector, draft model and adapters. Those of the hub lie beside the model
    where `paddock models pull` has put them."""
    beside = (model or Path()).expanduser()
    if not beside.name:  # `.` or `/`: whoever loads the model says that it is no file
        return spec

    def companion(ending: str) -> Path:
        return beside.with_stem(f"{beside.stem}{ending}")

    if not spec.projector and companion(PROJECTOR).is_file():
        spec = replace(spec, projector=str(companion(PROJECTOR)))
    adapters = tuple(
        replace(one, path=str(companion(f"{ADAPTER}{plain_name(one.name)}")), hf=None) if one.hf else one
        for one in spec.adapters
    )
    spec = replace(spec, adapters=adapters)
    draft = spec.speculation.draft
    if draft is None:
        return spec
    path = Path(draft.path).expanduser() if draft.path else companion(DRAFT)
    found = replace(draft, path=str(first_part(path)), hf=None)
    return replace(spec, speculation=replace(spec.speculation, draft=found))


def _keep_to(cpus: str) -> None:
    """Keep this process to the cores that the setting `cpus` names, before it has threads for llama.cpp. Raises
    SettingUnusable if it may not run on one of them."""
    if cpus and (missing := keep_to_cores(cores_of(cpus))):
        there = f"cores {text_of(os.sched_getaffinity(0))}" if hasattr(os, "sched_getaffinity") else "no chosen cores"
        raise SettingUnusable(
            f"llama.cpus: this process may run on {there}, which leaves out {text_of(missing)}; name others, or remove "
            "it"
        )


def kept_box(settings: WorkerSettings) -> BlackBox:
    """Open the file that lists running requests; log those that a dead worker left there. Raises SettingUnusable."""
    path = settings.black_box
    try:
        left = take(path) if path else None
        if left:
            logger.error("the worker that was here before died while running %s", describe(left))
        return BlackBox(path)
    except OSError as error:
        if error.errno in DISK_TROUBLE:
            logger.warning("no record is kept of what runs when this process dies: %s: %s", path, error.strerror)
            return BlackBox(None)
        raise SettingUnusable(
            f"black_box: can't write {path}: {error.strerror}; name a file in a folder of your own, or leave it out"
        ) from None


def _identity(settings: WorkerSettings, spec: ModelSpec, model: Model) -> WorkerIdentity:
    files = parts_of(model.header)
    if spec.projector not in ("", NO_PROJECTOR):
        files.append(Path(spec.projector).expanduser())
    return WorkerIdentity(
        worker=_name(settings),
        model=spec.name,
        address=settings.worker_address.rstrip("/"),
        secret=settings.worker_secret,
        redis_url=settings.redis_url,
        facts=model.facts,
        version=_version(),
        fingerprint=system_fingerprint(files, build_id()),
        drain_s=settings.worker_drain_s,
        gateway_grace_s=settings.gateway_grace_s,
        redis_wait_s=settings.redis_wait_s,
    )


def _name(settings: WorkerSettings) -> str:
    return settings.worker_id or f"{socket.gethostname()}-{os.getpid()}"


def _tracing(settings: WorkerSettings) -> contextlib.AbstractContextManager[Tracer]:
    """Return a context manager that opens the tracer. Entering it raises TracingUnusable."""
    resource = {"service.name": "paddock-worker", "service.version": _version(), "service.instance.id": _name(settings)}
    # The gateways decide which traces are recorded.
    return tracing(settings.otlp_endpoint, settings.otlp_headers, 0.0, resource, _version(), os.environ)


def _listen(settings: WorkerSettings) -> socket.socket:
    try:
        return listen(settings.worker_host, settings.worker_port)
    except PortTaken as error:
        raise PortTaken(f"{error}; choose another with --worker-port") from None
    except OSError as error:
        raise SettingUnusable(f"worker_host: cannot listen on {settings.worker_host}: {error.strerror}") from None


@functools.cache
def _version() -> str:
    try:
        return version("paddock")
    except PackageNotFoundError:
        return "unknown"


def _complain(error: Exception, code: Exit) -> int:
    print(f"paddock: {error}", file=sys.stderr)
    return code
