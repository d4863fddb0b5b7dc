"""Which adapters a fleet has: one name, one file's contents."""

from __future__ import annotations

from msgspec.structs import replace

from gateway.adapters.names import agreed, callable_adapters, contents_of, known_adapters
from tests.support.pool import heartbeat
from workers.protocol.heartbeat import Heartbeat

OLD, NEW = "01" * 32, "02" * 32


def having(worker: str, started_at: float = 0.0, **hashes: str) -> Heartbeat:
    names = tuple(hashes)
    beat = heartbeat(worker)
    return replace(beat, adapters=names, adapters_resident=names, adapter_hashes=hashes, started_at=started_at)


def test_adapters_of_a_fleet() -> None:
    first, second, other = having("a", poet=OLD, shared=OLD), having("b", pirate=OLD), having("c", shared=OLD)
    assert known_adapters([first, second]) == ["pirate", "poet", "shared"]
    models = {"llama": contents_of([first, second]), "qwen": contents_of([other])}
    assert callable_adapters(models) == {"pirate": "llama", "poet": "llama"}


def test_a_registered_adapter_is_there_before_any_worker_has_it() -> None:
    contents = contents_of([having("a", poet=OLD)], {"pirate": NEW})
    assert contents == {"pirate": NEW, "poet": OLD}
    assert list(contents) == ["pirate", "poet"]
    assert contents_of([], {"pirate": NEW}) == {"pirate": NEW}


def test_a_worker_with_other_contents_does_not_have_the_adapter() -> None:
    stale, right = having("a", pirate=OLD, poet=OLD), having("b", pirate=NEW)
    contents = contents_of([stale, right], {"pirate": NEW})
    assert contents == {"pirate": NEW, "poet": OLD}
    left, kept = agreed([stale, right], contents)
    assert (left.adapters, left.adapters_resident, left.adapter_hashes) == (("poet",), ("poet",), {"poet": OLD})
    assert kept is right


def test_of_workers_whose_settings_contradict_each_other_the_last_to_start_counts() -> None:
    early, late = having("a", 1.0, pirate=OLD), having("b", 2.0, pirate=NEW)
    for beats in ([early, late], [late, early]):
        contents = contents_of(beats)
        assert contents == {"pirate": NEW}
        assert {beat.worker: beat.adapters for beat in agreed(beats, contents)} == {"a": (), "b": ("pirate",)}


def test_a_worker_that_does_not_tell_contents_is_believed() -> None:
    silent = replace(heartbeat("a"), adapters=("pirate",))
    assert contents_of([silent]) == {"pirate": ""}
    assert agreed([silent], {"pirate": NEW}) == (silent,)
