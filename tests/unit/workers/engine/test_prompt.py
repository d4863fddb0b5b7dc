"""A prompt with images: what its cells are known by, and their positions."""

from __future__ import annotations

import numpy as np

from tests.support.fake_media import FakeCells
from workers.engine.cache.prompt import Prompt, Scope, Span, block_names

TEXT = Prompt(list(range(200)))


def with_image(digest: bytes, *, num_positions: int = 80) -> Prompt:
    return Prompt(TEXT.tokens, (Span(10, FakeCells(80, num_positions, digest)),))


def test_the_cells_of_an_image_are_known_by_its_contents() -> None:
    one, same, other = with_image(b"cat").ids(), with_image(b"cat").ids(), with_image(b"dog").ids()
    assert (one == same).all()
    assert (one[:10] == TEXT.ids()[:10]).all()
    assert (one[90:] == TEXT.ids()[90:]).all()
    assert (one[10:90] < 0).all(), "no token is known by such a number"
    assert np.count_nonzero(one[10:90] == other[10:90]) < 8


def test_saved_blocks_of_other_images_have_other_names() -> None:
    cat, dog = (block_names(with_image(digest).ids(), Scope("team")) for digest in (b"cat", b"dog"))
    assert {name.digest for name in cat}.isdisjoint(name.digest for name in dog)


def test_positions_are_apart_from_cells() -> None:
    prompt = with_image(b"cat", num_positions=8)
    assert [prompt.position(cell) for cell in (0, 10, 90, 200)] == [0, 10, 18, 128]
    assert [TEXT.position(cell) for cell in (0, 90, 200)] == [0, 90, 200]


def test_a_sound_beside_pictures_has_a_position_for_each_cell() -> None:
    thin, sound = FakeCells(5, 5, b"thin", at_one_position=True), FakeCells(8, 8, b"sound")
    assert Prompt.of([[1, 2], sound, [3]]).positions() is None
    positions = Prompt.of([[1, 2], thin, sound, [3]]).positions()
    assert positions is not None
    assert [positions.last(num) for num in (2, 4, 7, 8, 15)] == [1, 2, 2, 7, 14]
    assert [positions.whole(cell) for cell in (3, 9)] == [7, 9]
