"""Batches on their way to the ledger: what is sent, asked about, sent again, and when it is forgotten."""

from __future__ import annotations

from pathlib import Path

from accounts.protocol.usage import UsageRecord, decode_batch, encode_record
from gateway.store.usage import BatchState
from gateway.usage.journal import OwnJournal
from gateway.usage.outbox import BATCH_RECORDS, WINDOW, Outbox

ROOM = 1 << 20


def journal_of(folder: Path, count: int) -> OwnJournal:
    journal = OwnJournal(folder, "p", 1 << 30, lambda what: None)
    for _ in range(count):
        add(journal)
    return journal


def add(journal: OwnJournal) -> None:
    number = journal.last + 1
    journal.add(
        encode_record(
            UsageRecord(number=number, request_id="r", started_at=1.0, ended_at=2.0, route="/v1", outcome="ok")
        ),
        number,
    )


def sent(outbox: Outbox, state: BatchState = BatchState.SENT, max_bytes: int = ROOM) -> dict[str, int]:
    """Offer what there is; every batch with content gets this state. Return name -> records sent with it."""
    offered: dict[str, int] = {}
    for batch, offer in outbox.offers(max_bytes):
        offered[offer.name] = len(decode_batch(offer.batch).records) if offer.batch else 0
        outbox.note(batch, state)
    return offered


def test_a_batch_is_sent_then_asked_about_then_forgotten(tmp_path: Path) -> None:
    journal = journal_of(tmp_path, 3)
    outbox = Outbox(journal)
    assert sent(outbox) == {"p:1:3": 3}
    add(journal)
    assert sent(outbox) == {"p:1:3": 0, "p:4:4": 1}
    assert sent(outbox, BatchState.COMMITTED) == {"p:1:3": 0, "p:4:4": 0}
    assert sent(outbox) == {}
    assert outbox.is_empty
    assert journal.num_bytes == 0


def test_what_redis_has_lost_is_sent_again(tmp_path: Path) -> None:
    outbox = Outbox(journal_of(tmp_path, 3))
    sent(outbox)
    assert sent(outbox, BatchState.ABSENT) == {"p:1:3": 0}
    assert sent(outbox) == {"p:1:3": 3}


def test_what_the_stream_has_no_room_for_is_sent_later(tmp_path: Path) -> None:
    outbox = Outbox(journal_of(tmp_path, 3))
    assert sent(outbox, BatchState.FULL) == {"p:1:3": 3}
    assert sent(outbox) == {"p:1:3": 3}


def test_a_batch_is_forgotten_only_with_all_before_it(tmp_path: Path) -> None:
    journal = journal_of(tmp_path, 2 * BATCH_RECORDS)
    outbox = Outbox(journal)
    (first, _), (second, _) = outbox.offers(ROOM)
    outbox.note(first, BatchState.SENT)
    outbox.note(second, BatchState.COMMITTED)
    assert journal.committed == 0
    assert sent(outbox, BatchState.ABSENT) == {f"p:1:{BATCH_RECORDS}": 0}
    assert sent(outbox, BatchState.COMMITTED) == {f"p:1:{BATCH_RECORDS}": BATCH_RECORDS}
    assert journal.committed == 2 * BATCH_RECORDS


def test_only_so_many_are_on_their_way(tmp_path: Path) -> None:
    journal = journal_of(tmp_path, (WINDOW + 3) * BATCH_RECORDS)
    outbox = Outbox(journal)
    assert len(sent(outbox)) == WINDOW
    seen = [outbox.has_more]
    assert sum(sent(outbox).values()) == 0
    sent(outbox, BatchState.COMMITTED)
    seen.append(outbox.has_more)
    assert len(sent(outbox)) == 3
    assert seen == [False, True]


def test_little_is_sent_at_once(tmp_path: Path) -> None:
    outbox = Outbox(journal_of(tmp_path, 5 * BATCH_RECORDS))
    offers = outbox.offers(1)
    assert [offer.name for _, offer in offers] == [f"p:1:{BATCH_RECORDS}"]


def test_records_that_are_gone_hold_nothing_up(tmp_path: Path) -> None:
    """Somebody has deleted a file."""
    journal = journal_of(tmp_path, 10)
    for path in tmp_path.glob("*.records"):
        path.write_bytes(b"")
    outbox = Outbox(journal)
    assert sent(outbox) == {}
    journal._segments._close()
    add(journal)
    assert sent(outbox) == {"p:11:11": 1}
    sent(outbox, BatchState.COMMITTED)
    assert outbox.is_empty
