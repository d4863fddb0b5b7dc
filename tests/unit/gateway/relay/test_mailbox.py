"""The buffer between a worker's stream and a caller."""

from __future__ import annotations

import asyncio
import tracemalloc

from gateway.api.intake.memory_budget import MemoryBudget
from gateway.call import Principal
from gateway.errors import ClientTooSlow, HeldTooMuch, PaddockError
from gateway.relay.mailbox import FREE_BYTES, SPARE_BYTES, Mailbox, MailboxWithSettings
from workers.protocol.events import (
    CallEvent,
    Failed,
    Failure,
    FailureCode,
    Finished,
    FinishReason,
    Logprobs,
    PromptLogprobs,
    Settings,
    Started,
    Text,
    Timings,
    TokenLogprob,
    Usage,
    decode_step,
    encode_step,
)
from workers.protocol.requests import Sampling

END = Finished(1, FinishReason.STOP, Usage(1, 1, 0), Timings(0, 1, 1.0, 1, 1.0))


async def test_all_that_is_there_comes_at_once_and_in_order() -> None:
    box = Mailbox(10, lambda error: None)
    for n in range(3):
        box.put(Text(1, str(n)))
    assert await box.peek() == Text(1, "0")
    assert await box.take() == [Text(1, "0"), Text(1, "1"), Text(1, "2")]
    assert not box.ended


async def test_tokens_that_nobody_has_taken_are_told() -> None:
    """Who reads nothing, and then leaves, pays for them."""
    box = Mailbox(10, lambda error: None)
    box.put_all([Started(1, 0, 3, 0), Text(1, "a", 2)])
    box.put(Text(1, "b"))
    assert box.num_unread == 3
    await box.take()
    assert box.num_unread == 0


async def test_a_waiting_reader_is_woken() -> None:
    box = Mailbox(10, lambda error: None)
    reader = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    box.put(Started(1, 0, 1, 0))
    box.put(Text(1, "a"))
    assert await reader == [Started(1, 0, 1, 0), Text(1, "a")]


async def test_the_end_is_seen_when_it_is_taken() -> None:
    for last in (END, Failed(1, Failure(FailureCode.INTERNAL, "x"))):
        box = Mailbox(10, lambda error: None)
        box.put(Text(1, "a"))
        box.put(last)
        assert not box.ended
        assert (await box.take())[-1] is last
        assert box.ended


async def test_the_end_is_told_of_when_it_comes_whoever_reads() -> None:
    told: list[object] = []
    box = Mailbox(10, lambda error: None, told.append)
    box.put(Text(1, "a"))
    assert not told
    box.put(END)
    assert told == [END]
    assert not box.ended


async def test_overflow_is_told_once_and_what_comes_after_is_dropped() -> None:
    told = []
    box = Mailbox(2, lambda error: told.append(1))
    for n in range(5):
        box.put(Text(1, str(n)))
    assert told == [1]
    assert await box.take() == [Text(1, "0"), Text(1, "1")]


async def test_a_reader_that_gave_up_does_no_harm() -> None:
    box = Mailbox(10, lambda error: None)
    reader = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait({reader})
    box.put(Text(1, "a"))
    assert await box.take() == [Text(1, "a")]


async def test_a_reader_may_look_past_what_only_tells_that_it_began() -> None:
    box = Mailbox(10, lambda error: None)
    reader = asyncio.create_task(box.peek(past=Started))
    await asyncio.sleep(0)
    box.put(Started(1, 0, 1, 0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not reader.done()
    assert await box.peek() == Started(1, 0, 1, 0)
    box.put(Text(1, "a"))
    assert await reader == Text(1, "a")
    assert await box.take() == [Started(1, 0, 1, 0), Text(1, "a")]


STARTED, SETTINGS = Started(1, 0, 1, 0), Settings(1, "a prompt", Sampling(seed=3))


async def test_settings_come_behind_the_start_whichever_was_there_first() -> None:
    late = MailboxWithSettings(10, lambda error: None)
    reader = asyncio.create_task(late.take())
    for event in (STARTED, Text(1, "a"), END):
        late.put(event)
    await asyncio.sleep(0)
    assert not reader.done()
    late.release(SETTINGS)
    assert await reader == [STARTED, SETTINGS, Text(1, "a"), END]
    early = MailboxWithSettings(10, lambda error: None)
    early.release(SETTINGS)
    for event in (STARTED, Text(1, "a")):
        early.put(event)
    assert await early.take() == [STARTED, SETTINGS, Text(1, "a")]


async def test_a_worker_that_tells_no_settings_or_fails_keeps_nobody_waiting() -> None:
    silent = MailboxWithSettings(10, lambda error: None)
    silent.put(STARTED)
    silent.release(None)
    assert await silent.take() == [STARTED]
    failed, failure = MailboxWithSettings(10, lambda error: None), Failed(1, Failure(FailureCode.WORKER_LOST, "x"))
    failed.put(STARTED)
    failed.put(failure)
    assert await failed.take() == [failure]


async def test_a_call_that_fails_before_its_settings_tells_nothing_else() -> None:
    box, failure = MailboxWithSettings(10, lambda error: None), Failed(1, Failure(FailureCode.WORKER_LOST, "x"))
    box.put_all([STARTED, Text(1, "a")])
    box.put_all([Text(1, "b"), failure])
    assert await box.take() == [failure]


async def test_nothing_comes_behind_the_end() -> None:
    box = Mailbox(10, lambda error: None)
    box.put(END)
    box.put(Failed(1, Failure(FailureCode.WORKER_LOST, "its connection is gone as well")))
    assert await box.take() == [END]
    assert box.end is END


async def test_nothing_comes_behind_what_was_dropped() -> None:
    told: list[str] = []
    box = Mailbox(3, lambda error: told.append("over"))
    box.put(Text(1, "a"))
    box.put_all([Text(1, "b"), Text(1, "c"), Text(1, "d")])
    box.put(END)
    assert await box.take() == [Text(1, "a")]
    assert told == ["over"]
    assert not box.ended


async def test_what_comes_before_the_settings_is_bounded_as_well() -> None:
    told: list[str] = []
    box = MailboxWithSettings(3, lambda error: told.append("over"))
    for _ in range(5):
        box.put(STARTED)
    assert told == ["over"]


PROBABILITIES = Logprobs(1, TokenLogprob(1, b"piece", -1.0), tuple(TokenLogprob(n, b"piece", -1.0) for n in range(100)))
"""Those of one token: 3 KB on the wire, 18 KB of memory."""


async def taken_from(box: Mailbox, num: int) -> list[object]:
    events: list[object] = []
    while len(events) < num:
        events += await box.take()
    return events


async def test_unread_events_count_for_the_caller_by_the_memory_that_they_take() -> None:
    budget, told = MemoryBudget(8 << 20), list[str]()
    caller = Principal("key", "team", None, admin=False)
    boxes = [Mailbox(10_000, lambda error: told.append("over"), held=budget.reserve(caller)) for _ in range(2)]
    tracemalloc.start()
    try:
        for _ in range(60):
            boxes[0].put_all([*decode_step(encode_step([PROBABILITIES]))], 3300)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken < budget.num_bytes < 3 * taken
    assert len(await taken_from(boxes[0], 60)) == 60
    assert budget.num_bytes == 0, "who has read them holds them no more"
    for _ in range(1000):
        boxes[1].put_all([PROBABILITIES], 3300)
    assert told == ["over"]
    assert budget.num_bytes <= 4 << 20, "half of all, since nobody else holds any"
    boxes[1].close()
    assert budget.num_bytes == 0


async def test_a_caller_who_reads_what_comes_counts_nothing() -> None:
    budget = MemoryBudget(1 << 20)
    box = Mailbox(10_000, lambda error: None, held=budget.reserve(Principal("key", "team", None, admin=False)))
    for _ in range(20):
        box.put_all([Text(1, "x" * 100)] * 10, 1300)
        assert budget.num_bytes == 0
        await box.take()
    assert FREE_BYTES >= 10 * 1300


async def test_events_that_wait_for_the_settings_count_as_well() -> None:
    budget, told = MemoryBudget(8 << 20), list[str]()
    held = budget.reserve(Principal("key", "team", None, admin=False))
    box = MailboxWithSettings(10_000, lambda error: told.append("over"), held=held)
    for _ in range(60):
        box.put_all([PROBABILITIES], 3300)
    assert budget.num_bytes > 60 * 3300
    box.release(None)
    assert budget.num_bytes > 60 * 3300
    assert len(await taken_from(box, 60)) == 60
    assert budget.num_bytes == 0


async def test_settings_that_come_after_the_end_give_no_memory_back_twice() -> None:
    budget = MemoryBudget(8 << 20)
    held = budget.reserve(Principal("key", "team", None, admin=False))
    box = MailboxWithSettings(10_000, lambda error: None, held=held)
    box.put_all([Text(1, "x" * 100_000)], 100_000)
    box.put(Failed(1, Failure(FailureCode.WORKER_LOST, "x")))
    assert budget.num_bytes >= 100_000
    await box.take()
    box.close()
    assert budget.num_bytes == 0
    box.release(SETTINGS)
    assert budget.num_bytes == 0, "it went below 0, for good"
    box.close()
    assert budget.num_bytes == 0


def prompt_probabilities(num_tokens: int) -> PromptLogprobs:
    return PromptLogprobs(1, tuple((TokenLogprob(n, b"tokn", -12.345678), ()) for n in range(num_tokens)))


async def test_probabilities_of_long_prompts_count_by_their_bytes_in_the_turn_that_they_wait() -> None:
    """Two prompts of as many as a request may have were cut off: decoded and doubled, each counted for 53 MiB."""
    budget, errors = MemoryBudget(160 << 20), list[PaddockError]()
    caller, event = Principal("key", "team", None, admin=False), prompt_probabilities(1 << 17)
    num_bytes = len(encode_step([event]))
    started = Started(1, 0, 1 << 17, 0)
    boxes = [Mailbox(2048, errors.append, held=budget.reserve(caller)) for _ in range(4)]
    for num, box in enumerate(boxes, 1):
        box.put_all([started], 50)
        box.put_all([event], num_bytes)
        assert num * num_bytes <= budget.num_bytes <= num * (num_bytes + SPARE_BYTES + 1000)
    assert errors == []
    assert await boxes[0].peek(past=Started) == PromptLogprobs(1, ()), "it is not decoded for a look at it"
    assert await boxes[0].take() == [started, event]


async def test_a_share_that_is_nearly_taken_is_counted_to_its_end() -> None:
    budget, errors = MemoryBudget(8 << 20), list[PaddockError]()
    box = Mailbox(2048, errors.append, held=budget.reserve(Principal("key", "team", None, admin=False)))
    for _ in range(28):  # of 100 KiB, where the key may hold 3 MiB
        box.put_all([Text(1, "x")], 100 << 10)
    assert errors == []
    assert budget.num_bytes > 2800 << 10


async def test_who_may_hold_no_more_memory_is_told_so_and_not_to_read_faster() -> None:
    budget, errors = MemoryBudget(8 << 20), list[PaddockError]()
    caller = Principal("key", "team", None, admin=False)
    other = budget.reserve(caller)
    other.resize(2 << 20)
    for kind in (Mailbox, MailboxWithSettings):
        kind(2048, errors.append, held=budget.reserve(caller)).put_all([Text(1, "x")], 2 << 20)
    assert [type(error) for error in errors] == [HeldTooMuch, HeldTooMuch]
    assert errors[0].__traceback__ is None, "it would hold the call in memory"
    Mailbox(2, errors.append).put_all([Text(1, "x")] * 3)
    assert type(errors[2]) is ClientTooSlow


async def test_others_get_their_turn_while_a_late_reader_takes_what_is_long() -> None:
    box, turns, events = Mailbox(10_000, lambda error: None), 0, list[object]()
    said: list[CallEvent] = [PROBABILITIES, Text(1, "a")] * 300
    for event in said:
        box.put_all([event], 1700)
    box.put(END)

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    while not box.ended:
        taken = await box.take()
        assert len(taken) < 300
        events += taken
    counting.cancel()
    assert events == [*said, END]
    assert turns > 10
