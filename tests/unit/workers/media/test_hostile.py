"""Bombs, lying heads and files that were changed at random: each is read or refused in two seconds of a processor, and
the process that reads it lives on."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from PIL import Image

from tests.support.media_files import (
    PICTURE_FORMS,
    SOUND_FORMS,
    chunk,
    corners,
    mutated,
    picture_file,
    png,
    sound_file,
    tone,
    with_orientation,
)
from workers.media.bounds import MediaLimits
from workers.media.decoder import MediaDecoder
from workers.process.helper_process import processor_s
from workers.protocol.events import CallFailed, FailureCode
from workers.protocol.requests import Medium

WIDTH, HEIGHT = 8192, 4096
"""As many pixels as are read."""
MAX_S = 2.0
"""Maximum seconds of a processor for one medium."""
NUM_CHANGED = 1000
NUM_CHANGED_LONG = 60_000


@pytest.fixture(scope="module")
def decoder() -> Iterator[MediaDecoder]:
    with MediaDecoder(MediaLimits(), sample_rate=16_000, sees=True, decode_s=60.0, number=1) as one:
        one.start()
        yield one


def told(decoder: MediaDecoder, medium: Medium) -> str:
    """Decode a medium in time and in the process that is there; return why it is refused, empty if it is not."""
    pid = decoder.pid
    assert pid is not None
    before_s = processor_s(pid)
    failure = None
    try:
        decoder.decode(medium)
    except CallFailed as failed:
        failure = failed.failure
    assert decoder.pid == pid, failure
    assert processor_s(pid) - before_s < MAX_S
    assert failure is None or failure.code is FailureCode.INVALID_REQUEST, failure
    return failure.message if failure is not None else ""


def lying(data: bytes, at: int, says: bytes) -> bytes:
    return data[:at] + says + data[at + len(says) :]


def flac(seconds: float, rate: int, channels: int, says: int) -> bytes:
    """Return a FLAC file of silence, whose head says a number of samples; 0: unknown."""
    data = sound_file(np.zeros((int(seconds * rate), channels), np.float32), rate, "FLAC")
    return lying(data, 21, bytes([data[21] & 0xF0 | says >> 32]) + struct.pack(">I", says & 0xFFFFFFFF))


def scans(number: int) -> bytes:
    """Return a progressive JPEG with as many scans more, each over all pixels."""
    data = picture_file(Image.new("RGB", (WIDTH, HEIGHT)), "JPEG", progressive=True)
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * number + data[-2:]


def animated_webp(canvas: bytes = b"") -> bytes:
    data = picture_file(corners(), "WEBP", save_all=True, append_images=[Image.new("RGB", (48, 32))])
    return lying(data, 24, canvas) if canvas else data


GIF = picture_file(Image.new("P", (8, 8)), "GIF")
FRAME = GIF.index(b"\x2c")
BMP = picture_file(corners(), "BMP")
WAV = sound_file(tone(1, 8000), 8000)
MP3 = sound_file(tone(1, 8000), 8000, "MP3")
DAMAGED = "cut off or damaged"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        pytest.param(
            lambda: png(12_000, 12_000, bytes(12_000 * 36_001)), "a picture of 12,000 x 12,000", id="12,000 x 12,000"
        ),
        pytest.param(lambda: png(2**31 - 1, 2**31 - 1, b""), "a picture of 2,147,483,647 x", id="PNG head"),
        pytest.param(lambda: png(WIDTH, HEIGHT, bytes(1000)), DAMAGED, id="PNG of few pixels"),
        pytest.param(lambda: png(8, 8, bytes(200 << 20)), "", id="PNG of more pixels"),
        pytest.param(
            lambda: png(WIDTH, HEIGHT, (b"\4" + bytes(WIDTH * 4)) * HEIGHT, colour=6), "", id="PNG of the largest size"
        ),
        pytest.param(
            lambda: png(WIDTH, HEIGHT, bytes(HEIGHT * (1 + WIDTH * 8)), bits=16, colour=6), "", id="PNG of 16 bits"
        ),
        pytest.param(
            lambda: png(8, 8, bytes(200), *[chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(900 << 10), 9))] * 4000),
            DAMAGED,
            id="PNG of texts",
        ),
        pytest.param(lambda: scans(20), "", id="JPEG of many scans"),
        pytest.param(lambda: scans(3000), "more than the 32 scans", id="JPEG of 3,000 scans"),
        pytest.param(lambda: animated_webp(b"\xff\x3f\0\xff\x3f\0"), "a picture of 16,384 x 16,384", id="WebP canvas"),
        pytest.param(lambda: animated_webp(b"\xff\x1f\0\xff\x0f\0"), "", id="WebP of the largest canvas"),
        pytest.param(
            lambda: picture_file(Image.new("RGBA", (WIDTH, HEIGHT), (1, 2, 3, 4)), "WEBP", lossless=True, method=0),
            "",
            id="WebP of one colour",
        ),
        pytest.param(lambda: lying(GIF, 6, b"\xff" * 4), "a picture of 65,535 x 65,535", id="GIF screen"),
        pytest.param(lambda: lying(GIF, FRAME + 5, b"\xff" * 4), "a picture of 65,535 x 65,535", id="GIF frame"),
        pytest.param(lambda: lying(GIF, 6, struct.pack("<HH", WIDTH, HEIGHT)), "", id="GIF of the largest screen"),
        pytest.param(lambda: lying(BMP, 18, struct.pack("<ii", WIDTH, HEIGHT)), DAMAGED, id="BMP head"),
        pytest.param(lambda: lying(BMP, 18, struct.pack("<ii", -1, 5)), "no pixels", id="BMP of negative width"),
    ],
)
def test_pictures_that_are_more_or_less_than_they_seem(
    decoder: MediaDecoder, make: Callable[[], bytes], says: str
) -> None:
    message = told(decoder, Medium("picture", make()))
    assert says in message
    assert bool(says) == bool(message)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        pytest.param(lambda: flac(1, 16_000, 1, 2**36 - 1), "a sound of 4,294,967", id="FLAC head"),
        pytest.param(lambda: flac(1, 16_000, 1, 16_000 * 60), "ends before its head says", id="FLAC of fewer samples"),
        pytest.param(lambda: flac(1300, 48_000, 1, 0), "longer than the 600 seconds", id="FLAC of unknown length"),
        pytest.param(lambda: flac(310, 192_000, 2, 0), "too many samples", id="FLAC of silence, unknown length"),
        pytest.param(lambda: flac(590, 48_000, 2, 590 * 48_000), "", id="FLAC of silence"),
        pytest.param(lambda: sound_file(tone(1, 48_000), 48_000, "OGG", "OPUS") * 500, "", id="Ogg, chained"),
        pytest.param(lambda: lying(WAV, 24, b"\xff\xff\xff\x7f"), "2,147,483,647 Hz", id="WAV rate"),
        pytest.param(lambda: lying(WAV, 22, b"\xff\xff"), "", id="WAV channels"),
        pytest.param(
            lambda: WAV[:12] + b"abcd\0\0\0\0" * 500_000 + WAV[12:], "chunks before its samples", id="WAV chunks"
        ),
        pytest.param(lambda: b"ID3\4\0\0\0\0\0\0" * 500_000 + MP3, "ID3 tags", id="MP3 tags"),
        pytest.param(lambda: b"\xff\xfb\x90\0" * 1_500_000, "cut off or damaged", id="MP3 of heads alone"),
        pytest.param(lambda: MP3 * 2000, "", id="MP3, chained"),
    ],
)
def test_sounds_that_are_more_or_less_than_they_seem(
    decoder: MediaDecoder, make: Callable[[], bytes], says: str
) -> None:
    message = told(decoder, Medium("sound", make()))
    assert says in message


def files() -> list[Medium]:
    """Return small files of every form."""
    noise = Image.effect_noise((64, 48), 90)
    pictures = [picture_file(noise.convert("RGB"), form) for form in PICTURE_FORMS]
    pictures += [picture_file(noise.convert("P"), form) for form in ("PNG", "GIF", "BMP")]
    pictures += [picture_file(noise, form, save_all=True, append_images=[noise]) for form in ("GIF", "WEBP", "PNG")]
    pictures += [picture_file(noise, "JPEG", progressive=True), picture_file(noise, "WEBP", lossless=True)]
    pictures += [with_orientation(6, form) for form in ("JPEG", "PNG", "WEBP")]
    sounds = [sound_file(tone(0.5, 48_000), 48_000, form, code) for form, code in SOUND_FORMS]
    sounds += [
        sound_file(tone(0.5, 16_000), 16_000, "WAV", code) for code in ("FLOAT", "ULAW", "IMA_ADPCM", "MS_ADPCM")
    ]
    return [Medium("picture", data) for data in pictures] + [Medium("sound", data) for data in sounds]


@pytest.mark.parametrize(
    "seeds",
    [range(NUM_CHANGED), pytest.param(range(NUM_CHANGED, NUM_CHANGED_LONG), marks=pytest.mark.long)],
    ids=["some", "many"],
)
def test_files_that_were_changed_at_random(decoder: MediaDecoder, seeds: range) -> None:
    originals = files()
    num_refused = 0
    for seed in seeds:
        medium = originals[seed % len(originals)]
        message = told(decoder, Medium(medium.kind, mutated(medium.data, seed)))
        assert not message or "; " in message, (seed, message)
        num_refused += bool(message)
    assert 0.2 < num_refused / len(seeds) < 0.95
