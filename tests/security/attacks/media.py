"""Attacks by pictures and sounds: files that are small and become large, damaged ones, thin ones, and many at once."""

from __future__ import annotations

import asyncio
import base64
import itertools
from functools import cache

from PIL import Image

from tests.security.attack import Attack, Target
from tests.support.media_files import mutated, picture_file, png, sound_file, tone
from tests.support.projectors import picture

NUM_MEDIA = 32
"""Pictures of one request: as many as it may have."""
SIDE, AREA_SIDE = 8192, 4096
THIN = (8192, 41)
NUMBERS = itertools.count()
"""Each picture is another one: none is found among those seen before."""


def _part(data: bytes) -> dict[str, object]:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


async def _show(target: Target, *parts: dict[str, object]) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, *parts]}
    async with target.session() as session:
        await target.post(
            session, "/v1/chat/completions", {"model": target.model, "messages": [message], "max_tokens": 4}
        )


@cache
def _bombs() -> tuple[bytes, ...]:
    """Return small files: one of 96 MiB of pixels, one that says it is larger than may be, one without its end."""
    large = png(SIDE, AREA_SIDE - 1, bytes((AREA_SIDE - 1) * (1 + 3 * SIDE)))
    lies = png(60_000, 60_000, bytes(1 << 20))
    short = png(SIDE, AREA_SIDE - 1, bytes(64))
    return large, lies, short


async def _bomb(target: Target) -> None:
    await asyncio.gather(*(_show(target, _part(data)) for data in _bombs()))


def _small(seed: int) -> bytes:
    return picture_file(Image.fromarray(picture(seed, 64, 64)), "PNG")


async def _damaged(target: Target) -> None:
    numbers = [next(NUMBERS) for _ in range(8)]
    forms = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
    files = [picture_file(Image.fromarray(picture(n)), forms[n % len(forms)]) for n in numbers]
    await asyncio.gather(
        *(_show(target, _part(mutated(data, n))) for n, data in zip(numbers, files, strict=True)),
    )


async def _thin(target: Target) -> None:
    number = next(NUMBERS)
    wide, high = picture(number, *THIN), picture(number, *reversed(THIN))
    await asyncio.gather(*(_show(target, _part(picture_file(Image.fromarray(one), "PNG"))) for one in (wide, high)))


async def _many(target: Target) -> None:
    await _show(target, *(_part(_small(next(NUMBERS))) for _ in range(NUM_MEDIA)))


@cache
def _long_sound() -> str:
    """Return ten minutes in 1 MiB or so, in base64."""
    return base64.b64encode(sound_file(tone(600, 8000), 8000, "OGG", "VORBIS")).decode()


async def _sounds(target: Target) -> None:
    part: dict[str, object] = {"type": "input_audio", "input_audio": {"data": _long_sound(), "format": "ogg"}}
    await asyncio.gather(*(_show(target, part) for _ in range(4)))


ATTACKS = (
    Attack(
        name="picture-bombs",
        about="Pictures of 100 KiB that become 96 MiB of pixels, say that they are larger, or lack their end.",
        strike=_bomb,
        at_once=2,
        short_s=2.0,
    ),
    Attack(
        name="damaged-pictures",
        about="Eight pictures at once, cut or with some bytes changed, in all forms.",
        strike=_damaged,
        at_once=2,
    ),
    Attack(
        name="thin-pictures",
        about="Pictures of 8,192 x 41 pixels: every row of cells has one at least.",
        strike=_thin,
    ),
    Attack(
        name="many-pictures",
        about="Four requests at once with 32 pictures each, none of which was seen before.",
        strike=_many,
        at_once=4,
        short_s=2.0,
    ),
    Attack(
        name="long-sounds",
        about="Sounds of ten minutes to a model that reads none.",
        strike=_sounds,
    ),
)
