"""What workers took is kept, bounded, and never in the way."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from workers.footprint.footprint import Footprint, Share
from workers.footprint.learned import FILE, MOST_BYTES, MOST_KEPT, Learned, believed, files_of, key_of
from workers.models.spec import AdapterSpec, ModelSpec

TOLD = Footprint(host=Share(weights=600, other=400), gpus=(Share(weights=900, other=100),))


@pytest.fixture
def learned(tmp_path: Path) -> Learned:
    return Learned(tmp_path / FILE)


def test_each_file_of_a_model_is_named_once(tmp_path: Path) -> None:
    model, adapter = tmp_path / "model.gguf", tmp_path / "adapter.gguf"
    spec = ModelSpec(name="m", path=str(model), adapters=(AdapterSpec(name="a", path=str(adapter)),))
    assert [*files_of(spec)] == [model, adapter]


def totals(footprint: Footprint) -> tuple[int, ...]:
    return (footprint.host.total, *(share.total for share in footprint.gpus))


def test_nothing_is_corrected_before_anything_is_known(learned: Learned) -> None:
    assert learned.corrected("a", TOLD) == TOLD


def test_a_reading_corrects_the_next_prediction_of_the_same_worker_alone(learned: Learned) -> None:
    learned.record("a", TOLD, host=1100, gpus=[1300])
    assert totals(learned.corrected("a", TOLD)) == (1100, 1300)
    assert learned.corrected("a", TOLD).host.weights == 600
    assert learned.corrected("b", TOLD) == TOLD


def test_a_prediction_of_fewer_cells_is_corrected_by_as_many_bytes(learned: Learned) -> None:
    learned.record("a", TOLD, host=1100, gpus=[1000])
    fewer = msgspec.structs.replace(TOLD, host=Share(weights=500, other=400))
    assert totals(learned.corrected("a", fewer)) == (1000, 1000)


@pytest.mark.parametrize(("taken", "corrected"), [(10_000, 2000), (2000, 2000), (990, 990), (100, 950), (0, 950)])
def test_corrections_are_bounded(learned: Learned, taken: int, corrected: int) -> None:
    learned.record("a", TOLD, host=taken, gpus=[taken])
    assert totals(learned.corrected("a", TOLD)) == (corrected, corrected)


def test_the_largest_reading_counts(learned: Learned) -> None:
    for taken in (1050, 1200, 1010):
        learned.record("a", TOLD, host=taken, gpus=[taken])
    assert totals(learned.corrected("a", TOLD)) == (1200, 1200)


def test_readings_of_other_numbers_of_gpus_are_let_be(learned: Learned) -> None:
    learned.record("a", TOLD, host=1200, gpus=[1200, 1200])
    assert learned.corrected("a", TOLD) == TOLD
    learned.record("a", TOLD, host=1200, gpus=[1200])
    alone = Footprint(host=Share(other=1000))
    assert learned.corrected("a", alone) == alone


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"a": 1}', b'{"a": {"host": -1}}', b"\xff\xfe", b"[" * 5000, b" " * (MOST_BYTES + 1)]
)
def test_a_damaged_file_is_learned_anew(
    learned: Learned, tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_bytes(damage)
    assert learned.corrected("a", TOLD) == TOLD
    assert "learned anew" in caplog.text
    learned.record("a", TOLD, host=1100, gpus=[1000])
    caplog.clear()
    assert totals(learned.corrected("a", TOLD)) == (1100, 1000)
    assert caplog.text == ""


def test_the_file_is_this_users_and_whole(learned: Learned, tmp_path: Path) -> None:
    learned.record("a", TOLD, host=1100, gpus=[1000])
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_a_folder_that_is_not_there_costs_the_reading_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Learned(tmp_path / "none" / FILE).record("a", TOLD, host=1100, gpus=[1000])
    assert "is not kept" in caplog.text


def test_the_longest_unread_worker_is_forgotten(learned: Learned) -> None:
    for number in range(MOST_KEPT + 1):
        learned.record(f"{number}", TOLD, host=1100, gpus=[1000])
    assert learned.corrected("0", TOLD) == TOLD
    assert totals(learned.corrected("1", TOLD))[0] == totals(learned.corrected(f"{MOST_KEPT}", TOLD))[0] == 1100


def test_a_key_is_of_files_settings_and_build(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"one")
    plain = ModelSpec(name="m", path=str(path))
    known = key_of(plain, "build")
    assert known == key_of(ModelSpec(name="other", path=str(path), workers=7), "build")
    assert known != key_of(plain, "another build")
    assert known != key_of(ModelSpec(name="m", path=str(path), slots=3), "build")
    path.write_bytes(b"other")
    assert known != key_of(plain, "build")
    with pytest.raises(FileNotFoundError):
        key_of(ModelSpec(name="m", path=str(tmp_path / "none.gguf")), "build")


@pytest.mark.parametrize(
    ("taken", "swapped", "has_served", "learned_of"),
    [
        (1200, 0, False, 1200),
        (900, 0, False, None),  # it has not touched all
        (900, 0, True, 900),
        (1400, 0, True, 1000),  # what it cached was predicted by itself
        (1600, 0, True, 1100),
        (1200, 100, True, None),  # pages of its files have left, too
        (1200, 60, True, 1000),
        (6100, 0, False, None),
    ],
)
def test_only_what_can_be_believed_is_learned(
    taken: int, swapped: int, has_served: bool, learned_of: int | None
) -> None:
    predicted = Footprint(host=Share(weights=600, other=400), growth=500)
    assert believed(taken, swapped, predicted, has_served=has_served) == learned_of
