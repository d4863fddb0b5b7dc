"""Makes files of pictures and sounds: whole, cut, changed at random, and hostile ones that no library writes."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image

PICTURE_FORMS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
SOUND_FORMS = (("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III"))


def picture_file(image: Image.Image, form: str, **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **how)
    return file.getvalue()


def corners(width: int = 48, height: int = 32) -> Image.Image:
    """Return a picture whose quarters are red, green, blue and white."""
    image = Image.new("RGB", (width, height), "white")
    for colour, place in (("red", (0, 0)), ("lime", (width // 2, 0)), ("blue", (0, height // 2))):
        image.paste(colour, (*place, place[0] + width // 2, place[1] + height // 2))
    return image


def sound_file(samples: NDArray[np.float32], rate: int, form: str = "WAV", code: str | None = None) -> bytes:
    """Write a sound; samples: float32 [frames] or [frames, channels]. In pieces: libsndfile's encoder for Vorbis
    overflows the stack with a long one."""
    file = io.BytesIO()
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    with soundfile.SoundFile(file, "w", rate, channels, code, format=form) as sound:
        for start in range(0, len(samples), 16_384):
            sound.write(samples[start : start + 16_384])
    return file.getvalue()


def tone(seconds: float, rate: int, hertz: float = 440.0) -> NDArray[np.float32]:
    """Return a tone of half the largest loudness: float32 [frames]."""
    times = np.arange(round(seconds * rate), dtype=np.float32) / np.float32(rate)
    return np.asarray(np.sin(times * np.float32(2 * np.pi * hertz)) / 2, np.float32)


def mutated(data: bytes, seed: int) -> bytes:
    """Change some bytes of a file, cut it, or repeat a piece of it; mostly near its head, where the structure is."""
    chance = random.Random(seed)
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8, 64))):
        end = len(changed) if chance.random() < 0.5 else min(len(changed), 128)
        at = chance.randrange(max(end, 1))
        what = chance.random()
        if what < 0.6:
            changed[at : at + 1] = bytes([chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))])
        elif what < 0.75:
            changed[at : at + 4] = chance.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\0\0\0\1"))
        elif what < 0.85:
            del changed[at : at + chance.randrange(1, 64)]
        elif what < 0.95:
            changed[at:at] = changed[at : at + chance.randrange(1, 512)]
        else:
            del changed[max(at, 8) :]
    return bytes(changed)


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, pixels: bytes, *chunks: bytes, bits: int = 8, colour: int = 2) -> bytes:
    """Return a PNG file whose head may say anything. `pixels`: rows, each after its filter's byte."""
    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    packed = zlib.compress(pixels, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + b"".join(chunks) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def with_orientation(number: int, form: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = number
    return picture_file(corners(), form, exif=exif)
