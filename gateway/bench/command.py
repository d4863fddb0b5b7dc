"""`paddock bench`: puts the load of many users on any OpenAI-compatible address, and reports the latencies they see.

where
--url URL             another gateway, a llama-server, a vLLM; its key is --api-key or PADDOCK_API_KEY
--model NAME          model, alias or adapter; default: the first one that is listed
--keys FILE           several keys, one `name key` a line: calls use them in turn, results are reported by name
--insecure            do not check the certificate of an https address
flags                 where the local gateway is, as in `paddock chat`: --host, --port, --api-key, --state-dir, --config

what
--workload NAME       chat (default), code, rag, agent: log-normal lengths, shared system prompts, repeated histories
--trace FILE          recorded calls instead: Mooncake's JSON lines, or CSV as Azure's and BurstGPT's
--prompt-tokens N     median of the tokens that a turn adds, in place of the workload's
--answer-tokens N     median of the tokens of an answer
--scale F             factor for all lengths, for small models
--max-context N       maximum tokens of a prompt and its answer together
--let-stop            let the model end its answers; default: answers have the drawn length (ignore_eos)
--temperature T       default: the model's own

when
--concurrency N       number of callers; each sends its next call when its last answer is complete (default: 8)
--rate R              calls per second, sent on time whether answers come or not (Poisson)
--bursts C            with --rate: coefficient of variation of the gaps; 0: even, 1: Poisson, 3: bursts
--find-limit BOUNDS   raise the rate until a bound is broken, such as ttft_p95<1.5,itl_p99<200ms; starts at --rate (1)
--step S              with --find-limit: seconds at each rate (20)
--speed F             replay a trace F times as fast as it was recorded (1)
--duration S          seconds of sending (60; with a trace: all of it)
--count N             number of calls to send
--warmup S            seconds at the start that are not counted (a tenth of the duration, at most 10)
--timeout S           maximum seconds of an answer (600)
--seed N              the same seed sends the same calls (1)

result
--slo BOUNDS          bounds for each call, such as ttft<1.5,itl<200ms: reports how many calls met all of them
--assert BOUNDS       bounds for the whole run, such as ttft_p95<1.5,error_share<1%; exit code 3 if one is broken
--json FILE           write the result for programs; docs/bench.md lists its fields
--html FILE           write the result for people, with plots, as one file

Ctrl-C ends the run and reports what there is so far. A call's waits count from the time when it was due, not from when
it was sent.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec
import uvloop

from gateway.bench import options as flags
from gateway.bench.connection import target
from gateway.bench.document import Document
from gateway.bench.driver import Caller, Form
from gateway.bench.options import BenchUnusable, Options
from gateway.bench.page import page
from gateway.bench.runner import KeyRefused, Plan, Runner
from gateway.bench.terminal import Progress, table
from gateway.bench.workload import Recorded, TraceUnusable, read
from gateway.client import AuthenticationFailed, Client, ClientError, ConnectionFailed
from gateway.commands.logins import LoginsUnreadable
from gateway.commands.target import Access, find
from gateway.settings import GatewaySettings
from workers import sources
from workers.commands import command
from workers.protocol.exits import Exit


def main(args: Sequence[str], known: Collection[str] = ()) -> int:
    """Run the command and return the exit code. `known`: every setting's name."""
    if args and args[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0
    try:
        options, rest = flags.read(args)
        beside = [one for action in flags.make_parser()._actions for one in action.option_strings]
        reading = sources.read(GatewaySettings, rest, prog="paddock bench", known=known, beside=beside)
        access = find(options.url, reading)
    except sources.SettingsError as error:
        return command.complain(error.problems)
    except (BenchUnusable, LoginsUnreadable) as error:
        return command.complain([str(error)])
    for warning in reading.warnings:
        print(f"paddock: warning: {warning}", file=sys.stderr)
    return _bench(options, access)


def _bench(options: Options, access: Access) -> int:
    try:
        for path in (options.json, options.html):
            _check_writable(path)
        plan = _plan(options, access)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            done = runner.run(Runner(plan, Progress()).run())
    except (KeyRefused, AuthenticationFailed) as error:
        print(f"paddock: {error} ({'a key of --keys' if options.keys else access.key_from})", file=sys.stderr)
        return int(Exit.CRASHED)
    except ConnectionFailed as error:
        print(f"paddock: {error}; start a gateway with `paddock up`, or name another with --url", file=sys.stderr)
        return int(Exit.CRASHED)
    except (BenchUnusable, TraceUnusable, ClientError) as error:
        print(f"paddock: {error}", file=sys.stderr)
        return int(Exit.CRASHED)
    print(table(done))
    _write(options, done)
    if done.ended == "interrupted":
        return command.INTERRUPTED
    if not all(verdict.held for verdict in done.asserts):
        return int(Exit.BROKEN)
    return int(Exit.OK) if done.calls.finished else int(Exit.CRASHED)


def _plan(options: Options, access: Access) -> Plan:
    """Read keys and trace, choose the model, and return the plan for the runner.

    Raises BenchUnusable, TraceUnusable, ClientError."""
    try:
        there = target(access.url, insecure=options.insecure)
    except ValueError as error:
        raise BenchUnusable(f"--url: {error}") from None
    trace = _trace(options)
    callers = _callers(options.keys) if options.keys else [Caller("", access.key)]
    model = options.model or _first_model(access.url, callers[0].key, options.insecure)
    return Plan(options, there, Form(model, not options.let_stop, options.temperature), callers, trace)


def _trace(options: Options) -> list[Recorded]:
    return read(options.trace) if options.trace else []


def _callers(path: Path) -> list[Caller]:
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise BenchUnusable(f"--keys: {path}: {error}") from None
    pairs = [line for line in lines if line and not line[0].startswith("#")]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise BenchUnusable(f"--keys: {path}: each line must be a name, a space and a key")
    return [Caller(name, key) for name, key in pairs]


def _first_model(url: str, key: str, insecure: bool) -> str:
    with Client(url, key, verify_ssl=not insecure) as client:
        models = client.models.list()
    for model in models:
        talks = model.architecture is None or "text" in model.architecture.output_modalities
        if talks and (model.status is None or model.status.value == "loaded"):
            return model.id
    raise BenchUnusable(f"no model is loaded at {url}; name one with --model")


def _check_writable(path: Path | None) -> None:
    """Raise BenchUnusable if the folder of a result file is missing: better before an hour of measuring than after."""
    if path is not None and not path.absolute().parent.is_dir():
        raise BenchUnusable(f"{path}: there is no folder {path.absolute().parent}; make it first")


def _write(options: Options, done: Document) -> None:
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(done), indent=1) + b"\n")
    if options.html:
        options.html.write_text(page(done), encoding="utf-8")
