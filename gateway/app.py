"""The composition root of one gateway process: builds all its parts and connects them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import redis.asyncio
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from accounts.protocol.records import TeamLimits, read_records
from accounts.protocol.sign_on import read_sign_on
from gateway.access import first_key
from gateway.access.control import AccessControl, RouteToken, Shares, most_of_team
from gateway.access.key_store import KeyStore
from gateway.access.keys import Keys
from gateway.access.local_caller import LocalCaller
from gateway.access.proxies import trusted_proxies
from gateway.adapters.choice import CallAdapters
from gateway.adapters.desired import DesiredAdapters
from gateway.adapters.reconciler import AdapterReconciler
from gateway.admission.admission import Admission
from gateway.api.anthropic.models import ModelInfos
from gateway.api.anthropic.request import read_prompt
from gateway.api.anthropic.writing import MessagesDialect
from gateway.api.call_handlers import CallHandlers
from gateway.api.dialect import Handler
from gateway.api.http.root_app import Door
from gateway.api.http.sockets import Sockets
from gateway.api.http.streaming import Pings
from gateway.api.http.websocket_protocol import connection_bounds
from gateway.api.intake.decoding import DecodingThread
from gateway.api.intake.intake import Intake, MediaBounds
from gateway.api.intake.memory_budget import MemoryBudget
from gateway.api.intake.request_reader import RequestReader
from gateway.api.media.attachments import MIB
from gateway.api.media.fetcher import FetchBounds, Fetcher
from gateway.api.media.loader import MediaLoader
from gateway.api.native.handlers import native_handlers
from gateway.api.native.props import EnabledRoutes
from gateway.api.native.slots import SlotQueries
from gateway.api.openai.dialects import ChatDialect, CompletionDialect, read_chat_prompt
from gateway.api.openai.model_news import ModelNews
from gateway.api.openai.models import Models
from gateway.api.openai.pooled import EmbeddingsDialect, RerankDialect
from gateway.api.openai.transcription import TranscriptionDialect
from gateway.api.openai.writing import unserved_handlers
from gateway.api.operations.accounts import AccountsRoute
from gateway.api.operations.catalog import CatalogRoutes
from gateway.api.operations.document import document_handlers
from gateway.api.operations.drain import DrainRoute, InFlightRequests, drain_route_token
from gateway.api.operations.explain import ExplainRoute
from gateway.api.operations.health import Health, Ready, SharedQuery, version
from gateway.api.operations.metrics import METRICS_PATHS, MetricsPage, Targets, metrics_route_token, refuse_metrics
from gateway.api.overview.calls import CallLookup, CallRoutes
from gateway.api.overview.feed import Feed
from gateway.api.overview.overview import Overviews
from gateway.api.overview.plan import PlanRoute
from gateway.api.overview.routes import OverviewRoutes
from gateway.api.overview.worker_drains import WorkerDrains
from gateway.api.responses.handlers import responses_handlers
from gateway.api.responses.socket.connection import Bounds
from gateway.api.responses.socket.memory import Memories
from gateway.api.resumable import Resumable
from gateway.api.routes import Routes, answer_models
from gateway.api.shapes import INPUT_TOKENS
from gateway.catalog.live import LiveCatalog
from gateway.console.files import ConsoleFiles, lead_to_console, refuse_console
from gateway.console.session import ConsoleSession
from gateway.dispatch.call_resolver import CallResolver
from gateway.dispatch.call_state import Limits
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.pipeline import Pipeline
from gateway.gauges import GaugeCollector
from gateway.limits.cost import Prices
from gateway.limits.limiter import RateLimits
from gateway.limits.sync import LimitSync
from gateway.registry.desired_models import DesiredModels
from gateway.registry.fleet import Fleet, FleetSnapshot
from gateway.registry.libraries import Libraries
from gateway.registry.machines import Machines
from gateway.registry.model_states import ModelStates
from gateway.registry.snapshot import FirstWorkers
from gateway.relay.relay import Relay, WorkerQueries
from gateway.resume.recordings import Recordings
from gateway.settings import GatewaySettings
from gateway.store.call_exchange import CallExchange
from gateway.store.client import Store
from gateway.store.limits import LimitStore
from gateway.store.outage import Outage, Unreadable
from gateway.store.queue_inspector import QueueInspector
from gateway.store.responses import ResponseRecords
from gateway.store.streams import StreamBounds, StreamLog, StreamQuota
from gateway.store.usage import UsageStream
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.prompts import UNWRITTEN, WrittenPrompts
from gateway.usage.usage import Usage, open_usage
from workers import secret_file
from workers.http_server.pacer import KnownCallers
from workers.process.limits import HeapUpkeep
from workers.protocol.control import DRAIN_PATH, left_s
from workers.protocol.framing import gateway_process
from workers.protocol.heartbeat import Heartbeat
from workers.protocol.residency import TOLD_EVERY_S
from workers.tracing.tracer import OFF, Tracer

if TYPE_CHECKING:
    from gateway.access.tokens import Tokens

TOKENS = "gateway.access.tokens"
"""Loaded where `oidc` names a provider: PyJWT takes 60 ms and 11 MiB."""
LEAST_CALL_MEMORY = 192 << 20
"""Minimum, in bytes, of the default limit on the memory of all requests. A large `max_body_bytes` raises that limit."""


@dataclass(frozen=True, slots=True)
class App:
    """One gateway. `asgi` answers requests only inside an `async with running()` block."""

    asgi: ASGIApp
    resolver: CallResolver
    pipeline: Pipeline
    catalog: LiveCatalog
    fleet: Fleet
    states: ModelStates
    admission: Admission
    relay: Relay
    recordings: Recordings
    desired_adapters: DesiredAdapters
    reconciler: AdapterReconciler
    keys: Keys
    key_store: KeyStore
    redis: redis.asyncio.Redis
    sockets: Sockets
    gauges: GaugeCollector
    in_flight: InFlightRequests
    callers: KnownCallers
    accounts: AccountsRoute
    exchange: CallExchange
    limit_sync: LimitSync
    usage: Usage
    people: Tokens | None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the background parts while the caller's `async with` block runs; a part that fails ends the block."""
        start = Outage("not all of Redis can be read at the start", "serving what is known", "")
        for refresh in (self.fleet.refresh, self.desired_adapters.refresh, self.key_store.refresh):
            with start.survive():  # each part goes on trying by itself
                await refresh()
        async with self.accounts.running(), self.usage.closing(), asyncio.TaskGroup() as tasks:
            parts = (
                self.catalog,
                self.relay,
                self.fleet,
                self.states,
                self.admission,
                self.key_store,
                self.recordings,
                self.desired_adapters,
                self.reconciler,
                self.gauges,
                self.limit_sync,
                self.exchange,
                self.usage,
                HeapUpkeep(),
                *((self.people,) if self.people is not None else ()),
            )
            background = [tasks.create_task(part.run()) for part in parts]
            try:
                yield
            finally:
                await self.recordings.close()
                await self.admission.close()
                await self.limit_sync.close()
                for task in background:
                    task.cancel()

    async def drain(self, drain_s: float) -> bool:
        """Take no new calls, wait for the calls under way, and cut off those that remain `drain_s` seconds after the
        draining began. Return whether all calls could finish."""
        self.resolver.stop_taking()
        self.sockets.stop()
        complete = await _within(left_s(drain_s, self.in_flight.draining_s()), lambda: self.pipeline.num_calls == 0)
        if not complete:
            self.pipeline.cut_all()
        await _within(LAST_WORDS_S, lambda: self.pipeline.num_calls == 0 and self.sockets.num_open == 0)
        return complete


LAST_WORDS_S = 2.5
"""Seconds that clients have to receive the error after their calls were cut off."""
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
    """Build a gateway.

    Raises CatalogError, KeysInvalid, ProxiesInvalid, SignOnInvalid, RedisError, OSError (the state folder can't be
    written)."""
    own_secret = settings.gateway_secret or secret_file.made_once(settings.state_dir / secret_file.GATEWAY_SECRET)
    core = _core(settings, redis)
    most = connection_bounds(settings).most
    most_per_key = max(1, int(most * settings.key_share))
    people = _people(settings, core)
    access = AccessControl(
        core.keys,
        Shares(most_per_key, most_of_team(most, most_per_key)),
        _route_tokens(settings, own_secret),
        trusted_proxies(settings.trusted_proxies),
        failed=lambda reason: core.metrics.failed_authentications.labels(reason).inc(),
        people=people,
        local=LocalCaller(core.keys.directory) if settings.open else None,
    )
    accounts = AccountsRoute(settings.accounts_url, own_secret, access.proxies, core.memory)
    handlers = {**_handlers(settings, redis, core, access), **_audited(redis, core, accounts)}
    router = Routes(handlers, access, settings.admin_port)
    key_store = await _key_store(settings, redis, own_secret, core.keys, core.unreadable)
    reconciler = AdapterReconciler(core.fleet, core.queries, core.desired_adapters)
    core.fleet.listen(lambda _: reconciler.reconcile_soon())
    refuses = settings.unknown_parameters == "refuse"
    return App(
        asgi=Door(router, core.metrics, core.in_flight, access, tracer, refuses_unknown=refuses),
        resolver=core.resolver,
        pipeline=core.pipeline,
        catalog=core.catalog,
        fleet=core.fleet,
        states=core.states,
        admission=core.admission,
        relay=core.relay,
        recordings=core.recordings,
        desired_adapters=core.desired_adapters,
        reconciler=reconciler,
        keys=core.keys,
        key_store=key_store,
        redis=redis,
        sockets=core.sockets,
        gauges=core.gauges,
        in_flight=core.in_flight,
        callers=core.callers,
        accounts=accounts,
        exchange=core.exchange,
        limit_sync=core.limit_sync,
        usage=core.usage,
        people=people,
    )


@dataclass(frozen=True, slots=True)
class _Core:
    """The parts that carry calls; the routes use them."""

    gateway_id: str
    metrics: Metrics
    unreadable: Unreadable
    catalog: LiveCatalog
    keys: Keys
    callers: KnownCallers
    desired_adapters: DesiredAdapters
    memory: MemoryBudget
    fleet: Fleet
    states: ModelStates
    relay: Relay
    queries: WorkerQueries
    admission: Admission
    dispatcher: Dispatcher
    resolver: CallResolver
    pipeline: Pipeline
    exchange: CallExchange
    recordings: Recordings
    sockets: Sockets
    in_flight: InFlightRequests
    gauges: GaugeCollector
    is_leaving: Callable[[], bool]
    first: FirstWorkers
    limit_sync: LimitSync
    prices: Prices
    usage: Usage


def _core(settings: GatewaySettings, redis: redis.asyncio.Redis) -> _Core:
    """Build the parts that carry calls, which the routes use. Raises CatalogError."""
    gateway_id = settings.gateway_id or secrets.token_hex(6)
    metrics, in_flight = Metrics(CollectorRegistry()), InFlightRequests()
    catalog = LiveCatalog(settings.catalog, metrics.note_catalog)
    callers, keys = _keys()
    unreadable = Unreadable(lambda kind: metrics.unreadable.labels(kind).inc())
    process = gateway_process(gateway_id, secrets.token_hex(4))
    memory = MemoryBudget(settings.call_memory_bytes or _default_memory(settings))
    relay = Relay(process, settings.worker_secret, settings.stream_buffer_events, memory.reserve)
    desired_adapters = DesiredAdapters(redis, lambda: fleet.snapshot.models, unreadable, lambda: catalog.names.scales)
    fleet = _fleet(settings, redis, catalog, metrics, unreadable, desired_adapters)
    fleet.listen(lambda snapshot: relay.follow(_beats(snapshot)))
    fleet.uphold(relay.hears)
    first = FirstWorkers(catalog.names.meant, settings.ready_wait_s)
    catalog.listen(lambda names: first.only(names.meant))
    fleet.listen(first.follow)
    states = ModelStates(redis, unreadable, lambda: catalog.names.meant)
    admission = _admission(settings, redis, gateway_id, catalog, fleet, states, metrics, unreadable)
    prompts = WrittenPrompts() if settings.log_prompts else UNWRITTEN
    limits, adapters = _limits(settings), CallAdapters(fleet, desired_adapters)
    dispatcher = Dispatcher(fleet, admission, relay, metrics, limits, adapters)
    admission.report_also(dispatcher.workers.waiting_for_worker)
    prices = Prices(keys.directory, lambda: catalog.names.prices)
    usage = _usage(settings, redis, metrics, prices)
    resolver = CallResolver(catalog, fleet, metrics, limits, usage.begin, prices.dearest)
    limit_store = LimitStore(redis, process, took=metrics.script_took)
    rate_limits = RateLimits(limit_store, keys.directory, prices, fleet.pool, metrics.limited)
    pipeline = Pipeline(dispatcher, adapters, limits, prompts, rate_limits)
    leaving, sockets = partial(_is_leaving, in_flight, resolver), _sockets(settings)
    return _Core(
        gateway_id=gateway_id,
        metrics=metrics,
        unreadable=unreadable,
        catalog=catalog,
        keys=keys,
        callers=callers,
        desired_adapters=desired_adapters,
        memory=memory,
        fleet=fleet,
        states=states,
        relay=relay,
        queries=WorkerQueries(fleet, relay),
        admission=admission,
        dispatcher=dispatcher,
        resolver=resolver,
        pipeline=pipeline,
        exchange=CallExchange(redis, gateway_id, CallLookup(pipeline, gateway_id).look),
        recordings=_recordings(settings, redis, gateway_id, keys.directory.storage),
        sockets=sockets,
        in_flight=in_flight,
        gauges=GaugeCollector(
            metrics, fleet, admission, dispatcher.workers, lambda: catalog.names.models, leaving, sockets, states.wanted
        ),
        is_leaving=leaving,
        first=first,
        limit_sync=LimitSync(rate_limits, limit_store),
        prices=prices,
        usage=usage,
    )


def _sockets(settings: GatewaySettings) -> Sockets:
    return Sockets(settings.max_sockets, settings.max_sockets_per_key)


def _keys() -> tuple[KnownCallers, Keys]:
    """Return the callers whose keys were found good, and the keys."""
    callers = KnownCallers()
    return callers, Keys(verified=callers.verified)


def _fleet(
    settings: GatewaySettings,
    redis: redis.asyncio.Redis,
    catalog: LiveCatalog,
    metrics: Metrics,
    unreadable: Unreadable,
    desired_adapters: DesiredAdapters,
) -> Fleet:
    fleet = Fleet(
        redis,
        settings.worker_secret,
        registered=desired_adapters.contents,
        refused=lambda kind: metrics.refused_records.labels(kind).inc(),
        unreadable=unreadable,
    )
    catalog.listen(lambda names: fleet.limit(catalog.models, catalog.withdrawn))
    fleet.limit(catalog.models, catalog.withdrawn)
    return fleet


def _admission(
    settings: GatewaySettings,
    redis: redis.asyncio.Redis,
    gateway_id: str,
    catalog: LiveCatalog,
    fleet: Fleet,
    states: ModelStates,
    metrics: Metrics,
    unreadable: Unreadable,
) -> Admission:
    admission = Admission(
        Store(redis, took=metrics.script_took),
        fleet,
        gateway_id,
        max_queue=settings.max_queue,
        max_queue_per_team=settings.max_queue_per_team,
        lost=metrics.lost_leases,
        unreadable=unreadable,
        states=states,
        told_of=lambda caller: catalog.names.told_of(caller, fleet.snapshot.models, fleet.snapshot.adapters),
    )
    fleet.keep_unless(admission.takes_writes)
    return admission


def _people(settings: GatewaySettings, core: _Core) -> Tokens | None:
    """Return what authenticates tokens of identity providers; None: there are none. Raises SignOnInvalid."""
    sign_on = read_sign_on(settings.oidc)
    if not sign_on.providers:
        return None
    made: Tokens = import_module(TOKENS).tokens_of(sign_on, core.keys.directory, core.callers.verified)
    return made


def _route_tokens(settings: GatewaySettings, own_secret: str) -> dict[str, RouteToken]:
    """Return path -> the token that opens this route without an API key."""
    tokens = {DRAIN_PATH: drain_route_token(own_secret)}
    if settings.metrics_key and settings.metrics_endpoint:
        tokens |= dict.fromkeys(METRICS_PATHS, metrics_route_token(settings.metrics_key))
    return tokens


def _handlers(
    settings: GatewaySettings, redis: redis.asyncio.Redis, core: _Core, access: AccessControl
) -> Mapping[str, Handler]:
    """Return name -> handler for all routes. The names are those of `gateway.api.routes`."""
    resolver, pipeline, fleet, catalog = core.resolver, core.pipeline, core.fleet, core.catalog
    decoding, longest = DecodingThread(), lambda: fleet.snapshot.longest_context(catalog.names.models)
    max_media_bytes = settings.max_media_body_mib * MIB
    media = MediaBounds(max_media_bytes, settings.max_media_mib * MIB)
    intake = Intake(settings.max_body_bytes, core.memory, decoding, longest, media)
    pings = Pings(settings.ping_interval_s, settings.ping == "event")
    resumable = Resumable(core.recordings, core.metrics, settings.ping_interval_s)
    loader = MediaLoader(fleet, Fetcher(_fetch_bounds(settings)), max_media_bytes, settings.max_body_bytes)
    calls = CallHandlers(resolver, pipeline, intake, pings, resumable, core.queries, loader)
    reader, desired_models, chat = RequestReader(resolver, intake), DesiredModels(redis), ChatDialect()
    libraries = Libraries(redis, core.unreadable)
    downloads, states = SharedQuery(libraries.downloads, TOLD_EVERY_S), core.states
    listing = Models(catalog, fleet, desired_models, states, core.prices, downloads)
    models = partial(answer_models, listing.show, ModelInfos(catalog, fleet).show)
    bounds = Bounds(settings.max_body_bytes, settings.socket_idle_s, settings.socket_life_s)
    of_sockets = (core.sockets, Memories(settings.socket_bytes_per_team), bounds)
    storage_of = core.keys.directory.storage
    responses = ResponseRecords(redis, settings.response_ttl_s, settings.responses_bytes_per_team, storage_of)
    enabled = EnabledRoutes(settings.slots_endpoint, settings.metrics_endpoint)
    circuits, queues = core.dispatcher.workers.circuits, QueueInspector(redis)
    targets = [address for address in settings.gateway_targets.split(",") if address]
    shared_ports = (settings.port, settings.admin_port) if targets else ()
    ready = Ready(redis, fleet, core.admission, core.is_leaving, catalog, core.first, desired_models)
    explain = ExplainRoute(reader, pipeline.adapters, circuits, fleet, core.admission, states, queues, chat)
    return {
        "chat": calls.generate(chat, takes_media=True),
        "chat_input_tokens": calls.count_tokens(read_chat_prompt, INPUT_TOKENS),
        "completion": calls.generate(CompletionDialect()),
        "embeddings": calls.pool(EmbeddingsDialect(), takes_media=True),
        "rerank": calls.pool(RerankDialect()),
        "transcriptions": calls.generate(TranscriptionDialect("transcribe"), is_form=True),
        "translations": calls.generate(TranscriptionDialect("translate"), is_form=True),
        **responses_handlers(calls, access, core.recordings, responses, *of_sockets, core.metrics),
        "messages": calls.generate(MessagesDialect(), takes_media=True),
        "count_tokens": calls.count_tokens(read_prompt, {}),
        "models": models,
        "model": models,
        "native_models": listing.show_merged,
        "model_news": ModelNews(listing, states, downloads, core.is_leaving, settings.ping_interval_s).answer,
        **unserved_handlers(),
        "health": Health(is_open=settings.open).answer,
        "version": version,
        "ready": ready.answer,
        "drain": DrainRoute(core.in_flight, resolver, pipeline, core.sockets).answer,
        **_console(settings, access),
        **document_handlers(),
        **_overview(settings, redis, core, desired_models, reader),
        "explain": explain.answer,
        "metrics": MetricsPage(core.metrics.registry, core.gauges.update, shared_ports, targets).answer,
        "targets": Targets(fleet, targets).answer,
        **native_handlers(
            calls, reader, fleet, core.desired_adapters, desired_models, states, libraries, chat, enabled, storage_of
        ),
        **({} if settings.metrics_endpoint else dict.fromkeys(("metrics", "targets"), refuse_metrics)),
    }


def _audited(redis: redis.asyncio.Redis, core: _Core, accounts: AccountsRoute) -> Mapping[str, Handler]:
    """Return the handlers of the routes that the accounts service answers, and of those that it audits."""
    calls, catalog = CallRoutes(core.exchange, accounts.note), CatalogRoutes(core.catalog, accounts.note)
    drains = WorkerDrains(core.fleet, core.queries, DesiredModels(redis), accounts.note)
    return {
        "drain_worker": drains.answer,
        "accounts": accounts.answer,
        "calls": calls.show,
        "cancel_call": calls.cancel,
        "catalog": catalog.show,
        "check_catalog": catalog.check,
        "write_catalog": catalog.write,
        "reload_catalog": catalog.reload,
    }


def _console(settings: GatewaySettings, access: AccessControl) -> Mapping[str, Handler]:
    """Return the handlers of the console's routes. Raises OSError."""
    if not settings.console:
        return dict.fromkeys(("front", "console", "console_session", "sign_in", "sign_out"), refuse_console)
    files = ConsoleFiles()
    links = {name: url for name, url in (("Grafana", settings.grafana_url), ("Runbook", settings.runbook_url)) if url}
    has_sign_on = bool(settings.accounts_url and read_sign_on(settings.oidc).providers)
    session = ConsoleSession(access, has_accounts=bool(settings.accounts_url), has_sign_on=has_sign_on, links=links)
    return {
        "front": lead_to_console,
        "console": files.show,
        "console_session": session.show,
        "sign_in": session.begin,
        "sign_out": session.end,
    }


def _overview(
    settings: GatewaySettings, redis: redis.asyncio.Redis, core: _Core, desired: DesiredModels, reader: RequestReader
) -> Mapping[str, Handler]:
    """Return the handlers of the routes that show the fleet."""
    fleet, states, circuits = core.fleet, core.states, core.dispatcher.workers.circuits
    admission, machines = core.admission, Machines(redis, core.unreadable)
    made = Overviews(
        *(redis, core.gateway_id, core.catalog, fleet, states, desired, machines, circuits),
        lambda: admission.redis_up,
        core.unreadable,
    )
    plan = PlanRoute(redis, reader, fleet, states, desired, machines, core.unreadable)
    feed = Feed(made.look, SlotQueries(core.queries), lambda model: len(fleet.snapshot.of(model)))
    routes = OverviewRoutes(made.look, feed, states, core.is_leaving, settings.ping_interval_s)
    return {"overview": routes.show, "overview_events": routes.stream, "plan": plan.answer}


def _default_memory(settings: GatewaySettings) -> int:
    """Return the default limit on the memory of all requests, in bytes."""
    return max(LEAST_CALL_MEMORY, 20 * settings.max_body_bytes, 6 * settings.max_media_body_mib * MIB)


def _fetch_bounds(settings: GatewaySettings) -> FetchBounds:
    hosts = tuple(host for host in map(str.strip, settings.media_allowed_hosts.split(",")) if host)
    return FetchBounds(hosts, settings.media_allow_private, settings.max_media_mib * MIB, settings.media_timeout_s)


def _limits(settings: GatewaySettings) -> Limits:
    return Limits(
        settings.queue_timeout_s,
        settings.start_timeout_s or settings.queue_timeout_s,
        settings.request_timeout_s,
        settings.retry_share,
        settings.answer_timeout_s or settings.request_timeout_s,
    )


def _usage(settings: GatewaySettings, redis: redis.asyncio.Redis, metrics: Metrics, prices: Prices) -> Usage:
    """Return what keeps the usage of calls; without an accounts service nobody would read it, and none is kept."""
    if not settings.accounts_url:
        return Usage(None, None)
    stream = UsageStream(redis, settings.usage_stream_max)
    return open_usage(settings.state_dir, settings.usage_journal_mib * MIB, stream, metrics, prices.cost_of)


def _recordings(
    settings: GatewaySettings, redis: redis.asyncio.Redis, gateway_id: str, limits_of: Callable[[str], TeamLimits]
) -> Recordings:
    bounds = StreamBounds(settings.resume_streams_per_team, settings.resume_bytes_per_team)
    quota = StreamQuota(redis, bounds, settings.resume_ttl_s, limits_of)
    return Recordings(StreamLog(redis, settings.resume_ttl_s), quota, gateway_id, settings.resume_buffer_bytes)


async def _key_store(
    settings: GatewaySettings, redis: redis.asyncio.Redis, secret: str, keys: Keys, unreadable: Unreadable
) -> KeyStore:
    """Return the store of API keys, including the keys of the settings.

    Raises KeysInvalid, redis.RedisError, OSError."""
    fixed = read_records(settings.api_keys)
    first = await first_key.settle(redis, secret, settings.api_key, settings.state_dir)
    # A preset key can't be overruled by records in Redis.
    return KeyStore(redis, secret, keys, (*fixed, first) if settings.api_key else fixed, first, unreadable)


def _is_leaving(in_flight: InFlightRequests, resolver: CallResolver) -> bool:
    """Return whether balancers should send no new callers to this gateway."""
    return in_flight.draining or resolver.stopping


def _beats(snapshot: FleetSnapshot) -> list[Heartbeat]:
    return [beat for beats in snapshot.workers.values() for beat in beats]
