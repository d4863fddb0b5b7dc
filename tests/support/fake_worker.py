"""A worker without a model, for tests and load: the true service around a fake engine.

    python -m tests.support.fake_worker --redis-url redis://127.0.0.1:6379 --model demo --slots 64 --step-ms 20

It registers, heartbeats, drains and speaks the protocol like a real worker. It prints one line: its address.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
import uvloop

from tests.support.calls import generate_calls
from tests.support.fake_engine import FakeEngine, FakeOptions
from tests.support.fake_pooled import WIDTH, FakeInputs, FakePooledEngine
from tests.support.fake_text import fake_prompts, fake_routes
from workers.chat.answers import Answers
from workers.chat.conversation import THINK
from workers.chat.tools.json_calls import HERMES
from workers.http_server.protocol import HttpProtocol
from workers.llama.pooling import Pooling
from workers.pooled_worker import pooled_service
from workers.process import log_lines
from workers.process.sockets import PortTaken, listen
from workers.protocol.exits import Exit
from workers.protocol.framing import EVENTS_PATH
from workers.protocol.heartbeat import ModelFacts
from workers.protocol.pooled import POOL_PATH, PoolRequest
from workers.protocol.requests import Submit
from workers.service.calls.call_record import CallRecords
from workers.service.calls.generate import GenerateCalls
from workers.service.calls.lanes import media_lane, prompt_lane
from workers.service.calls.live_calls import Begun
from workers.service.calls.pooled import Outcomes, PooledAnswer, PooledCalls, no_pooled_work
from workers.service.calls.pooled_inputs import PooledReader
from workers.service.calls.stream import Mailbox
from workers.service.lifecycle import Lifecycle
from workers.service.registration.prefix_adverts import PrefixAdverts
from workers.service.routes.app import CallRoutes
from workers.service.routes.bodies import refusing
from workers.service.routes.slots import no_slots
from workers.service.server import Served, WorkerIdentity, WorkerServer, metrics_of
from workers.tracing.tracer import tracing

FACTS = ModelFacts(n_ctx_train=4096, n_params=1_000_000, size=4_000_000, n_vocab=32_000)


def facts_of(args: argparse.Namespace) -> ModelFacts:
    inputs = tuple(args.inputs.split(","))
    cells = {"picture_cells": 256 if "image" in inputs else 0, "sound_cells": 128 if "audio" in inputs else 0}
    return msgspec.structs.replace(FACTS, inputs=inputs, **cells)


class NotingCalls:
    """Writes down what each submit has of media, a line of JSON each, and hands it on."""

    def __init__(self, calls: GenerateCalls, file: str) -> None:
        self._calls = calls
        self._file = file
        self.cancel = calls.cancel

    async def submit(self, submit: Submit) -> Begun:
        request = submit.request
        noted = {
            "media": [[one.kind, len(one.data), one.sha256.hex(), one.param] for one in request.media],
            "messages": [[one.role, one.content, list(one.media)] for one in request.messages],
            "prompt": request.prompt,
            "places": list(request.prompt_media),
        }
        with open(self._file, "ab") as lines:
            lines.write(msgspec.json.encode(noted) + b"\n")
        return await self._calls.submit(submit)


class NotingPooledCalls:
    """Writes down what each request for pooled work has of media, a line of JSON each, and hands it on."""

    def __init__(self, calls: PooledCalls, file: str) -> None:
        self._calls = calls
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._calls, name)

    async def pool(self, request: PoolRequest) -> PooledAnswer:
        noted = {
            "media": [[one.kind, len(one.data), one.sha256.hex(), one.param] for one in request.media],
            "inputs": request.inputs,
            "salt": request.cache_salt,
        }
        with open(self._file, "ab") as lines:
            lines.write(msgspec.json.encode(noted) + b"\n")
        return await self._calls.pool(request)


class CuttingProtocol(HttpProtocol):
    """Aborts an event stream's TCP connection after so many writes, as a bad network would."""

    writes_left = 0

    def data_received(self, data: bytes) -> None:
        if EVENTS_PATH.encode() in data:
            inner = self.transport
            self.transport = cast(asyncio.Transport, _CuttingTransport(inner, self.writes_left))
        super().data_received(data)


class _CuttingTransport:
    """A transport that aborts after a number of writes; everything else is the true one's."""

    def __init__(self, inner: asyncio.Transport, writes_left: int) -> None:
        self._inner = inner
        self._writes_left = writes_left

    def write(self, data: bytes) -> None:
        self._writes_left -= 1
        if self._writes_left <= 0:
            self._inner.abort()
        else:
            self._inner.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        prog="python -m tests.support.fake_worker", description=(__doc__ or "").split("\n")[0]
    )
    flags.add_argument("--redis-url", required=True, help="Redis to register in")
    flags.add_argument("--model", default="fake", help="name of the pool it serves (default: fake)")
    flags.add_argument("--kind", choices=("generate", "embed", "rank"), default="generate", help="what it does")
    flags.add_argument("--width", type=int, default=WIDTH, help="numbers in a vector; with --kind embed only")
    flags.add_argument("--worker-id", default="", help="id in the fleet (default: fake-<process id>)")
    flags.add_argument("--host", default="127.0.0.1", help="address to listen on")
    flags.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    flags.add_argument("--address", default="", help="URL for gateways (default: where it listens)")
    secret = os.environ.get("PADDOCK_WORKER_SECRET") or "fake-secret"
    flags.add_argument(
        "--secret", default=secret, help="shared secret (default: PADDOCK_WORKER_SECRET, else fake-secret)"
    )
    flags.add_argument("--slots", type=int, default=8, help="calls at once; as many again may wait")
    flags.add_argument("--ctx", type=int, default=4096, help="longest conversation, tokens of 4 characters")
    flags.add_argument("--step-ms", type=float, default=20.0, help="time of one step: every busy slot emits one token")
    flags.add_argument("--prefill-ms", type=float, default=0.0, help="time from a slot to the first token")
    flags.add_argument(
        "--prefill-token-ms",
        type=float,
        default=0.0,
        help="and so much for each token that is not cached",
    )
    flags.add_argument(
        "--cache-tokens", type=int, default=0, help="tokens of prompts that it remembers (default: slots x ctx)"
    )
    flags.add_argument("--tokens", type=int, default=64, help="tokens per answer (max_tokens cuts it)")
    flags.add_argument("--answer", default="", help="what each answer says (default: t0 t1 t2 ...)")
    flags.add_argument("--thinks", action="store_true", help="what stands in an answer's <think></think> is thought")
    flags.add_argument("--inputs", default="text", help="what the model reads, with commas between (default: text)")
    flags.add_argument("--submits", default="", metavar="FILE", help="write there what each submit has of media")
    flags.add_argument("--drain-s", type=float, default=20.0, help="how long running calls may finish after SIGTERM")
    flags.add_argument("--grace-s", type=float, default=5.0, help="how long calls of a gateway that is gone are kept")
    flags.add_argument("--redis-wait-s", type=float, default=15.0, help="how long a start waits for Redis")
    flags.add_argument("--otlp-endpoint", default="", help="collector of its traces (default: none)")
    flags.add_argument("--log-level", default="", help="least severe log line, as JSON (default: none is written)")
    flags.add_argument("--tally", default="", metavar="FILE", help="write each token's call there, before it is told")
    trouble = flags.add_argument_group("trouble (0: never)")
    trouble.add_argument(
        "--fail-after", type=int, default=0, metavar="N", help="end each answer in-stream after N tokens"
    )
    trouble.add_argument("--die-after", type=int, default=0, metavar="N", help="SIGKILL itself after N tokens in all")
    trouble.add_argument(
        "--crash-after", type=int, default=0, metavar="N", help="the engine crashes after N tokens in all"
    )
    trouble.add_argument("--garble-after", type=int, default=0, metavar="N", help="the engine says what none may say")
    trouble.add_argument("--refuse", choices=("busy", "draining", "internal"), default="", help="refuse every submit")
    trouble.add_argument("--refuse-calls", type=int, default=0, metavar="N", help="refuse the first N submits only")
    trouble.add_argument(
        "--drop-stream-every", type=int, default=0, metavar="N", help="cut the event stream every N writes"
    )
    trouble.add_argument("--no-helpers", action="store_true", help="helper processes for texts don't start")
    trouble.add_argument("--die-of", default="", metavar="TEXT", help="SIGKILL itself over a text that has this")
    trouble.add_argument("--hang", action="store_true", help="accept calls and never answer")
    return flags


async def serve(args: argparse.Namespace) -> Exit:
    options = FakeOptions(
        slots=args.slots,
        n_ctx=args.ctx,
        step_ms=args.step_ms,
        prefill_ms=args.prefill_ms,
        prefill_token_ms=args.prefill_token_ms,
        cache_tokens=args.cache_tokens,
        tokens=args.tokens,
        answer=args.answer,
        fail_after=args.fail_after,
        die_after=args.die_after,
        crash_after=args.crash_after,
        garble_after=args.garble_after,
        refuse=args.refuse,
        refuse_calls=args.refuse_calls,
        hang=args.hang,
        tally=args.tally,
    )
    identity = WorkerIdentity(
        worker=args.worker_id or f"fake-{os.getpid()}",
        model=args.model,
        address=args.address,
        secret=args.secret,
        redis_url=args.redis_url,
        facts=facts_of(args),
        version="fake",
        fingerprint=f"fp_{args.model}",
        drain_s=args.drain_s,
        gateway_grace_s=args.grace_s,
        redis_wait_s=args.redis_wait_s,
    )
    http: type[HttpProtocol] = HttpProtocol
    if args.drop_stream_every:
        http = type("Cutting", (CuttingProtocol,), {"writes_left": args.drop_stream_every})
    resource = {"service.name": "paddock-worker", "service.instance.id": identity.worker}
    with tracing(args.otlp_endpoint, "", 0.0, resource, "fake", os.environ) as tracer:
        life, records = Lifecycle(), CallRecords(tracer, identity.worker, identity.model)
        wire = fake_chat if args.kind == "generate" else fake_pool
        server = WorkerServer(
            identity, listen(args.host, args.port), life, wire(args, options, identity, life, records), http=http
        )
        print(server.address, flush=True)
        return await server.run()


def fake_chat(
    args: argparse.Namespace, options: FakeOptions, worker: WorkerIdentity, life: Lifecycle, records: CallRecords
) -> Served:
    prompts = fake_prompts(args.ctx, args.die_of, has_helpers=not args.no_helpers)
    mailbox = Mailbox(asyncio.get_running_loop(), life.crashed)
    engine = FakeEngine(options, mailbox.put, life.crashed_in_thread)
    metrics = metrics_of(worker, engine, life)
    adverts = PrefixAdverts(engine)
    answers = Answers(replace(HERMES, thought=THINK if args.thinks else None))
    calls, _, hub = generate_calls(
        engine,
        prompts,
        metrics,
        answers=answers,
        boot=worker.boot,
        grace_s=worker.gateway_grace_s,
        mailbox=mailbox,
        life=life,
        records=records,
        adverts=adverts,
    )
    noting = NotingCalls(calls, args.submits) if args.submits else calls
    return Served(
        kind="generate",
        engine=engine,
        calls=calls,
        hub=hub,
        metrics=metrics,
        routes=[
            *CallRoutes(cast(Any, noting), worker.boot).routes(),
            refusing(POOL_PATH, no_pooled_work()),
            *no_slots(),
            *fake_routes(prompts, facts_of(args), model=args.model, slots=args.slots, n_ctx=args.ctx).routes(),
        ],
        adverts=adverts,
        announced=lambda beat: msgspec.structs.replace(beat, infill=prompts.can_infill),
        retire=engine.retire,
        stay=engine.stay,
    )


def fake_pool(
    args: argparse.Namespace, options: FakeOptions, worker: WorkerIdentity, life: Lifecycle, records: CallRecords
) -> Served:
    pooling, width = (Pooling.RANK, 1) if args.kind == "rank" else (Pooling.MEAN, args.width)
    outcomes = Outcomes()
    engine = FakePooledEngine(args.slots, args.ctx, width, outcomes.tell)
    metrics = metrics_of(worker, engine, life)
    prompts = fake_prompts(args.ctx, args.die_of, has_helpers=not args.no_helpers)
    reader = PooledReader(FakeInputs(), prompts, prompt_lane(), media_lane(), args.ctx)
    calls = PooledCalls(outcomes, engine, reader, life, metrics, records, pooling=pooling, width=width)
    noting = NotingPooledCalls(calls, args.submits) if args.submits else calls
    texts = fake_routes(prompts, facts_of(args), model=args.model, slots=args.slots, n_ctx=args.ctx)
    return pooled_service(worker, engine, cast(Any, noting), metrics, texts, width)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.log_level:
        log_lines.configure(args.log_level, "json")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(args))
    except PortTaken as error:
        print(error, file=sys.stderr)
        return Exit.PORT_TAKEN


if __name__ == "__main__":
    sys.exit(main())
