"""What a model is asked for, and what it does."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gateway.catalog.jobs import WHERE, check_kind
from gateway.errors import NotSupported
from tests.support.pool import heartbeat
from workers.protocol.heartbeat import WorkerKind

KINDS: tuple[WorkerKind, ...] = ("generate", "embed", "rank")


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_asked_for_what_it_does(kind: WorkerKind) -> None:
    check_kind("m", kind, [replace(heartbeat("w"), kind=kind)])
    check_kind("m", kind, [])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wanted", KINDS)
def test_other_work_is_refused_with_the_right_route(kind: WorkerKind, wanted: WorkerKind) -> None:
    if kind == wanted:
        return
    with pytest.raises(NotSupported, match="`m`") as caught:
        check_kind("m", wanted, [replace(heartbeat("w"), kind=kind)])
    assert WHERE[kind] in caught.value.message
    assert ("embeddings: true" in caught.value.message) == ((kind, wanted) == ("generate", "embed"))


def test_a_pool_of_both_does_both() -> None:
    beats = [replace(heartbeat(kind), kind=kind) for kind in KINDS[:2]]
    check_kind("m", "generate", beats)
    check_kind("m", "embed", beats)
    with pytest.raises(NotSupported):
        check_kind("m", "rank", beats)
