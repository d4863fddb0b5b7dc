"""What the bench tells is what happened: against servers whose times are known."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gateway.bench.findings import quantile
from tests.support.timed_server import PROBES, Timing, timed_server
from tests.unit.gateway.bench.conftest import KEY, Bench
from workers.commands.command import INTERRUPTED
from workers.protocol.exits import Exit

ROOT = Path(__file__).resolve().parents[4]
SLACK_S = 0.25
"""How late a machine that does other things as well may be."""


def about(seconds: float) -> object:
    return pytest.approx(seconds + SLACK_S / 2, abs=SLACK_S / 2 + 0.005)


@pytest.mark.serial
def test_percentiles_are_those_of_the_server(bench: Bench) -> None:
    def plan(number: int) -> Timing:
        # One call in ten is slow to begin; each has one long gap.
        return Timing(0.8 if number % 10 == 9 else 0.1, (0.02, 0.02, 0.4, 0.02))

    with timed_server(plan) as server:
        code, found, _ = bench("--url", server.url, "--rate", "30", "--bursts", "0", "--count", "40")
    assert code == 0
    assert found["calls"] == {"sent": 40, "finished": 40, "failed": 0, "unfinished": 0, "warmup": 0}
    assert found["ttft_s"]["count"] == 40
    for share, name in ((0.5, "p50"), (0.9, "p90"), (0.95, "p95"), (1.0, "max")):
        first, gap = quantile(sorted(server.waited[PROBES:]), share), quantile(sorted(server.paused), share)
        assert first - 0.01 <= found["ttft_s"][name] <= first + SLACK_S, name
        assert gap - 0.05 <= found["itl_s"][name] <= gap + SLACK_S, name
    assert found["ttft_s"]["p50"] >= 0.1
    assert found["ttft_s"]["p95"] >= 0.8
    assert found["itl_s"]["count"] == 160
    assert found["itl_s"]["p90"] >= 0.35
    assert found["tpot_s"]["p50"] >= 0.11
    assert found["e2e_s"]["p50"] >= 0.56
    assert found["tokens"]["generated"] == found["tokens"]["pieces"] == 200
    assert found["tokens"]["cached_share"] == 0.5
    assert len(found["curves"]["ttft_s"]) == 101
    assert found["curves"]["ttft_s"][50] == found["ttft_s"]["p50"]


def test_waits_count_from_when_a_call_was_due(bench: Bench) -> None:
    """Twenty calls in half a second, to a server that needs two: who measures what it sent sees a tenth of the wait."""
    with timed_server(lambda number: Timing(0.1, alone=True)) as server:
        _, clocked, _ = bench("--url", server.url, "--rate", "40", "--bursts", "0", "--count", "20")
        server.asked.clear()
        _, closed, _ = bench("--url", server.url, "--concurrency", "1", "--count", "5")
    assert clocked["ttft_s"]["max"] > 1.4
    assert clocked["ttft_s"]["p50"] > 0.6
    assert closed["ttft_s"]["p50"] == about(0.1)


def test_callers_at_once(bench: Bench) -> None:
    with timed_server(lambda number: Timing(0.05, (0.05,))) as server:
        _, found, said = bench("--url", server.url, "--concurrency", "6", "--duration", "1.2", "--warmup", "0.2")
    assert 4 < found["rates"]["in_flight_mean"] <= 6
    assert 20 < found["rates"]["finished_per_s"] <= 60
    assert found["rates"]["tokens_per_s"] == pytest.approx(2 * found["rates"]["finished_per_s"], rel=0.25)
    assert found["measured_s"] == pytest.approx(1.0, abs=0.1)
    assert found["calls"]["warmup"] >= 6
    assert "answered in 1.0 s" in said


def test_errors_by_kind_and_no_key_anywhere(bench: Bench, tmp_path: Path) -> None:
    plans = [
        *(Timing(status=429), Timing(status=503), Timing(status=503)),
        *(Timing(0, (0.0,), cut=True), Timing(0, (0.0,), error="it broke")),
        *(Timing(0.0, (0.0,)), Timing(2.0)),
    ]
    with timed_server(lambda number: plans[number]) as server:
        page = tmp_path / "page.html"
        flags = ("--concurrency", "1", "--count", "7", "--timeout", "0.5", "--html", str(page))
        code, found, said = bench("--url", server.url, *flags, "--assert", "error_share<1%,finished>=1")
        assert set(server.keys) == {KEY}
    assert code == Exit.BROKEN
    assert found["errors"] == {"http_503": 2, "http_429": 1, "cut": 1, "in_stream": 1, "timeout": 1}
    assert found["calls"]["finished"] == 1
    assert [verdict["held"] for verdict in found["asserts"]] == [False, True]
    assert "it broke" in found["error_details"]["in_stream"]
    assert "no: ***" in found["error_details"]["http_429"]
    assert "BROKEN error_share<1%: 0.8571" in said
    assert KEY not in said + str(found) + page.read_text()


def test_a_connection_that_was_closed_while_idle_is_no_error(bench: Bench) -> None:
    with timed_server() as server:
        server.closes_idle = True
        _, found, _ = bench("--url", server.url, "--concurrency", "2", "--count", "20")
    assert found["calls"]["finished"] == 20


def test_the_queue_as_told(bench: Bench) -> None:
    def plan(number: int) -> Timing:
        if number < 2:
            return Timing(0.01, headers=("x-queue-position: 0",))
        return Timing(0.01, headers=(f"x-queue-position: {number}",), waiting="waiting position=9 wait_s=4.5")

    with timed_server(plan) as server:
        _, found, said = bench("--url", server.url, "--concurrency", "1", "--count", "5", "--slo", "ttft<5,itl<1s")
    assert (found["queue"]["told"], found["queue"]["waited"]) == (5, 3)
    assert found["queue"]["position"]["max"] == 4
    assert found["queue"]["predicted_wait_s"]["p50"] == 4.5
    assert found["goodput"]["share"] == 1.0
    assert "3 of 5 calls waited" in said


def test_teams_by_their_keys(bench: Bench, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# two\nred pk-red\nblue pk-blue\n")
    with timed_server(lambda number: Timing(status=429 if number == 3 else 200)) as server:
        _, found, said = bench("--url", server.url, "--keys", str(keys), "--concurrency", "1", "--count", "6")
        assert server.keys[PROBES:] == ["pk-red", "pk-blue"] * 3
    assert {name: (team["finished"], team["failed"]) for name, team in found["teams"].items()} == {
        "red": (3, 0),
        "blue": (2, 1),
    }
    assert "team red: 3 answered" in said
    assert "pk-red" not in said + str(found)


def test_prompts_are_as_long_as_the_server_counts(bench: Bench) -> None:
    """It counts two tokens a word."""
    with timed_server() as server:
        flags = ("--workload", "rag", "--prompt-tokens", "800", "--concurrency", "1", "--count", "30", "--max-context")
        bench("--url", server.url, *flags, "100000")
        lengths = [2 * len(body["messages"][1]["content"].split()) for body in server.asked[PROBES:]]
    assert 600 < sorted(lengths)[15] < 1100
    assert {body["ignore_eos"] for body in server.asked} == {True}


def test_the_limit_is_found(bench: Bench) -> None:
    """The server answers one after the other, 50 a second."""
    with timed_server(lambda number: Timing(0.02, alone=True)) as server:
        code, found, said = bench(
            "--url", server.url, "--find-limit", "ttft_p95<0.2", "--rate", "20", "--step", "0.8", "--bursts", "0"
        )
    limit = found["limit"]
    assert code == 0
    assert limit["sustainable_rate"] <= 60
    assert limit["steps"][0]["held"]
    assert not all(step["held"] for step in limit["steps"])
    assert "ttft_p95<0.2: " in next(step["why"] for step in limit["steps"] if not step["held"])
    assert f"sustainable: {limit['sustainable_rate']:.3g} calls/s" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_it_with_a_report(tmp_path: Path, number: signal.Signals) -> None:
    with timed_server(lambda number: Timing(0.02 if number < 3 else 60.0)) as server:
        command = [sys.executable, "-m", "gateway.cli", "bench", "--url", server.url, "--model", "m"]
        command += ["--rate", "20", "--bursts", "0", "--warmup", "0", "--state-dir", str(tmp_path)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
            deadline = time.monotonic() + 30
            while len(server.asked) < PROBES + 8 and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(running.pid, number)
            said, complained = running.communicate(timeout=10)
    assert running.returncode == INTERRUPTED, complained
    assert "Interrupted: this is what was until then" in said
    assert "\n3 of " in said
    assert "Traceback" not in complained


def test_what_can_not_be_done_is_one_line(bench: Bench, tmp_path: Path) -> None:
    for flags, words in (
        (("--url", "127.0.0.1:1"), "nothing answers at http://127.0.0.1:1"),
        (("--url", "ftp://x"), "--url: ftp://x is no http or https address"),
        (("--rate", "1", "--concurrency", "2"), "--rate and --concurrency exclude each other"),
        (("--rate", "fast"), "argument --rate: invalid number above 0 value: 'fast'"),
        (("--duration", "5", "--warmup", "5"), "--warmup 5 leaves nothing of --duration 5"),
        (("--assert", "ttft_p75<1"), "--assert: nothing is called ttft_p75; there are ttft_mean, ttft_p50"),
        (("--slo", "ttft"), "--slo: 'ttft' is no bound; give them like ttft<1.5"),
        (("--trace", str(tmp_path / "none")), "none: [Errno 2]"),
        (("--html", str(tmp_path / "no" / "a.html")), "there is no folder"),
        (("--portt", "1"), "--portt 1 (did you mean --port?)"),
    ):
        code, found, said = bench(*flags)
        assert code in (1, 2)
        assert not found
        assert words in said, said
        assert said.count("\n") == 1


def test_a_wrong_key_says_where_it_came_from(bench: Bench) -> None:
    with timed_server() as server:
        server.refuses = True
        code, _, said = bench("--url", server.url)
    assert code == 1
    assert "http_401" in said
    assert "give the key of that server with --api-key" in said
    assert KEY not in said
