"""The benchmark of the field: what it installs, how the gateways are set, and what it makes of what the crowds saw."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.field import SHAPES, Figures, Rest, Shape, Trial, crowd_rows, figures_of, rest_row, said
from benchmarks.field.crowd import Stream, cpu_seconds, processes_of, resident_bytes
from benchmarks.field.gateways import (
    SLOTS,
    Gateway,
    bifrost_config,
    litellm_config,
    llama_swap_config,
    wait_for_answer,
)
from benchmarks.field.install import Missing, forget_failures, installed
from benchmarks.load import Answer
from benchmarks.plain_upstream import LAST, token
from tests.support.stack import Process

URL = "http://127.0.0.1:9"
MODELS = ("at-once", "every-20ms")
SHAPE = Shape(10, 100, 50, 0.0)


def gateway(name: str) -> Gateway:
    return Gateway(name, "1.2.3", URL, "key", (os.getpid(),), ("--direct", URL))


def trial(cpu_s: float = 0.1, tokens: int = 200, ttft_ms: float = 7.0, most_bytes: int = 3 << 20) -> Trial:
    return Trial(cpu_s, tokens, 2.0, 10, most_bytes, 120.0, ttft_ms, 2.0)


def test_what_the_upstream_says_is_json() -> None:
    events = (token(3) + LAST % (7, 16)).decode().strip().split("\n\n")
    told = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert events[-1] == "data: [DONE]"
    assert told[0]["choices"][0]["delta"]["content"] == "t3 "
    assert told[-1]["choices"] == []
    assert told[-1]["usage"] == {"prompt_tokens": 9, "completion_tokens": 7, "total_tokens": 16}


@pytest.mark.parametrize(
    "words", [token(12), b'data: {"choices":[{"delta":{"role":"assistant","content":"t12 "}}]}\n\n']
)
def test_a_stream_counts_the_tokens_of_both_upstreams(words: bytes) -> None:
    stream = Stream()
    for data in (b'{"delta":{"role":"assistant","content":""}}', words + words, words, LAST % (3, 12)):
        stream.data_received(data)
    assert stream.num_tokens == 3


async def test_a_stream_is_whole_though_its_chunks_are_cut_within_words() -> None:
    stream = Stream(answer=Answer(sent=0.0), done=asyncio.get_running_loop().create_future())
    stream.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + token(1))
    stream.data_received(b'data: {"choices":[],"usage":{"completion_token\r\n2b\r\ns":1}}\n\ndata: [DONE]\n\n')
    stream.data_received(b"\r\n0\r\n\r\n")
    assert stream.done is not None
    assert stream.done.done()
    assert stream.answer is not None
    assert (stream.answer.error, stream.num_tokens) == ("", 1)


def test_what_a_process_uses_is_counted() -> None:
    (own,) = [pid for pid in processes_of([os.getpid()]) if pid == os.getpid()]
    before = cpu_seconds([own])
    assert resident_bytes([own]) > 1 << 20
    assert sum(range(100_000))
    assert cpu_seconds([own]) > before


def test_a_failure_is_remembered_until_it_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDOCK_BENCH_DIR", str(tmp_path))
    tries: list[str] = []

    def refused() -> Path:
        tries.append("a try")
        raise Missing("the registry says no")

    for _ in range(2):
        with pytest.raises(Missing, match="the registry says no"):
            installed("thing-1", refused)
    assert len(tries) == 1
    assert installed("thing-2", lambda: tmp_path) == tmp_path
    forget_failures()
    with pytest.raises(Missing):
        installed("thing-1", refused)
    assert len(tries) == 2


def test_a_gateway_that_ends_is_missing_and_says_why(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("line\nno such flag\n")
    ended = subprocess.Popen(["false"])
    ended.wait()
    with pytest.raises(Missing, match="it ended with 1: no such flag"):
        wait_for_answer(gateway("one"), Process("one", ended, log))


def test_each_gateway_knows_the_models_and_has_room_for_the_crowd() -> None:
    litellm = json.dumps(litellm_config(URL, MODELS))
    swap = json.dumps(llama_swap_config(URL, MODELS))
    for model in MODELS:
        assert f'"{model}"' in litellm
        assert f'"{model}"' in swap
    assert f'"concurrencyLimit": {2 * SLOTS}' in swap
    limits = json.loads(json.dumps(bifrost_config(URL)))["providers"]["openai"]["concurrency_and_buffer_size"]
    most = max(shape.streams for shape in SHAPES)
    assert limits["buffer_size"] >= limits["concurrency"] > most
    assert most < SLOTS


def test_figures_are_medians_and_leave_out_what_a_gateway_does_at_rest() -> None:
    trials = [trial(0.1), trial(0.3, ttft_ms=9.0), trial(0.2, ttft_ms=4.0)]
    found = figures_of(trials, Rest(1 << 20, 0.05), SHAPE)
    assert found.us_per_token == pytest.approx((0.2 - 0.05 * 2.0) / 200 * 1e6)
    assert found.ttft_added_ms == pytest.approx(5.0)
    assert found.bytes_per_stream == pytest.approx((2 << 20) / 10)
    assert found.share_in_time == pytest.approx(1.0)
    assert found.num_late == 0


def test_a_gateway_that_falls_behind_is_told_of() -> None:
    assert "in time" not in said(Figures(20.0, 1.0, 2048.0, 50.0, 0.97, 0))
    told = said(Figures(20.0, 1.04, 2048.0, 50.0, 0.61, 3))
    assert told.startswith("20.0 us/token, TTFT +1.0 ms, 2 KiB a stream, longest gap 50 ms, ")
    assert told.endswith(", only 61% of the tokens in time, 3 streams late to begin")


def test_rows_compare_with_nginx_and_keep_failures() -> None:
    gateways = {name: gateway(name) for name in ("nginx", "other", "third")}
    figures: dict[tuple[str, Shape], Figures | str] = {}
    for shape in SHAPES:
        figures["nginx", shape] = Figures(10.0, 0.5, 1024.0, 50.0, 1.0, 0)
        figures["other", shape] = Figures(25.0, 1.5, 4096.0, 60.0, 1.0, 0)
        figures["third", shape] = "3 streams failed"
    rows = crowd_rows(gateways, figures)
    assert [(row.what, row.ratio) for row in rows[:3]] == [
        ("nginx, 1 stream", "1.0 x"),
        ("other, 1 stream", "2.5 x"),
        ("third, 1 stream", ""),
    ]
    assert rows[2].figure == "failed: 3 streams failed"
    assert [row.what for row in rows[3::3]] == ["nginx, 64 streams", "nginx, 512 streams"]
    assert all(row.reached and not row.bar for row in rows)
    assert rest_row(gateways["other"], Rest(5 << 20, 0.012)).what == "other 1.2.3, at rest"
    assert rest_row(gateways["other"], Rest(5 << 20, 0.012)).figure == "5 MiB, 1.2% of a core"
