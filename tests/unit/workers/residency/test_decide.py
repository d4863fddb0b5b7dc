"""Pictures, and what is decided of them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.workers.residency.pictures import (
    GIB,
    NOW,
    failed,
    machine,
    model,
    picture,
    told,
    waits,
    worker,
)
from workers.residency.decide import decide
from workers.residency.picture import Device, Machine, Need, Picture, Share
from workers.residency.plan import CLOSED as CLOSED_REASONS
from workers.residency.plan import Wait
from workers.residency.policy import Group

A, B, C = model("a"), model("b"), model("c")
SLEEPY = model("a", weights=9, idle="sleep")
TWO_GPUS = machine(gpus=(24, 24))

TABLE: dict[str, tuple[Picture, list[str]]] = {
    # Loading on demand.
    "nobody calls": (picture([A, B]), []),
    "a call loads": (picture([A], [], [waits("a")]), ["start a m/gpu0"]),
    "many calls make one start": (picture([A], [], [waits("a", calls=50)]), ["start a m/gpu0"]),
    "it loads already": (picture([A], [worker("a1", status="loading", age_s=3)], [waits("a")]), []),
    "it is there": (picture([A], [worker("a1")], [waits("a")]), []),
    "two cold models at once": (picture([A, B], [], [waits("b", 9), waits("a")]), ["start b m/gpu0", "start a m/gpu0"]),
    "two beside each other, a third waits": (
        picture([A, B, C], [], [waits("b", 9), waits("a"), waits("c", 1)]),
        ["start b m/gpu0", "start a m/gpu0", "wait c busy"],
    ),
    "a loading one counts whole": (
        picture([A, B], [worker("a1", 20, status="loading", age_s=1)], [waits("a"), waits("b")]),
        ["wait b busy"],
    ),
    "one that loads for nobody any more leaves": (
        picture([A, B], [worker("a1", 20, status="loading", age_s=1)], [waits("b")]),
        ["stop a1 for b", "wait b freeing"],
    ),
    "one that loads for nobody stays where nobody wants its place": (
        picture([A, B], [worker("a1", 10, status="loading", age_s=1)], [waits("b")]),
        ["start b m/gpu0"],
    ),
    "one that is preloaded is not given up": (
        picture([model("a", preload=True), B], [worker("a1", 20, status="loading", age_s=1)], [waits("b")]),
        ["wait b busy"],
    ),
    "the one of the higher priority loads first": (
        picture([A, model("b", 20, priority=5)], [], [waits("a", 9), waits("b", 1)]),
        ["start b m/gpu0", "wait a busy"],
    ),
    "autoload is off": (picture([model("a", autoload=False)], [], [waits("a")]), ["wait a autoload"]),
    "autoload is off, an admin loads": (
        picture([model("a", autoload=False)], [], [waits("a", calls=0, is_asked_by_admin=True)]),
        ["start a m/gpu0"],
    ),
    "it failed a moment ago": (picture([A], [], [waits("a")], failures=(failed("a"),)), ["wait a failed"]),
    "it failed long ago": (picture([A], [], [waits("a")], failures=(failed("a", -1),)), ["start a m/gpu0"]),
    "it failed on another machine": (
        picture([A], [], [waits("a")], machines=[machine("m"), machine("n")], failures=(failed("a", machine="m"),)),
        ["start a n/gpu0"],
    ),
    "it is too large": (picture([model("a", 30)], [], [waits("a")]), ["wait a too_large"]),
    "it is on no machine": (picture([model("a", machines=frozenset())], [], [waits("a")]), ["wait a too_large"]),
    # Who makes room.
    "an idle one leaves": (
        picture([A, B], [worker("a1", 20)], [waits("b")]),
        ["stop a1 for b", "wait b freeing"],
    ),
    "its memory is in use until it is gone": (
        picture([A, B], [worker("a1", 20, status="draining")], [waits("b")]),
        ["wait b freeing"],
    ),
    "the one used longest ago": (
        picture([A, B, C], [worker("a1", idle_s=90), worker("b1", idle_s=95)], [waits("c")]),
        ["stop b1 for c", "wait c freeing"],
    ),
    "the one of the lower priority": (
        picture([A, model("b", priority=1), C], [worker("a1", idle_s=90), worker("b1", idle_s=95)], [waits("c")]),
        ["stop a1 for c", "wait c freeing"],
    ),
    "one that suffices alone, rather than two used longer ago": (
        picture(
            [model("a", 6), model("b", 6), model("c", 12), model("d", 12)],
            [worker("a1", 6, idle_s=99), worker("b1", 6, idle_s=98), worker("c1", 12, idle_s=50)],
            [waits("d")],
        ),
        ["stop c1 for d", "wait d freeing"],
    ),
    "no more than needed": (
        picture(
            [model("a", 2), model("b", 9), model("c", 9), model("d", 16)],
            [worker("a1", 2, idle_s=99), worker("b1", 9, idle_s=98), worker("c1", 9, idle_s=97)],
            [waits("d")],
        ),
        ["stop b1 for d", "stop c1 for d", "wait d freeing"],
    ),
    "one of two workers of a model, rather than a model's only one": (
        picture(
            [model("a", max=2), B, model("c", 8)],
            [worker("a1", 8), worker("a2", 8, idle_s=9), worker("b1", 8)],
            [waits("c")],
        ),
        ["stop a1 for c", "wait c freeing"],
    ),
    "a busy one does not": (picture([A, B], [worker("a1", 20, calls=1)], [waits("b")]), ["wait b busy"]),
    "one whose calls wait does not": (
        picture([A, B], [worker("a1", 20)], [waits("a"), waits("b")]),
        ["wait b busy"],
    ),
    "one that was just loaded does not": (
        picture([A, B], [worker("a1", 20, age_s=9, idle_s=5)], [waits("b")]),
        ["wait b busy"],
    ),
    "a pinned one does not": (
        picture([model("a", pinned=True), B], [worker("a1", 20)], [waits("b", 500)]),
        ["wait b no_room"],
    ),
    "one that min keeps does not": (
        picture([model("a", min=1), B], [worker("a1", 20)], [waits("b", 500)]),
        ["wait b no_room"],
    ),
    "beyond min it does": (
        picture([model("a", min=1, max=2), B], [worker("a1"), worker("a2", idle_s=150)], [waits("b")]),
        ["stop a2 for b", "wait b freeing"],
    ),
    "taking turns, one that was called a moment ago stays for the next call": (
        picture([A, model("b", left_at=NOW - 20)], [worker("a1", 20, idle_s=1)], [waits("b")]),
        ["wait b busy"],
    ),
    # Fairness.
    "after patience a busy one takes no more calls": (
        picture([A, B], [worker("a1", 20, calls=3)], [waits("b", 30)]),
        ["reserve a1 for b", "wait b freeing"],
    ),
    "it is reserved already": (
        picture([A, model("b", 20)], [worker("a1", 20, calls=3, status="reserved")], [waits("b", 35), waits("a", 9)]),
        ["wait b freeing", "wait a busy"],
    ),
    "it is reserved and its calls have ended": (
        picture([A, model("b", 20)], [worker("a1", 20, status="reserved")], [waits("b", 35), waits("a", 99)]),
        ["stop a1 for b", "wait b freeing", "wait a busy"],
    ),
    "who wanted it is gone": (
        picture([A, B], [worker("a1", 20, calls=3, status="reserved")], [waits("a", 99)]),
        ["release a1"],
    ),
    "an idle one rather than a reserved busy one": (
        picture([A, B, C], [worker("a1", 12, calls=3, status="reserved"), worker("c1", 12)], [waits("b", 35)]),
        ["stop c1 for b", "wait b freeing", "release a1"],
    ),
    "of busy ones the less important": (
        picture(
            [model("a", priority=1), B, C], [worker("a1", 12, calls=1), worker("c1", 12, calls=1)], [waits("b", 30)]
        ),
        ["reserve c1 for b", "wait b freeing"],
    ),
    "whoever had its turn waits from then on": (
        picture(
            [model("a", left_at=NOW - 1), B, C], [worker("c1", 20, status="draining")], [waits("a", 99), waits("b", 40)]
        ),
        ["wait b freeing", "wait a freeing"],
    ),
    "one that has served none of its calls yet stays": (
        picture([A, B], [worker("a1", 20, age_s=15, idle_s=99, taken=0)], [waits("a", 50), waits("b", 40)]),
        ["wait b resident"],
    ),
    "memory is kept for the one that waits longest": (
        picture(
            [A, model("b", 20), model("c", 4)],
            [worker("a1", 20, status="draining")],
            [waits("b", 40), waits("c", 35)],
        ),
        ["wait b freeing", "start c m/gpu0"],
    ),
    "what is promised is not taken by others": (
        picture(
            [A, model("b", 22), model("c", 4)],
            [worker("a1", 20, status="draining")],
            [waits("b", 40), waits("c", 35)],
        ),
        ["wait b freeing", "wait c resident"],
    ),
    # Numbers of workers.
    "min is kept": (picture([model("a", 4, min=2, max=3)]), ["start a m/gpu0", "start a m/gpu0"]),
    "what min keeps serves calls": (picture([model("a", 4, min=1, max=3)], [], [waits("a")]), ["start a m/gpu0"]),
    "what min keeps serves calls, when there is room": (
        picture([model("a", min=1, max=3), B], [worker("b1", 20)], [waits("a")]),
        ["stop b1 for a", "wait a freeing"],
    ),
    "min makes room": (
        picture([model("a", min=1), B], [worker("b1", 20, calls=1)]),
        ["reserve b1 for a", "wait a freeing"],
    ),
    "preload takes free memory": (picture([model("a", preload=True)]), ["start a m/gpu0"]),
    "preload is done once": (picture([model("a", preload=True, was_loaded=True)]), []),
    "preload makes no room": (picture([model("a", preload=True), B], [worker("b1", 20)]), []),
    "more workers while calls wait long": (
        picture([model("a", max=2)], [worker("a1", calls=4)], [waits("a", 9, 30, predicted_wait_s=20)]),
        ["start a m/gpu0"],
    ),
    "not for short waits": (
        picture([model("a", max=2)], [worker("a1", calls=4)], [waits("a", 9, 30, predicted_wait_s=5)]),
        [],
    ),
    "not above max": (
        picture([model("a", max=1)], [worker("a1", calls=4)], [waits("a", 9, 30, predicted_wait_s=20)]),
        [],
    ),
    "not while one loads": (
        picture(
            [model("a", 6, max=3)],
            [worker("a1", 6, calls=4), worker("a2", 6, status="loading", age_s=2)],
            [waits("a", 9, 30, predicted_wait_s=20)],
        ),
        [],
    ),
    "more workers do not take what was used a moment ago": (
        picture(
            [model("a", 12, max=2), B],
            [worker("a1", 12, calls=4), worker("b1", 12, idle_s=20)],
            [waits("a", 90, 30, predicted_wait_s=20)],
        ),
        [],
    ),
    "more workers on the other GPU": (
        picture(
            [model("a", 6, max=2)],
            [worker("a1", 6, calls=4)],
            [waits("a", 9, 30, predicted_wait_s=20)],
            machines=[TWO_GPUS],
        ),
        ["start a m/gpu1"],
    ),
    "above max the idle one leaves": (
        picture([model("a", 6)], [worker("a1", 6, calls=1), worker("a2", 6)]),
        ["stop a2"],
    ),
    "above max a busy one drains": (
        picture([model("a", 6)], [worker("a1", 6, calls=1, idle_s=2), worker("a2", 6, calls=1, idle_s=1)]),
        ["drain a1"],
    ),
    # Replacing workers that have other settings than the catalog.
    "a successor starts beside a stale one": (
        picture([A], [worker("a1", calls=1, stale=True)]),
        ["start a m/gpu0 for a1"],
    ),
    "one at a time": (
        picture([model("a", 4, max=2)], [worker("a1", 4, stale=True), worker("a2", 4, stale=True, calls=1)]),
        ["start a m/gpu0 for a1"],
    ),
    "not while a successor loads": (
        picture(
            [model("a", 4, max=3)],
            [
                worker("a1", 4, stale=True),
                worker("a2", 4, stale=True),
                worker("a3", 4, status="loading", replaces="a1"),
            ],
        ),
        [],
    ),
    "a successor does not count above max": (
        picture([A], [worker("a1", stale=True, calls=2), worker("a2", status="loading", age_s=1, replaces="a1")]),
        [],
    ),
    "the stale one leaves when its successor is there": (
        picture([A], [worker("a1", stale=True), worker("a2", age_s=0, replaces="a1")]),
        ["reserve a1 for a"],
    ),
    "its calls end first": (
        picture([A], [worker("a1", stale=True, calls=1), worker("a2", age_s=0, replaces="a1")]),
        ["reserve a1 for a"],
    ),
    "however long they take": (
        picture(
            [A],
            [worker("a1", stale=True, calls=1, status="reserved"), worker("a2", calls=4, replaces="a1")],
            [waits("a", 99)],
        ),
        [],
    ),
    "and it stops then": (
        picture([A], [worker("a1", stale=True, status="reserved"), worker("a2", replaces="a1")]),
        ["stop a1"],
    ),
    "the next one is replaced though the last one's calls still run": (
        picture(
            [model("a", 4, max=2)],
            [
                worker("a1", 4, stale=True, calls=1, status="reserved"),
                worker("a2", 4, stale=True, calls=1),
                worker("a3", 4, replaces="a1"),
            ],
        ),
        ["start a m/gpu0 for a2"],
    ),
    "without room the stale one leaves first": (
        picture([model("a", 20)], [worker("a1", 20, stale=True)]),
        ["reserve a1 for a"],
    ),
    "without room a busy one takes no more calls": (
        picture([model("a", 20)], [worker("a1", 20, stale=True, calls=1)]),
        ["reserve a1 for a"],
    ),
    "and stops when nothing is on its way to it any more": (
        picture([model("a", 20)], [worker("a1", 20, stale=True, status="reserved")]),
        ["stop a1"],
    ),
    "calls wait for its successor": (
        picture([model("a", 20)], [worker("a1", 20, stale=True, calls=1, status="reserved")], [waits("a", 9)]),
        ["wait a freeing"],
    ),
    "which starts when it is gone": (picture([model("a", 20)], [], [waits("a", 9)]), ["start a m/gpu0"]),
    "but not in vain": (
        picture([model("a", 20)], [worker("a1", 20, stale=True, calls=1, status="reserved")], [waits("a", 30)]),
        ["release a1"],
    ),
    "nor is it taken from them again before they have begun": (
        picture([model("a", 20)], [worker("a1", 20, stale=True, calls=1)], [waits("a", 31)]),
        [],
    ),
    "without room one of several at a time": (
        picture(
            [model("a", 12, max=2)],
            [worker("a1", 12, stale=True, calls=1, status="reserved"), worker("a2", 12, stale=True, calls=1)],
        ),
        [],
    ),
    "one that loads with outdated settings stops": (
        picture([A], [worker("a1", status="loading", age_s=1, stale=True)], [waits("a")]),
        ["stop a1", "start a m/gpu0"],
    ),
    "a successor that is outdated itself takes the place all the same": (
        picture([model("a", 4)], [worker("a1", 4, stale=True), worker("a2", 4, stale=True, replaces="a1")]),
        ["reserve a1 for a", "start a m/gpu0 for a2"],
    ),
    "settings that are the old ones again": (
        picture(
            [model("a", 4)], [worker("a1", 4, status="reserved", calls=1), worker("a2", 4, stale=True, replaces="a1")]
        ),
        ["release a1"],
    ),
    "the successor leaves then": (
        picture([model("a", 4)], [worker("a1", 4, calls=1), worker("a2", 4, stale=True, replaces="a1")]),
        ["reserve a2 for a"],
    ),
    "settings that can't be loaded replace nobody": (
        picture([A], [worker("a1", stale=True)], failures=(failed("a"),)),
        [],
    ),
    "min is kept while a worker is replaced": (
        picture(
            [model("a", 4, min=1, max=2, ttl_s=60)],
            [worker("a1", 4, stale=True, idle_s=90), worker("a2", 4, status="loading", age_s=1, replaces="a1")],
        ),
        [],
    ),
    "other models' calls come before successors": (
        picture([A, model("b", 14)], [worker("a1", stale=True, calls=1)], [waits("b")]),
        ["start b m/gpu0", "reserve a1 for a"],
    ),
    "a successor on the same machine": (
        picture([model("a", 4)], [worker("a1", 4, stale=True)], machines=[machine("l", gpus=(4,)), machine("m")]),
        ["start a m/gpu0 for a1"],
    ),
    # Leaving.
    "after its ttl": (picture([model("a", ttl_s=60)], [worker("a1", idle_s=60)]), ["stop a1"]),
    "after its ttl it sleeps": (
        picture([model("a", ttl_s=60, idle="sleep")], [worker("a1", idle_s=60)]),
        ["stop a1 to sleep"],
    ),
    "its last worker, not another one": (
        picture([model("a", ttl_s=60, idle="sleep", max=2)], [worker("a1", 4, idle_s=60), worker("a2", 4, idle_s=9)]),
        ["stop a1"],
    ),
    "one that gives way to others sleeps": (
        picture([SLEEPY, model("b", 20)], [worker("a1")], [waits("b")], machines=[machine(host=9)]),
        ["stop a1 for b to sleep", "wait b freeing"],
    ),
    "unless main memory has no room for its weights": (
        picture([SLEEPY, model("b", 20)], [worker("a1")], [waits("b")], machines=[machine(host=8.9)]),
        ["stop a1 for b", "wait b freeing"],
    ),
    "or the other one takes it": (
        picture(
            [SLEEPY, model("b", need=Need(20 * GIB, host_bytes=6 * GIB))],
            [worker("a1")],
            [waits("b")],
            machines=[machine(host=14)],
        ),
        ["stop a1 for b", "wait b freeing"],
    ),
    "or others sleep in it": (
        picture(
            [SLEEPY, model("b", 20), model("c", weights=6, asleep_on=frozenset("m"))],
            [worker("a1")],
            [waits("b")],
            machines=[machine(host=14)],
        ),
        ["stop a1 for b", "wait b freeing"],
    ),
    "or the one that it makes room for": (
        picture(
            [SLEEPY, model("b", 20, weights=18, asleep_on=frozenset("m"))],
            [worker("a1")],
            [waits("b")],
            machines=[machine(host=26)],
        ),
        ["stop a1 for b", "wait b freeing"],
    ),
    "or one beside it": (
        picture(
            [SLEEPY, model("b", 20), model("c", weights=9, idle="sleep")],
            [worker("a1"), worker("c1", idle_s=50)],
            [waits("b")],
            machines=[machine(host=17)],
        ),
        ["stop a1 for b to sleep", "stop c1 for b", "wait b freeing"],
    ),
    "or its weights are not known": (
        picture([model("a", idle="sleep"), model("b", 20)], [worker("a1")], [waits("b")]),
        ["stop a1 for b", "wait b freeing"],
    ),
    "or it has another worker": (
        picture(
            [model("a", weights=9, idle="sleep", max=2), model("b", 20)],
            [worker("a1"), worker("a2", on="n")],
            [waits("b")],
            machines=[machine(), machine("n")],
        ),
        ["stop a1 for b", "wait b freeing"],
    ),
    "or it has other settings by now": (
        picture([SLEEPY, model("b", 20)], [worker("a1", stale=True)], [waits("b")]),
        ["stop a1 for b", "wait b freeing"],
    ),
    "or it was not loaded yet": (
        picture([SLEEPY, model("b", 20)], [worker("a1", status="loading", age_s=1)], [waits("b")]),
        ["stop a1 for b", "wait b freeing"],
    ),
    "in main memory its weights would leave no room": (
        picture([SLEEPY, model("b", 20)], [worker("a1", device="cpu")], [waits("b")], machines=[machine("m", (), 28)]),
        ["stop a1 for b", "wait b freeing"],
    ),
    "in main memory with room for both it leaves for a rule": (
        picture(
            [SLEEPY, model("b", 20)],
            [worker("a1", device="cpu")],
            [waits("b")],
            machines=[machine("m", (), 29)],
            models_max=1,
        ),
        ["stop a1 for b to sleep", "wait b freeing"],
    ),
    "and the other one takes the pages that are kept of it": (
        picture(
            [SLEEPY, model("b", 20, weights=18, asleep_on=frozenset("m"))],
            [worker("a1", device="cpu")],
            [waits("b")],
            machines=[machine("m", (), 29)],
            models_max=1,
        ),
        ["stop a1 for b to sleep", "wait b freeing"],
    ),
    "one with calls is reserved first": (
        picture([SLEEPY, model("b", 20)], [worker("a1", calls=1)], [waits("b", 40)]),
        ["reserve a1 for b", "wait b freeing"],
    ),
    "and sleeps when they have ended": (
        picture([SLEEPY, model("b", 20)], [worker("a1", status="reserved")], [waits("b", 40)]),
        ["stop a1 for b to sleep", "wait b freeing"],
    ),
    "of two places the one where it sleeps": (
        picture(
            [A, model("b", 20, asleep_on=frozenset("n")), C],
            [worker("a1"), worker("c1", on="n", idle_s=50)],
            [waits("b")],
            machines=[machine(), machine("n")],
        ),
        ["stop c1 for b", "wait b freeing"],
    ),
    "but nobody of a higher priority leaves for that": (
        picture(
            [A, model("b", 20, asleep_on=frozenset("n")), model("c", priority=1)],
            [worker("a1"), worker("c1", on="n", idle_s=50)],
            [waits("b")],
            machines=[machine(), machine("n")],
        ),
        ["stop a1 for b", "wait b freeing"],
    ),
    "a call wakes what calls don't load": (
        picture([model("a", autoload=False, asleep_on=frozenset({"m"}))], [], [waits("a")]),
        ["start a m/gpu0"],
    ),
    "it wakes where it sleeps": (
        picture(
            [model("a", asleep_on=frozenset({"n"}))],
            [],
            [waits("a")],
            machines=[machine(gpus=(12,)), machine("n", gpus=(24,))],
        ),
        ["start a n/gpu0"],
    ),
    "before its ttl": (picture([model("a", ttl_s=60)], [worker("a1", idle_s=59)]), []),
    "not below min by ttl": (picture([model("a", ttl_s=60, min=1)], [worker("a1", idle_s=90)]), []),
    "not by ttl while calls wait": (picture([model("a", ttl_s=60)], [worker("a1", idle_s=90)], [waits("a")]), []),
    "unloaded while idle": (picture([A], [worker("a1")], unloaded=frozenset("a")), ["stop a1"]),
    "unloaded while busy": (picture([A], [worker("a1", calls=2)], unloaded=frozenset("a")), ["drain a1"]),
    "unloaded while it loads": (
        picture([A], [worker("a1", status="loading", age_s=2)], unloaded=frozenset("a")),
        ["stop a1"],
    ),
    "unloaded, and calls wait": (picture([A], [], [waits("a")], unloaded=frozenset("a")), ["wait a unloaded"]),
    "unloaded, though min keeps it": (picture([model("a", min=1)], [], unloaded=frozenset("a")), []),
    "not in the catalog any more": (picture([A], [worker("b1", calls=1), worker("b2", 4)]), ["drain b1", "stop b2"]),
    "its machine is being emptied": (
        picture(
            [A, B],
            [worker("a1", calls=1), worker("b1")],
            [waits("b")],
            machines=[machine(is_leaving=True), machine("n")],
        ),
        ["drain a1", "stop b1", "start b n/gpu0"],
    ),
    "its machine is not there any more": (picture([A], [worker("a1", on="gone")], [waits("a")]), ["start a m/gpu0"]),
    # Groups and models_max.
    "a group has one at once": (
        picture(
            [model("a", 4, group="g"), model("b", 4, group="g")],
            [worker("a1", 4)],
            [waits("b")],
            groups={"g": Group(at_once=1)},
        ),
        ["stop a1 for b", "wait b freeing"],
    ),
    "until the other is gone": (
        picture(
            [model("a", 4, group="g"), model("b", 4, group="g")],
            [worker("a1", 4, status="draining")],
            [waits("b")],
            groups={"g": Group(at_once=1)},
        ),
        ["wait b freeing"],
    ),
    "a group has one at once on each machine": (
        picture(
            [model("a", 4, group="g"), model("b", 4, group="g")],
            [worker("a1", 4)],
            [waits("b")],
            machines=[machine(), machine("n")],
            groups={"g": Group(at_once=1)},
        ),
        ["start b n/gpu0"],
    ),
    "two of a group at the same moment": (
        picture(
            [model("a", 4, group="g"), model("b", 4, group="g")],
            [],
            [waits("a", 9), waits("b")],
            groups={"g": Group(at_once=1)},
        ),
        ["start a m/gpu0", "wait b busy"],
    ),
    "an exclusive group wants the machine": (
        picture(
            [model("a", 4), model("b", 4, group="g"), model("c", 4, min=1), model("d", 4)],
            [worker("a1", 4), worker("c1", 4), worker("d1", 4)],
            [waits("b")],
            groups={"g": Group(exclusive=True)},
        ),
        ["stop a1 for b", "stop d1 for b", "wait b freeing"],
    ),
    "others want the machine of an exclusive group": (
        picture(
            [model("a", 4), model("b", 4, group="g")],
            [worker("b1", 4)],
            [waits("a")],
            groups={"g": Group(exclusive=True)},
        ),
        ["stop b1 for a", "wait a freeing"],
    ),
    "together they load": (
        picture(
            [model("a", 4, group="g"), model("b", 5, group="g")], [], [waits("a")], groups={"g": Group(together=True)}
        ),
        ["start b m/gpu0", "start a m/gpu0"],
    ),
    "together they leave": (
        picture(
            [model("a", 4, group="g"), model("b", 5, group="g"), model("c", 20)],
            [worker("a1", 4), worker("b1", 5)],
            [waits("c")],
            groups={"g": Group(together=True)},
        ),
        ["stop a1 for c", "stop b1 for c", "wait c freeing"],
    ),
    "together they stay while one is busy": (
        picture(
            [model("a", 4, group="g"), model("b", 5, group="g"), model("c", 20)],
            [worker("a1", 4), worker("b1", 5, calls=1)],
            [waits("c")],
            groups={"g": Group(together=True)},
        ),
        ["wait c busy"],
    ),
    "one of those together is missing": (
        picture(
            [model("a", 4, group="g"), model("b", 5, group="g")], [worker("a1", 4)], groups={"g": Group(together=True)}
        ),
        ["start b m/gpu0"],
    ),
    "models_max": (
        picture([model("a", 2), model("b", 2)], [worker("a1", 2)], [waits("b")], models_max=1),
        ["stop a1 for b", "wait b freeing"],
    ),
    "models_max, and the other is busy": (
        picture([model("a", 2), model("b", 2)], [worker("a1", 2, calls=1)], [waits("b")], models_max=1),
        ["wait b busy"],
    ),
    "models_max, the place is promised, and a third waits": (
        picture([A, B, C], [worker("a1", 2)], [waits("b", 9), waits("c")], models_max=1),
        ["stop a1 for b", "wait b freeing", "wait c busy"],
    ),
    "models_max, a reserved one is not loaded beside itself": (
        picture([A, B], [worker("a1", 2, calls=1, status="reserved")], [waits("a"), waits("b", 40)], models_max=1),
        ["wait b freeing", "wait a busy"],
    ),
    # Devices.
    "the fullest GPU that has room": (
        picture([A, B], [worker("a1", device="gpu1")], [waits("b")], machines=[TWO_GPUS]),
        ["start b m/gpu1"],
    ),
    "the machine that it fits best": (
        picture([A], [], [waits("a")], machines=[machine(gpus=(80,)), machine("n", (12,)), machine("o")]),
        ["start a n/gpu0"],
    ),
    "split where one is too small": (
        picture([model("a", 40)], [], [waits("a")], machines=[TWO_GPUS]),
        ["start a m/gpu0+gpu1"],
    ),
    "not split over machines": (
        picture([model("a", 40)], [], [waits("a")], machines=[machine(), machine("n")]),
        ["wait a too_large"],
    ),
    "on the processor": (picture([A], [], [waits("a")], machines=[machine(gpus=(), host=16)]), ["start a m/cpu"]),
    "not enough main memory beside the GPU": (
        picture([model("a", need=Need(4 * GIB, host_bytes=70 * GIB))], [], [waits("a")]),
        ["wait a too_large"],
    ),
    "a GPU that others use": (
        picture(
            [A],
            [],
            [waits("a")],
            machines=[Machine("m", (Device("gpu0", 24 * GIB, free_bytes=9 * GIB), Device("cpu", 64 * GIB)))],
        ),
        ["wait a others"],
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_what_is_decided(name: str) -> None:
    shown, expected = TABLE[name]
    assert told(decide(shown, NOW)) == expected


@pytest.mark.parametrize("name", TABLE)
def test_the_order_of_a_picture_does_not_matter(name: str) -> None:
    shown, _ = TABLE[name]
    turned = replace(shown, workers=shown.workers[::-1], demand=shown.demand[::-1], failures=shown.failures[::-1])
    assert decide(turned, NOW) == decide(shown, NOW)


@pytest.mark.parametrize("name", TABLE)
def test_what_is_told_is_for_people(name: str) -> None:
    for action in decide(TABLE[name][0], NOW).actions:
        about = {action.model, getattr(action, "wanted_by", ""), "machine"} - {""}
        assert any(each in action.why.whole for each in about), action
        assert "\n" not in action.why.whole


CLOSED: dict[str, tuple[Picture, list[str]]] = {
    "it fits": (picture([A]), []),
    "no machine is so large": (picture([model("a", 30), B]), ["a too_large"]),
    "another machine is": (picture([model("a", 30)], machines=[machine(), machine("n", (48,))]), []),
    "it may not run there": (
        picture([model("a", 30, machines=frozenset("m"))], machines=[machine(), machine("n", (48,))]),
        ["a too_large"],
    ),
    "that one is being emptied": (
        picture([model("a", 30)], machines=[machine(), machine("n", (48,), is_leaving=True)]),
        ["a too_large"],
    ),
    "no machine stays": (picture([model("a", 30)], machines=[machine(is_leaving=True)]), []),
    "its split does not fit": (
        picture([model("a", need=Need(20 * GIB, split=(9, 1)))], machines=[machine(gpus=(12, 12))]),
        ["a too_large"],
    ),
    "too large together": (
        picture([model("a", 14, group="g"), model("b", 14, group="g")], groups={"g": Group(together=True)}),
        ["a too_large", "b too_large"],
    ),
    "min keeps what is loaded": (picture([model("a", 20, min=1), B], [worker("a1", 20)]), ["b no_room"]),
    "of two workers min keeps one": (
        picture([model("a", 10, min=1, max=2), B, model("c", 20)], [worker("a1"), worker("a2")]),
        ["c no_room"],
    ),
    "what is loaded is pinned": (
        picture([model("a", 20, pinned=True), B], [worker("a1", 20, calls=1)]),
        ["b no_room"],
    ),
    "what is not loaded does not stay": (picture([model("a", 20, pinned=True), B]), []),
    "what is loaded may leave": (picture([model("a", 20), B], [worker("a1", 20, calls=1)]), []),
    "models_max": (picture([model("a", 2, min=1), B], [worker("a1", 2)], models_max=1), ["b no_room"]),
    "a group": (
        picture(
            [model("a", 4, group="g", pinned=True), model("b", 4, group="g")],
            [worker("a1", 4)],
            groups={"g": Group(at_once=1)},
        ),
        ["b no_room"],
    ),
    "others use the memory": (
        picture([A], machines=[Machine("m", (Device("gpu0", 24 * GIB, free_bytes=9 * GIB), Device("cpu", 64 * GIB)))]),
        [],
    ),
    "an admin has unloaded it, and a call loads it": (picture([model("a", 30)], unloaded=frozenset("a")), []),
    "its machine tells that it has failed": (picture([model("a", 30)], failures=(failed("a"),)), []),
    "calls don't load it anyhow": (picture([model("a", 30, autoload=False)]), []),
    "it is there": (picture([model("a", 20, min=1)], [worker("a1", 20)]), []),
    "somebody waits, and is told": (picture([model("a", 30)], [], [waits("a")]), []),
    "it is kept, which is told": (picture([model("a", 30, min=1)]), []),
}
"""Pictures, and the models in them that nobody calls and that no call would load."""


@pytest.mark.parametrize("name", CLOSED)
def test_which_models_no_call_would_load(name: str) -> None:
    shown, expected = CLOSED[name]
    assert [f"{wait.model} {wait.reason}" for wait in decide(shown, NOW).closed] == expected


@pytest.mark.parametrize("name", [*TABLE, *CLOSED])
def test_a_call_for_a_closed_model_is_told_the_same_and_no_other_one_is(name: str) -> None:
    shown = {**TABLE, **CLOSED}[name][0]
    closed = {wait.model: wait for wait in decide(shown, NOW).closed}
    called = {demand.model for demand in shown.demand} | {each.model for each in shown.workers}
    for uncalled in {each.name for each in shown.models if each.policy.autoload and not each.policy.min} - called:
        plan = decide(replace(shown, demand=(*shown.demand, waits(uncalled, 0))), NOW)
        found = next((wait for wait in plan.waits() if wait.model == uncalled), None)
        if uncalled in closed:
            assert found == closed[uncalled]
        elif not shown.failures and all(not machine.is_leaving for machine in shown.machines):
            assert found is None or found.reason not in CLOSED_REASONS, found


def test_a_model_that_a_fallback_stands_in_for_is_loaded_and_nobody_with_calls_gives_way() -> None:
    elsewhere = replace(waits("b", 300, calls=0), num_elsewhere=3)
    plan = decide(picture([A, B], [], [elsewhere]), NOW)
    assert told(plan) == ["start b m/gpu0"]
    assert plan.actions[0].why.whole == "3 calls are served by a fallback of b"
    assert told(decide(picture([A, B], [worker("a1", 20)], [elsewhere]), NOW))[0] == "stop a1 for b", "it is idle"
    waiting = decide(picture([A, B], [worker("a1", 20, calls=1)], [elsewhere]), NOW)
    assert told(waiting) == ["wait b busy"], "nobody waits for it"
    assert "no more calls" not in waiting.actions[0].why.whole
    asked = replace(elsewhere, num_waiting=1)
    assert "reserve a1 for b" in told(decide(picture([A, B], [worker("a1", 20, calls=1)], [asked]), NOW))


def test_how_many_workers_are_wanted() -> None:
    """Also where there is no memory for them; a worker and its successor are one."""
    long = waits("a", 9, 9, predicted_wait_s=20.0)
    cases: list[tuple[Picture, dict[str, int]]] = [
        (picture([A, B]), {"a": 0, "b": 0}),
        (picture([A, B], [worker("a1", 20)], [waits("b")]), {"a": 1, "b": 1}),
        (picture([A, B], [worker("a1", 20, calls=1)], [waits("b")]), {"a": 1, "b": 1}),
        (picture([model("a", 30)], [], [waits("a")]), {"a": 1}),
        (picture([model("a", 4, min=2, max=3)], [], [waits("a")]), {"a": 2}),
        (picture([model("a", 20, max=3)], [worker("a1", 20, calls=4)], [long]), {"a": 2}),
        (picture([model("a", 20, max=1)], [worker("a1", 20, calls=4)], [long]), {"a": 1}),
        (picture([model("a", 4, max=3)], [worker("a1", 4, calls=4)], [waits("a", 9, calls=9)]), {"a": 1}),
        (picture([model("a", autoload=False)], [], [waits("a")]), {"a": 0}),
        (picture([A], [worker("a1", stale=True), worker("a2", status="loading", replaces="a1")]), {"a": 1}),
        (picture([A], [worker("a1", stale=True, calls=1)]), {"a": 1}),
        (picture([model("a", ttl_s=60)], [worker("a1", idle_s=60)]), {"a": 0}),
    ]
    for shown, expected in cases:
        assert decide(shown, NOW).wanted == expected, told(decide(shown, NOW))


def test_when_to_ask_again() -> None:
    """Time alone changes these: a ttl ends, patience ends, a model was resident long enough, a failure is forgiven."""
    cases = {
        60.0: picture([model("a", ttl_s=100)], [worker("a1", idle_s=40)]),
        25.0: picture([A, B], [worker("a1", 20, calls=1)], [waits("b", 5)]),
        3.0: picture([A, B], [worker("a1", 20, age_s=7, idle_s=5)], [waits("b", 5)]),
        17.0: picture([A], [], [waits("a")], failures=(failed("a", 17),)),
    }
    for seconds, shown in cases.items():
        plan = decide(shown, NOW)
        assert plan.ask_again_at == NOW + seconds
        assert decide(shown, NOW + seconds) != plan
    assert decide(picture([A], [worker("a1")]), NOW).ask_again_at is None


def test_a_plan_makes_room_for_some_at_a_time() -> None:
    models = [model(name) for name in "abcdefghijkl"]
    machines = [machine(str(number), (12,)) for number in range(6)]
    workers = [worker(f"{name}1", on=str(number)) for number, name in enumerate("abcdef")]
    plan = decide(picture(models, workers, [waits(name) for name in "ghijkl"], machines=machines), NOW)
    assert [each for each in told(plan) if each.startswith("wait")] == [
        *(f"wait {name} freeing" for name in "ghij"),
        *(f"wait {name} turn" for name in "kl"),
    ]
    assert plan.ask_again_at == NOW


def test_many_that_wait_for_reserved_workers_are_asked_about_when_something_happens() -> None:
    """What is reserved already needs no further plan, however many wait for it."""
    models = [model(name) for name in "abcdefghijkl"]
    machines = [machine(str(number), (12,)) for number in range(6)]
    busy = [
        worker(f"{name}1", on=str(number), calls=1, status="reserved" if name != "f" else "ready")
        for number, name in enumerate("abcdef")
    ]
    plan = decide(picture(models, busy, [waits(name, 50) for name in "ghijkl"], machines=machines), NOW)
    assert told(plan) == [
        *(f"wait {name} freeing" for name in "ghijk"),
        "reserve f1 for l",
        "wait l freeing",
    ]
    assert plan.ask_again_at is None


def test_a_loading_worker_that_is_seen_counts_once() -> None:
    """Of 24 GiB, one that loads will have 12, of which the device shows 5 as taken; the other 12 are free."""
    loading = replace(worker("a1", 12, status="loading", age_s=2), shares=(Share("gpu0", 12 * GIB, 5 * GIB),))
    gpu = Device("gpu0", 24 * GIB, free_bytes=19 * GIB)
    shown = picture([A, model("b", 12)], [loading], [waits("b")], machines=[Machine("m", (gpu, Device("cpu", GIB)))])
    assert told(decide(shown, NOW)) == ["start b m/gpu0"]


def test_a_device_that_was_not_read_is_counted_by_what_is_known() -> None:
    gpu = Device("gpu0", 24 * GIB, free_bytes=1, other_bytes=2 * GIB, is_trusted=False)
    for size, expected in ((12, ["start b m/gpu0"]), (13, ["wait b busy"])):
        machines = [Machine("m", (gpu, Device("cpu", GIB)))]
        shown = picture([A, model("b", size)], [worker("a1", calls=1)], [waits("b")], machines=machines)
        assert told(decide(shown, NOW)) == expected


def test_pairs_of_waiting_models_are_never_promised_the_same_memory() -> None:
    for first, second in itertools.permutations("bc"):
        shown = picture([A, B, C], [worker("a1", 20)], [waits(first, 9), waits(second, 3)])
        plan = decide(shown, NOW)
        assert [action.model for action in plan.actions if isinstance(action, Wait)] == [first, second]
        assert told(plan)[0] == f"stop a1 for {first}"


@pytest.mark.parametrize(
    ("load_s", "policy", "stays_s"),
    [
        (0.0, {}, 10.0),  # not known
        (60.0, {}, 10.0),
        (1.0, {}, 3.0),
        (1.0, {"min_resident_s": 10.0}, 10.0),
        (60.0, {"min_resident_s": 0.0}, 0.0),
    ],
)
def test_a_model_stays_for_as_long_as_loading_it_is_worth(
    load_s: float, policy: dict[str, Any], stays_s: float
) -> None:
    resident = model("a", **policy)
    there = replace(worker("a1", 20, age_s=0), load_s=load_s, since=NOW)
    seen = picture([resident, B], [there], [waits("b")])
    for after_s, leaves in ((stays_s - 0.1, False), (stays_s + 0.1, True)):
        if after_s >= 0:
            assert any(action.startswith("stop a1") for action in told(decide(seen, NOW + after_s))) is leaves


def test_a_long_answer_and_a_call_for_another_model_keep_nobody_from_a_model_for_long() -> None:
    """The worker is reserved for the other model; after 30 s it serves those who wait, and is reserved again later."""
    there = worker("a1", 20, calls=1, status="reserved")
    seen = picture([A, B], [there], [waits("b", 70), waits("a", 29)])
    assert not any(action.startswith("release") for action in told(decide(seen, NOW)))
    assert "release a1" in told(decide(seen, NOW + 2))
    released = replace(there, status="ready", released_at=NOW + 2)
    seen = picture([A, B], [released], [waits("b", 70)])
    assert not any(action.startswith("reserve") for action in told(decide(seen, NOW + 10)))
    assert any(action.startswith("reserve a1") for action in told(decide(seen, NOW + 18)))
