"""The composition root of one gateway process: everything is built here and nowhere else."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import redis.asyncio
from starlette.types import ASGIApp

from gateway.access import first_key
from gateway.access.key_store import KeyStore
from gateway.access.keys import Keys
from gateway.access.records import read_records
from gateway.adapter_keeper import AdapterKeeper
from gateway.admission.admission import Admission
from gateway.api.admin.explain import ExplainRoute
from gateway.api.anthropic.count_tokens import CountTokens
from gateway.api.anthropic.messages import MessagesDialect
from gateway.api.anthropic.models import ModelInfos
from gateway.api.decoding import DecodingLane
from gateway.api.door import Door
from gateway.api.drain import Attendance, DrainRoute
from gateway.api.generation import Generation
from gateway.api.handshake import connection_bounds
from gateway.api.health import Health, Ready, Version
from gateway.api.intake import Intake
from gateway.api.memory_budget import MemoryBudget
from gateway.api.metrics import MetricsPage, NoMetrics, ScrapeAccess, Targets
from gateway.api.models import SpokenModels
from gateway.api.native.assembly import native_apps
from gateway.api.native.props import Offered
from gateway.api.native.reception import Reception
from gateway.api.openai.chat import ChatDialect
from gateway.api.openai.completion import CompletionDialect
from gateway.api.openai.embeddings import EmbeddingsDialect
from gateway.api.openai.input_tokens import ChatInputTokens
from gateway.api.openai.models import Models
from gateway.api.openai.rerank import RerankDialect
from gateway.api.openai.unserved import unserved_apps
from gateway.api.pooled import Pooled
from gateway.api.responses.assembly import responses_apps
from gateway.api.responses.connection import Bounds
from gateway.api.responses.memory import Memories
from gateway.api.resumable import Resumable
from gateway.api.routes import Routes
from gateway.api.sockets import Sockets
from gateway.api.streaming import Pings
from gateway.api.token_count import TokenCount
from gateway.catalog.names import Names
from gateway.gauges import Sight
from gateway.inquiries import Inquiries
from gateway.pipeline import Limits, Pipeline
from gateway.registry.adapter_wishes import AdapterWishes
from gateway.registry.first_workers import FirstWorkers
from gateway.registry.fleet import Fleet, FleetSnapshot
from gateway.registry.model_wishes import ModelWishes
from gateway.relay.relay import Relay
from gateway.resume.recordings import Recordings
from gateway.settings import GatewaySettings
from gateway.store.client import Store
from gateway.store.look import LineReader
from gateway.store.outage import Outage
from gateway.store.responses import ResponseStore
from gateway.store.stream_log import StreamLog
from gateway.store.stream_quota import StreamBounds, StreamQuota
from gateway.store.unreadable import Unreadable
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.prompts import UNWRITTEN, WrittenPrompts
from workers import catalog_file, secret_file
from workers.heap import HeapUpkeep
from workers.http_server.callers import KnownCallers
from workers.protocol.drain import left_s
from workers.protocol.framing import gateway_process
from workers.protocol.heartbeat import Heartbeat
from workers.tracing.tracer import OFF, Tracer

LONGEST_CONTEXT = 1 << 20
"""Tokens that no model's context goes beyond."""
LEAST_CALL_MEMORY = 160 << 20
"""Least default of the bytes that all requests may hold together, however small `max_body_bytes` is."""


@dataclass(frozen=True, slots=True)
class App:
    """One gateway: `asgi` answers requests while `running` is entered."""

    asgi: ASGIApp
    pipeline: Pipeline
    fleet: Fleet
    admission: Admission
    relay: Relay
    recordings: Recordings
    wishes: AdapterWishes
    keeper: AdapterKeeper
    keys: Keys
    key_store: KeyStore
    redis: redis.asyncio.Redis
    sockets: Sockets
    sight: Sight
    attendance: Attendance
    callers: KnownCallers

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the background parts while the block lasts; a part that fails ends the block."""
        start = Outage("not all of Redis can be read at the start", "serving what is known", "")
        for refresh in (self.fleet.refresh, self.wishes.refresh, self.key_store.refresh):
            with start.outlived():  # each part goes on trying by itself
                await refresh()
        async with asyncio.TaskGroup() as tasks:
            parts = (
                self.relay,
                self.fleet,
                self.admission,
                self.key_store,
                self.recordings,
                self.wishes,
                self.keeper,
                self.sight,
                HeapUpkeep(),
            )
            background = [tasks.create_task(part.run()) for part in parts]
            try:
                yield
            finally:
                await self.recordings.close()
                await self.admission.close()
                for task in background:
                    task.cancel()

    async def drain(self, drain_s: float) -> bool:
        """Take no new calls, wait for those under way and end them `drain_s` seconds after the draining began.
        Return whether none had to be ended.
        """
        self.pipeline.stop_taking()
        self.sockets.stop()
        complete = await _within(left_s(drain_s, self.attendance.drains_s()), lambda: self.pipeline.num_calls == 0)
        if not complete:
            self.pipeline.cut_all()
        await _within(LAST_WORDS_S, lambda: self.pipeline.num_calls == 0 and self.sockets.num_open == 0)
        return complete


LAST_WORDS_S = 2.5
"""Seconds that clients whose calls were cut off get to read why."""
IDLE_POLL_S = 0.02


async def _within(timeout_s: float, done: Callable[[], bool]) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            while not done():  # noqa: ASYNC110 - a process that is about to end may poll
                await asyncio.sleep(IDLE_POLL_S)
    except TimeoutError:
        return done()
    return True


async def build(settings: GatewaySettings, redis: redis.asyncio.Redis, tracer: Tracer = OFF) -> App:
    """Build a gateway. Raises CatalogError, KeysInvalid, RedisError, OSError (the state folder can't be written)."""
    own_secret = settings.gateway_secret or secret_file.made_once(settings.state_dir / secret_file.GATEWAY_SECRET)
    core = _core(settings, redis)
    router = Routes(_apps(settings, redis, core, own_secret))
    key_store = await _key_store(settings, redis, own_secret, core.keys, core.unreadable)
    keeper = AdapterKeeper(core.fleet, core.inquiries, core.wishes)
    core.fleet.listen(lambda _: keeper.hurry())
    most_per_key = max(1, int(connection_bounds(settings).most * settings.key_share))
    refuses = settings.unknown_parameters == "refuse"
    return App(
        asgi=Door(router, core.metrics, core.attendance, tracer, most_per_key, refuses_unknown=refuses),
        pipeline=core.pipeline,
        fleet=core.fleet,
        admission=core.admission,
        relay=core.relay,
        recordings=core.recordings,
        wishes=core.wishes,
        keeper=keeper,
        keys=core.keys,
        key_store=key_store,
        redis=redis,
        sockets=core.sockets,
        sight=core.sight,
        attendance=core.attendance,
        callers=core.callers,
    )


@dataclass(frozen=True, slots=True)
class _Core:
    """The parts that carry calls, beneath the routes."""

    metrics: Metrics
    unreadable: Unreadable
    names: Names
    keys: Keys
    callers: KnownCallers
    wishes: AdapterWishes
    fleet: Fleet
    relay: Relay
    inquiries: Inquiries
    admission: Admission
    pipeline: Pipeline
    recordings: Recordings
    sockets: Sockets
    attendance: Attendance
    sight: Sight
    is_leaving: Callable[[], bool]
    first: FirstWorkers


def _core(settings: GatewaySettings, redis: redis.asyncio.Redis) -> _Core:
    """Build the parts beneath the routes. Raises CatalogError."""
    gateway_id = settings.gateway_id or secrets.token_hex(6)
    names = Names(catalog_file.load(settings.catalog) if settings.catalog else None)
    callers = KnownCallers()
    keys = Keys(verified=callers.verified)
    metrics, attendance = Metrics(), Attendance()
    unreadable = Unreadable(metrics.unreadable.inc)
    # Each process numbers its calls from 1: on the wire, a restarted gateway must not be taken for its forerunner.
    process = gateway_process(gateway_id, secrets.token_hex(4))
    relay = Relay(process, settings.worker_secret, settings.stream_buffer_events)
    wishes = AdapterWishes(redis, lambda: fleet.snapshot.models, unreadable, names.scales)
    refused = metrics.refused_records.inc
    fleet = Fleet(redis, settings.worker_secret, registered=wishes.contents, refused=refused, unreadable=unreadable)
    fleet.listen(lambda snapshot: relay.follow(_beats(snapshot)))
    first = FirstWorkers(names.meant, settings.ready_wait_s)
    fleet.listen(first.follow)
    of_line = {"max_queue": settings.max_queue, "max_queue_per_team": settings.max_queue_per_team}
    store = Store(redis, took=metrics.redis_time.observe)
    admission = Admission(store, fleet, gateway_id, **of_line, lost=metrics.lost_leases, unreadable=unreadable)
    fleet.keep_unless(admission.takes_writes)
    prompts = WrittenPrompts() if settings.log_prompts else UNWRITTEN
    pipeline = Pipeline(names, fleet, admission, relay, metrics, _limits(settings), wishes, prompts)
    leaving = partial(_is_leaving, attendance, pipeline)
    sockets = Sockets(settings.max_sockets, settings.max_sockets_per_key)
    return _Core(
        metrics=metrics,
        unreadable=unreadable,
        names=names,
        keys=keys,
        callers=callers,
        wishes=wishes,
        fleet=fleet,
        relay=relay,
        inquiries=Inquiries(fleet, relay),
        admission=admission,
        pipeline=pipeline,
        recordings=_recordings(settings, redis, gateway_id),
        sockets=sockets,
        attendance=attendance,
        sight=Sight(metrics, fleet, admission, pipeline.attempts, names.models, leaving, sockets),
        is_leaving=leaving,
        first=first,
    )


def _apps(settings: GatewaySettings, redis: redis.asyncio.Redis, core: _Core, own_secret: str) -> Mapping[str, ASGIApp]:
    """Return the ASGI app of each route, named as in `gateway.api.routes`."""
    keys, pipeline, fleet, inquiries = core.keys, core.pipeline, core.fleet, core.inquiries
    intake, model_wishes = _intake(settings, fleet, core.names), ModelWishes(redis)
    resumable = Resumable(core.recordings, core.metrics, settings.ping_interval_s)
    answers = (keys, pipeline, intake, Pings(settings.ping_interval_s, settings.ping == "event"), resumable)
    counting = (keys, pipeline, inquiries, intake)
    models = SpokenModels(Models(keys, core.names, fleet, model_wishes), ModelInfos(keys, core.names, fleet))
    reception = Reception(keys, pipeline, fleet, intake)
    bounds = Bounds(settings.max_body_bytes, settings.socket_idle_s, settings.socket_life_s)
    of_sockets = (core.sockets, Memories(settings.socket_bytes_per_team), bounds)
    responses = ResponseStore(redis, settings.response_ttl_s, settings.responses_bytes_per_team)
    scrapes = ScrapeAccess(keys, settings.metrics_key)
    return {
        "chat": Generation(ChatDialect(), *answers),
        "chat_input_tokens": TokenCount(ChatInputTokens(), *counting),
        "completion": Generation(CompletionDialect(), *answers),
        "embeddings": Pooled(EmbeddingsDialect(), keys, pipeline, intake),
        "rerank": Pooled(RerankDialect(), keys, pipeline, intake),
        **responses_apps(*answers, core.recordings, responses, inquiries, *of_sockets, core.metrics),
        "messages": Generation(MessagesDialect(), *answers),
        "count_tokens": TokenCount(CountTokens(), *counting),
        "models": models,
        "model": models,
        "native_models": Models(keys, core.names, fleet, model_wishes, merged=True),
        **unserved_apps(keys),
        "health": Health(),
        "version": Version(),
        "ready": Ready(redis, fleet, core.admission, core.is_leaving, core.names.models, core.first, model_wishes),
        "drain": DrainRoute(core.attendance, keys, own_secret, pipeline, core.sockets),
        "explain": ExplainRoute(reception, pipeline, fleet, core.admission, LineReader(redis), ChatDialect()),
        "metrics": MetricsPage(core.metrics.book, core.sight.look, scrapes),
        "targets": Targets(fleet, scrapes),
        **native_apps(answers, fleet, inquiries, core.wishes, model_wishes, ChatDialect(), _offered(settings)),
        **({} if settings.metrics_endpoint else dict.fromkeys(("metrics", "targets"), NoMetrics())),
    }


def _offered(settings: GatewaySettings) -> Offered:
    return Offered(slots=settings.slots_endpoint, metrics=settings.metrics_endpoint)


def _limits(settings: GatewaySettings) -> Limits:
    return Limits(
        settings.queue_timeout_s,
        settings.start_timeout_s or settings.queue_timeout_s,
        settings.request_timeout_s,
        settings.retry_share,
        settings.answer_timeout_s or settings.request_timeout_s,
    )


def _recordings(settings: GatewaySettings, redis: redis.asyncio.Redis, gateway_id: str) -> Recordings:
    bounds = StreamBounds(settings.resume_streams_per_team, settings.resume_bytes_per_team)
    quota = StreamQuota(redis, bounds, settings.resume_ttl_s)
    return Recordings(StreamLog(redis, settings.resume_ttl_s), quota, gateway_id, settings.resume_buffer_bytes)


def _intake(settings: GatewaySettings, fleet: Fleet, names: Names) -> Intake:
    budget = MemoryBudget(settings.call_memory_bytes or max(LEAST_CALL_MEMORY, 20 * settings.max_body_bytes))
    return Intake(settings.max_body_bytes, budget, DecodingLane(), lambda: longest_context(fleet.snapshot, names))


async def _key_store(
    settings: GatewaySettings, redis: redis.asyncio.Redis, secret: str, keys: Keys, unreadable: Unreadable
) -> KeyStore:
    """Return the store of API keys, with those of the settings. Raises KeysInvalid, redis.RedisError, OSError."""
    fixed = read_records(settings.api_keys)
    first = await first_key.settle(redis, secret, settings.api_key, settings.state_dir)
    # A preset key cannot be overruled by what stands in Redis.
    return KeyStore(redis, secret, keys, (*fixed, first) if settings.api_key else fixed, first, unreadable)


def longest_context(snapshot: FleetSnapshot, names: Names) -> int:
    """Return the tokens of the longest context in the fleet; LONGEST_CONTEXT while any model has no workers."""
    if not all(snapshot.workers.get(model) for model in names.models | snapshot.models):
        return LONGEST_CONTEXT
    return max((beat.n_ctx for beat in _beats(snapshot)), default=LONGEST_CONTEXT)


def _is_leaving(attendance: Attendance, pipeline: Pipeline) -> bool:
    """Return True if no new callers are to be sent to this gateway."""
    return attendance.draining or pipeline.stopping


def _beats(snapshot: FleetSnapshot) -> list[Heartbeat]:
    return [beat for beats in snapshot.workers.values() for beat in beats]
