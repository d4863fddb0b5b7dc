"""A soak fails for each thing that grows or is left behind, and for nothing else; and it shows what it found."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.soak.record import Plan, Record, Rest, Struck
from benchmarks.soak.report import print_report, write_report
from benchmarks.soak.storage import Stock, family
from benchmarks.soak.subjects import Life, Sample, Subject
from benchmarks.soak.verdict import findings, growths
from workers.protocol import keys

TOTAL_S = 1800.0


def sample(at_s: float, *, rss: float = 80.0, fds: int = 20, tasks: int = 12) -> Sample:
    return Sample(at_s, rss, rss - 5, fds, 4, tasks, 0, 0.0)


def stock(at_s: float, **more: int) -> Stock:
    return Stock(at_s, 8.0, {"pd:keys": 1, **more}, {"pd:keys": 1}, {"pd:keys": 2})


def rest(at_s: float, **more: int) -> Rest:
    return Rest(at_s, 0.2, True, {}, {}, [], stock(at_s), {"gateway-0": sample(at_s, **more)}, {"gateway-0": 7})


def sound() -> Record:
    """Half an hour of one process that does not grow."""
    samples = [sample(at_s, rss=80.0 + at_s % 3) for at_s in range(0, int(TOTAL_S), 5)]
    record = Record(Plan(TOTAL_S, 5.0, 0), ("gateway-0",), {"gateway-0": Subject("gateway-0", [Life(7, 0.0, samples)])})
    record.stocks = [stock(float(at_s)) for at_s in range(0, int(TOTAL_S), 5)]
    record.rests = [rest(at_s) for at_s in range(400, 1800, 70)]
    record.warm_at_s = 400.0
    record.num_deeds, record.exits = 9000, {"gateway-0, pid 7": 0}
    return record


def bad(record: Record) -> list[str]:
    return [one.what for one in findings(record) if not one.good]


def test_nothing_wrong() -> None:
    assert bad(sound()) == []


def was_not_there_for_long(record: Record) -> None:
    life = record.subjects["gateway-0"].life
    life.began_s, life.samples[:] = 1790.0, life.samples[-3:]


def leaks_memory(record: Record) -> None:
    life = record.subjects["gateway-0"].life
    life.samples[:] = [replace(one, rss=80 + 30 * one.at_s / 3600) for one in life.samples]


def leaks_files(record: Record) -> None:
    record.rests = [replace(rest(one.at_s, fds=20 + int(one.at_s / 60)), is_long=False) for one in record.rests]


def leaks_tasks(record: Record) -> None:
    record.rests = [replace(rest(one.at_s, tasks=12 + int(one.at_s / 60)), is_long=False) for one in record.rests]


def keeps_memory(record: Record) -> None:
    record.rests[-1].samples["gateway-0"] = sample(1790.0, rss=90.0)


def keeps_tasks(record: Record) -> None:
    record.rests[-1].samples["gateway-0"] = sample(1790.0, tasks=40)


def holds_a_lease(record: Record) -> None:
    record.rests[1].held["pd:{}:lease:"] = 1


def is_busy(record: Record) -> None:
    record.rests[2].busy["toy-0"] = 1.0


def breaks_the_data(record: Record) -> None:
    record.rests[0].breaches.append("lease x counts twice")


def fills_redis(record: Record) -> None:
    record.stocks[:] = [replace(one, used_mib=8 + 20 * one.at_s / 3600) for one in record.stocks]


def grows_a_hash(record: Record) -> None:
    record.rests[-1] = replace(record.rests[-1], stock=replace(stock(1790.0), elements={"pd:keys": 500}))


def keeps_keys_for_ever(record: Record) -> None:
    record.rests[-1] = replace(record.rests[-1], stock=replace(stock(1790.0), lasting={"pd:keys": 1, "pd:x": 9}))


def dies(record: Record) -> None:
    record.rests[-1].samples.clear()


def is_cut_off(record: Record) -> None:
    record.exits["gateway-0, pid 7"] = 75


def leaves_a_process(record: Record) -> None:
    record.orphans.append("python -m gateway.cli worker")


def leaves_a_record(record: Record) -> None:
    record.leftovers["pd:gateway:"] = 1


def is_surprised(record: Record) -> None:
    record.num_surprises = 1


def could_not_strike(record: Record) -> None:
    record.faults.append(Struck(3.0, "worker_killed", "TimeoutError: "))


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        (was_not_there_for_long, "processes that were measured for long enough"),
        (leaks_memory, "rss: what grows"),
        (leaks_files, "fds: what grows"),
        (leaks_tasks, "tasks: what grows"),
        (keeps_memory, "each process at the last rest"),
        (keeps_tasks, "each process at the last rest"),
        (holds_a_lease, "leases, tickets and calls left at 20 rests"),
        (is_busy, "leases, tickets and calls left at 20 rests"),
        (breaks_the_data, "data of admission at rests"),
        (fills_redis, "Redis: memory used"),
        (grows_a_hash, "Redis: more than at the first rest"),
        (keeps_keys_for_ever, "Redis: more than at the first rest"),
        (dies, "processes that are missing at the last rest"),
        (is_cut_off, "exit codes other than 0"),
        (leaves_a_process, "processes that are left"),
        (leaves_a_record, "records that are left in Redis"),
        (is_surprised, "answers that nobody should get"),
        (could_not_strike, "faults that could not be done"),
    ],
)
def test_each_harm_is_found(harm: Callable[[Record], None], what: str) -> None:
    record = sound()
    harm(record)
    assert bad(record) == [what]


def test_a_process_that_was_restarted_counts_from_its_last_start_and_warms_up_again() -> None:
    record = sound()
    growing = [sample(900 + at_s, rss=60 + at_s / 20) for at_s in range(0, 360, 5)]
    flat = [sample(1260 + at_s, rss=78.0) for at_s in range(0, 540, 5)]
    record.subjects["gateway-0"].lives.append(Life(8, 900.0, [*growing, *flat]))
    for one in record.rests:
        one.pids["gateway-0"] = 8 if one.at_s > 900 else 7
    [rss] = [growth for growth in growths(record) if growth.measure == "rss"]
    assert rss.slope.per_hour == 0
    assert rss.slope.span_s < 540
    assert bad(record) == []


def test_what_was_not_told_is_not_judged() -> None:
    record = sound()
    record.rests = [rest(one.at_s, tasks=-1) for one in record.rests]
    assert "tasks" not in {growth.measure for growth in growths(record)}


def test_the_report_shows_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = sound()
    leaks_memory(record)
    found = findings(record)
    print_report(record, found)
    told = capsys.readouterr().out
    assert "| gateway-0 | 1 x | 95 | +30.0 (+30.0 to +30.0) |" in told
    assert "| rss: what grows | gateway-0 +30.0/h |  | <= 6/h, or 3 in all | NOT reached |" in told
    write_report(record, found, tmp_path)
    document = json.loads((tmp_path / "soak.json").read_text())
    assert len(document["record"]["subjects"]["gateway-0"]["lives"][0]["samples"]) == 360
    assert [one["what"] for one in document["findings"] if not one["good"]] == ["rss: what grows"]
    page = (tmp_path / "soak.html").read_text()
    assert page.count("<svg ") == 4
    assert "http" not in page


@pytest.mark.parametrize(
    ("name", "known"),
    [
        (keys.calls("a:b"), "pd:{}:calls"),
        (keys.worker("m", "pod-1"), "pd:{}:worker:"),
        (keys.worker_leases("m", "pod-1"), "pd:{}:held:"),
        (keys.worker_heads("m", "pod-1"), "pd:{}:worker::heads"),
        (keys.workers("m"), "pd:{}:workers"),
        (keys.stream_log("0f3c"), "pd:stream:{}:log"),
        (keys.response("team", "resp_1"), "pd:responses:{}:of:"),
        (keys.gateway("g1"), "pd:gateway:"),
        (keys.NEWS, "pd:news"),
    ],
)
def test_keys_of_a_kind_are_a_family(name: str, known: str) -> None:
    assert family(name) == known
