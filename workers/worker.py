"""The composition root of one worker process: model, context, engine, service. `run` runs it from start to end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import uvloop

from workers import log_lines
from workers.black_box import BlackBox, describe, take
from workers.chat.conversation import ChatDefaults
from workers.chat.families import FamilyUnknown
from workers.chat.template import TemplateUnusable
from workers.early_end import ending_at_once
from workers.engine.disk_folder import CacheFolderUnusable
from workers.engine.fingerprint import parts_of, system_fingerprint
from workers.engine.watchdog import Watchdog
from workers.generating import generating_parts
from workers.heap import keep_little
from workers.isolation import isolate
from workers.llama.errors import AdapterError
from workers.llama.model import Model, ModelError, ModelTooLarge
from workers.llama.native import build_id
from workers.llama.pooling import is_pooled
from workers.model_file import first_part
from workers.pooling import pooled_parts
from workers.protocol.catalog import NAME_PATTERN, AdapterSpec, DefaultSampling, LlamaSettings, kwargs_fault
from workers.protocol.exits import Exit
from workers.served_text import TemplateFileUnusable
from workers.service.server import Emit, OnCrash, Place, PortTaken, WorkerServer, listen
from workers.service.server import Engine as ServerEngine
from workers.service.services import Services
from workers.service.shortage import is_shortage
from workers.settings import WorkerSettings
from workers.threads import started_threads
from workers.tracing.opened import TracingUnusable, tracing
from workers.tracing.tracer import Tracer
from workers.wishes import SettingUnusable, Wishes

SWITCH_INTERVAL_S = 0.0005
"""Seconds that the event loop may keep the interpreter lock from the engine's thread; figures: docs/performance.md."""

DISK_TROUBLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
"""Errors of a disk that takes no more writes: no reason not to serve."""

logger = logging.getLogger(__name__)

ASIDE = 8
"""Threads for work that the event loop must not wait for."""

T = TypeVar("T")


class Parts(Protocol):
    """The parts of one kind of worker."""

    def services(self) -> Services:
        """Make the services; called on the loop that serves them."""

    def engine(self, services: Services, emit: Emit, on_crash: OnCrash) -> ServerEngine: ...


OpenParts = Callable[[contextlib.ExitStack, Model, Wishes, Watchdog, str], Parts]


def main(settings: WorkerSettings) -> int:
    """Do what `run` does, in a process that does nothing else."""
    isolate(core_dumps=settings.core_dumps)
    keep_little()
    return run(settings)


def run(settings: WorkerSettings) -> int:
    """Serve until a signal, or until it can't; return the exit code (`workers.protocol.exits`)."""
    log_lines.configure(settings.log_level, settings.log_format)
    try:
        return _run(settings)
    except (SettingUnusable, TracingUnusable, FamilyUnknown, TemplateFileUnusable) as error:
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


def _run(settings: WorkerSettings) -> int:
    path = _checked(settings)
    wishes = Wishes(
        settings,
        path,
        _parsed("llama", settings.llama, LlamaSettings),
        _parsed("sampling", settings.sampling, DefaultSampling).sampling(),
        tuple(_parsed("adapters", settings.adapters, list[AdapterSpec])),
        tuple(_parsed("shared_prompts", settings.shared_prompts, list[str])),
        _chat_defaults(settings),
    )
    with contextlib.ExitStack() as opened:
        tracer = opened.enter_context(_tracing(settings))
        sock = opened.enter_context(_listen(settings))
        with ending_at_once():
            model = opened.enter_context(Model.load(path, wishes.llama))
            place = _place(settings, path, model)
            black_box = opened.enter_context(kept_box(settings))
            watchdog = opened.enter_context(Watchdog(settings.step_timeout_s, black_box))
            open_parts: OpenParts = pooled_parts if is_pooled(model, wishes.llama) else generating_parts
            parts = open_parts(opened, model, wishes, watchdog, place.model)

        async def serve() -> Exit:
            services = parts.services()
            engine = partial(parts.engine, services)
            server = WorkerServer(place, sock, services, engine, hung_s=watchdog.hung_s, tracer=tracer)
            return await server.run()

        return _on_loop(serve)


def _on_loop(serve: Callable[[], Coroutine[None, None, Exit]]) -> Exit:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.get_loop().set_default_executor(started_threads("paddock-aside", ASIDE))
        return runner.run(serve())


def _chat_defaults(settings: WorkerSettings) -> ChatDefaults:
    """Return the defaults for chats that the settings give. Raises SettingUnusable."""
    values = _parsed("chat_template_kwargs", settings.chat_template_kwargs, dict[str, Any])
    if fault := kwargs_fault(values):
        raise SettingUnusable(f"chat_template_kwargs: {fault}")
    budget, message = settings.thinking_budget, settings.thinking_budget_message
    return ChatDefaults(thinking=settings.thinking, values=values, budget=budget, message=message)


def _checked(settings: WorkerSettings) -> Path:
    """Return the model's file. Raises SettingUnusable for a needed setting that is unset."""
    if settings.model is None:
        raise SettingUnusable("model is unset: a worker serves one GGUF file; give --model FILE.gguf")
    if not settings.redis_url:
        raise SettingUnusable("redis_url is unset: gateways find a worker through Redis; give --redis-url")
    if not settings.worker_secret:
        raise SettingUnusable(
            "worker_secret is unset: give gateways and workers the same PADDOCK_WORKER_SECRET, or use `paddock up`"
        )
    name = settings.alias or settings.model.stem
    if not re.fullmatch(NAME_PATTERN, name):
        raise SettingUnusable(
            f"alias: {name!r} can't be a model's name: use at most 128 letters, digits and . _ : / @ + -, with --alias"
        )
    return first_part(settings.model.expanduser())


def kept_box(settings: WorkerSettings) -> BlackBox:
    """Open the record of running requests. Logs what a worker that died in this place left there."""
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


def _place(settings: WorkerSettings, path: Path, model: Model) -> Place:
    return Place(
        worker=_name(settings),
        model=settings.alias or path.stem,
        address=settings.worker_address.rstrip("/"),
        secret=settings.worker_secret,
        redis_url=settings.redis_url,
        facts=model.facts,
        version=_version(),
        fingerprint=system_fingerprint(parts_of(model.header), build_id()),
        drain_s=settings.worker_drain_s,
        gateway_grace_s=settings.gateway_grace_s,
        redis_wait_s=settings.redis_wait_s,
    )


def _name(settings: WorkerSettings) -> str:
    return settings.worker_id or f"{socket.gethostname()}-{os.getpid()}"


def _tracing(settings: WorkerSettings) -> contextlib.AbstractContextManager[Tracer]:
    """Return the context that opens the tracer. It raises TracingUnusable when it is entered."""
    resource = {"service.name": "paddock-worker", "service.version": _version(), "service.instance.id": _name(settings)}
    # The gateways decide which traces are recorded.
    return tracing(settings.otlp_endpoint, settings.otlp_headers, 0.0, resource, _version(), os.environ)


def _listen(settings: WorkerSettings) -> socket.socket:
    try:
        return listen(settings.worker_host, settings.worker_port)
    except PortTaken:
        raise
    except OSError as error:
        raise SettingUnusable(f"worker_host: cannot listen on {settings.worker_host}: {error.strerror}") from None


def _parsed(name: str, text: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise SettingUnusable(f"{name}: {error}; give a JSON object as docs/catalog.md describes it") from None


def _version() -> str:
    try:
        return version("paddock")
    except PackageNotFoundError:
        return "unknown"


def _complain(error: Exception, code: Exit) -> int:
    print(f"paddock: {error}", file=sys.stderr)
    return code
