"""Decodes sounds with libsndfile, and brings them to one channel and one rate. Imported by the helper process only."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from workers.media.bounds import MediaLimits
from workers.media.messages import Undecodable

FORMS = {
    "WAV": (
        "WAV",
        ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW", "IMA_ADPCM", "MS_ADPCM"),
    ),
    "WAVEX": ("WAV", ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")),
    "FLAC": ("FLAC", ("PCM_S8", "PCM_16", "PCM_24")),
    "OGG": ("Ogg", ("VORBIS", "OPUS")),
    "MP3": ("MP3", ("MPEG_LAYER_III",)),
}
"""Forms that are read, by libsndfile's names: how a caller knows them, and libsndfile's names of their codes."""

RATES = range(4_000, 192_001)
MAX_CHANNELS = 8
VALUES_PER_S = 96_000
"""Maximum samples of all channels, as a mean over the longest sound: two channels at 48 kHz. Silence of eight channels
at 192 kHz is a file of some kilobytes, and takes as long as ten minutes of music to decode in half a minute."""

BLOCK_VALUES = 1 << 17
"""Samples of all channels that are decoded at a time."""

UNKNOWN_FRAMES = 1 << 62
"""libsndfile says the largest number it has for a length that the file does not say."""

MAX_TAGS = 16
MAX_CHUNKS = 4096
"""Maximum chunks of a WAV file before its samples."""

PIPED_BYTES = 0x7FFF0000
"""Size of a WAV file's samples from which it stands for an unknown one."""

CUT = "the {} file ends before its head says; send the whole file"

Samples = NDArray[np.float32]


class _Stream(soundfile.SoundFile):  # type: ignore[misc]
    """Reads a sound from its start to its end. After each block soundfile would seek where it is already, which fails
    at the end of a FLAC file that does not say its length."""

    def seekable(self) -> bool:
        return False


def decode_sound(data: bytes, limits: MediaLimits, sample_rate: int) -> Samples:
    """Return a file's sound at this rate, all channels as one: contiguous float32 [samples], -1 to 1.

    Raises Undecodable, and MemoryError."""
    data = _without_tags(data)
    _check_start(data)
    try:
        with _Stream(BytesIO(data)) as file:
            _check_head(file, limits)
            blocks = list(_resampled(file, limits, sample_rate))
    except (soundfile.SoundFileError, RuntimeError, TypeError, ValueError):
        raise Undecodable("the sound's file is cut off or damaged; send the whole file, or encode it anew") from None
    samples = np.concatenate(blocks)[: int(limits.max_seconds * sample_rate)]
    if fault := limits.sound_fault(len(samples) / sample_rate):
        raise Undecodable(fault)
    return samples


def _without_tags(data: bytes) -> bytes:
    """Return the file without the ID3 tags at its start. libsndfile would skip them, too, and then take for a sound
    whatever follows them."""
    start = 0
    for _ in range(MAX_TAGS):
        head = data[start : start + 10]
        if head[:3] != b"ID3" or len(head) < 10:
            return data[start:]
        start += 10 + sum((byte & 0x7F) << 7 * (3 - place) for place, byte in enumerate(head[6:]))
    raise Undecodable(f"the sound's file has {MAX_TAGS} ID3 tags or more; encode it anew")


def _check_start(data: bytes) -> None:
    """Raise Undecodable unless the file begins as one that is read, and is as long as its head says.

    libsndfile knows thirty forms, and has a parser for each; it is given five."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        _check_wav(data)
    elif data[:4] == b"OggS":
        if b"OpusHead" not in data[:64] and b"\x01vorbis" not in data[:64]:
            raise Undecodable("the Ogg file has neither Opus nor Vorbis; convert it to one of them, or to WAV")
        _check_ogg(data)
    elif data[:1] == b"\xff" and len(data) > 4 and data[1] & 0xE6 == 0xE2:
        _check_mp3(data)
    elif data[:4] != b"fLaC":
        if not data:
            raise Undecodable("the sound's file is empty; send the whole file")
        raise Undecodable("the sound is no WAV, FLAC, Ogg or MP3 file; convert it to one of them")


def _check_wav(data: bytes) -> None:
    """Raise Undecodable if the samples are fewer bytes than their chunk's head says. A file that was written to a pipe
    says 0 there, or nearly the most that can be said."""
    position = 12
    for _ in range(MAX_CHUNKS):
        kind, size = data[position : position + 4], int.from_bytes(data[position + 4 : position + 8], "little")
        if len(kind) < 4 or kind == b"data":
            break
        position += 8 + size + size % 2
    else:
        raise Undecodable(f"the WAV file has more than {MAX_CHUNKS:,} chunks before its samples; encode it anew")
    if kind != b"data":
        raise Undecodable(CUT.format("WAV"))
    if position + 8 + size > len(data) and size < PIPED_BYTES:
        raise Undecodable(CUT.format("WAV"))


def _check_ogg(data: bytes) -> None:
    """Raise Undecodable if the last page is cut."""
    page = data.rfind(b"OggS")
    num_segments = data[page + 26] if page + 26 < len(data) else 255
    table = data[page + 27 : page + 27 + num_segments]
    if len(table) < num_segments or page + 27 + num_segments + sum(table) > len(data):
        raise Undecodable(CUT.format("Ogg"))


def _check_mp3(data: bytes) -> None:
    """Raise Undecodable if the file is shorter than its first frame says, where it does. Source: the Xing header."""
    for name in (b"Xing", b"Info"):
        place = data.find(name, 0, 64)
        flags = int.from_bytes(data[place + 4 : place + 8], "big") if place >= 0 else 0
        if flags & 2:
            at = place + 8 + 4 * (flags & 1)
            if int.from_bytes(data[at : at + 4], "big") > len(data):
                raise Undecodable(CUT.format("MP3"))


def _check_head(file: _Stream, limits: MediaLimits) -> None:
    """Raise Undecodable unless what the head says is within the limits."""
    name, codes = FORMS.get(file.format, ("", ()))
    if file.subtype not in codes:
        raise Undecodable(f"the {name or 'sound'} file has codes that are not read; convert it to 16-bit WAV or to MP3")
    if file.samplerate not in RATES or file.channels > MAX_CHANNELS:
        raise Undecodable(
            f"a sound of {file.channels:,} channels at {file.samplerate:,} Hz is not read, only up to {MAX_CHANNELS} "
            f"at {RATES.start:,} to {RATES.stop - 1:,} Hz; convert it to one channel at 16,000 Hz"
        )
    if file.frames < UNKNOWN_FRAMES:
        if fault := limits.sound_fault(file.frames / file.samplerate):
            raise Undecodable(fault)
        if file.frames > _max_frames(file, limits):
            raise Undecodable(_too_many(file))


def _resampled(file: _Stream, limits: MediaLimits, sample_rate: int) -> Iterator[Samples]:
    """Yield the sound's blocks at this rate. Raises Undecodable at the limit, or if the file ends before its head
    says."""
    resampler = soxr.ResampleStream(file.samplerate, sample_rate, 1, dtype="float32")
    block = np.empty((BLOCK_VALUES // file.channels, file.channels), np.float32)
    shares = np.full(file.channels, 1 / file.channels, np.float32)
    num_frames = 0
    while len(frames := file.read(out=block)):
        num_frames += len(frames)
        if num_frames > limits.max_seconds * file.samplerate:
            raise Undecodable(f"the sound is longer than the {limits.max_seconds:,.0f} seconds that are read; cut it")
        if num_frames > _max_frames(file, limits):
            raise Undecodable(_too_many(file))
        mono = frames @ shares
        if not np.isfinite(mono).all():
            raise Undecodable("the sound holds samples that are no numbers; encode it anew")
        yield resampler.resample_chunk(mono.clip(-1, 1))
    if num_frames < file.frames < UNKNOWN_FRAMES:
        raise Undecodable(CUT.format(FORMS[file.format][0]))
    yield resampler.resample_chunk(np.empty(0, np.float32), last=True)


def _max_frames(file: _Stream, limits: MediaLimits) -> float:
    return limits.max_seconds * VALUES_PER_S / int(file.channels)


def _too_many(file: _Stream) -> str:
    return (
        f"the sound has {file.channels:,} channels at {file.samplerate:,} Hz, too many samples for its length; "
        "convert it to one channel at 16,000 Hz"
    )


def warm_up(limits: MediaLimits, sample_rate: int) -> None:
    """Decode a short sound of each form, so that all is loaded that is loaded when it is first needed."""
    tone = np.sin(np.arange(sample_rate // 2, dtype=np.float32) / 8) / 2
    for form, code in (("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", None)):
        file = BytesIO()
        soundfile.write(file, tone, 48_000, format=form, subtype=code)
        decode_sound(file.getvalue(), limits, sample_rate)
