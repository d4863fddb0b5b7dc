"""Files of sounds become samples of one channel at one rate; those that are cut, too long or odd are refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.media_files import SOUND_FORMS, sound_file, tone
from workers.media.bounds import MediaLimits
from workers.media.messages import Undecodable
from workers.media.sounds import MAX_CHANNELS, MAX_CHUNKS, MAX_TAGS, decode_sound

RATE = 16_000
LIMITS = MediaLimits(max_seconds=4.0)


def heard(data: bytes) -> NDArray[np.float32]:
    return decode_sound(data, LIMITS, RATE)


def refusal(data: bytes) -> str:
    with pytest.raises(Undecodable) as caught:
        heard(data)
    return str(caught.value)


def pitch(samples: NDArray[np.float32]) -> float:
    """Return the loudest frequency, Hz."""
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(spectrum.argmax() * RATE / len(samples))


def with_frames(flac: bytes, number: int) -> bytes:
    """Return a FLAC file whose head says another number of frames; 0: unknown."""
    changed = bytearray(flac)
    changed[21] = changed[21] & 0xF0 | number >> 32
    changed[22:26] = struct.pack(">I", number & 0xFFFFFFFF)
    return bytes(changed)


@pytest.mark.parametrize(("form", "code"), SOUND_FORMS)
@pytest.mark.parametrize("rate", [8_000, 16_000, 48_000])
def test_every_form_sounds_as_it_was(form: str, code: str, rate: int) -> None:
    samples = heard(sound_file(tone(2, rate), rate, form, code))
    assert samples.dtype == np.float32
    assert samples.flags.c_contiguous
    assert len(samples) == pytest.approx(2 * RATE, abs=0.1 * RATE)
    assert pitch(samples) == pytest.approx(440, abs=2)
    assert np.abs(samples[RATE // 2 : -RATE // 2]).max() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    "code", ["PCM_U8", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW", "IMA_ADPCM", "MS_ADPCM"]
)
def test_every_code_of_wav(code: str) -> None:
    samples = heard(sound_file(tone(1, RATE), RATE, "WAV", code))
    assert len(samples) == pytest.approx(RATE, abs=1024)
    assert pitch(samples) == pytest.approx(440, abs=2)


@pytest.mark.parametrize("rate", [4_000, 11_025, 22_050, 44_100, 44_101, 96_000, 192_000])
def test_odd_rates_keep_length_and_pitch(rate: int) -> None:
    samples = heard(sound_file(tone(1.5, rate), rate))
    assert len(samples) == pytest.approx(1.5 * RATE, abs=2)
    assert pitch(samples) == pytest.approx(440, abs=2)


def test_what_the_rate_can_t_hold_is_filtered_out_and_not_folded_back() -> None:
    assert np.abs(heard(sound_file(tone(1, 48_000, hertz=12_000), 48_000))[1000:-1000]).max() < 1e-3


def test_channels_become_one() -> None:
    left = tone(1, RATE)
    both = heard(sound_file(np.stack([left, np.zeros_like(left)], axis=1), RATE, "WAV", "FLOAT"))
    assert both == pytest.approx(left / 2, abs=1e-6)


def test_samples_at_the_rate_are_the_same() -> None:
    assert heard(sound_file(tone(1, RATE), RATE, "WAV", "FLOAT")) == pytest.approx(tone(1, RATE), abs=1e-6)


def test_loud_samples_are_cut_off_and_no_numbers_refused() -> None:
    assert np.abs(heard(sound_file(tone(1, RATE) * 100, RATE, "WAV", "FLOAT"))).max() == 1
    for odd in (np.nan, np.inf):
        samples = tone(1, RATE)
        samples[100] = odd
        assert "samples that are no numbers" in refusal(sound_file(samples, RATE, "WAV", "FLOAT"))


@pytest.mark.parametrize(
    ("seconds", "reason"),
    [
        (0.1, ""),
        (4.0, ""),
        (0.05, "a sound of 0.05 seconds is not read, only of 0.1 to 4"),
        (4.5, "a sound of 4.50 seconds is not read"),
    ],
)
@pytest.mark.parametrize("form", ["WAV", "FLAC"])
def test_lengths_at_and_beyond_the_bounds(form: str, seconds: float, reason: str) -> None:
    data = sound_file(tone(seconds, 48_000), 48_000, form)
    if reason:
        assert reason in refusal(data)
    else:
        assert len(heard(data)) == round(seconds * RATE)


@pytest.mark.parametrize(("form", "code"), [pair for pair in SOUND_FORMS if pair[0] != "MP3"])
def test_a_file_that_is_cut_anywhere_is_refused(form: str, code: str) -> None:
    data = sound_file(tone(1, 48_000), 48_000, form, code)
    for end in range(0, len(data) - 1, max(1, len(data) // 200)):
        message = refusal(data[:end])
        assert "; send the whole file" in message or "; convert it" in message, (end, message)


def test_a_cut_mp3_is_refused_if_its_head_says_its_length() -> None:
    data = sound_file(tone(2, 48_000), 48_000, "MP3")
    for end in range(0, len(data) - 1, len(data) // 50):
        refusal(data[:end])


def test_a_file_that_was_written_to_a_pipe_says_no_length() -> None:
    wav = sound_file(tone(1, RATE), RATE)
    at = wav.index(b"data") + 4
    for says in (0xFFFFFFFF, 0x7FFFFFFF - 36):
        assert len(heard(wav[:at] + struct.pack("<I", says) + wav[at + 4 :])) == RATE
    assert len(heard(with_frames(sound_file(tone(1, RATE), RATE, "FLAC"), 0))) == RATE


def test_what_a_head_says_is_not_believed() -> None:
    flac = sound_file(tone(3, RATE), RATE, "FLAC")
    assert "a sound of 4,294,967.30 seconds is not read" in refusal(with_frames(flac, (1 << 36) - 1))
    assert "; send the whole file" in refusal(with_frames(flac, RATE * 4))
    assert len(heard(with_frames(flac, RATE))) == RATE
    long = with_frames(sound_file(tone(9, RATE), RATE, "FLAC"), 0)
    assert refusal(long) == "the sound is longer than the 4 seconds that are read; cut it"


def test_rates_and_channels_beyond_the_bounds() -> None:
    wav = sound_file(tone(1, RATE), RATE)
    assert "a sound of 1 channels at 1,000 Hz is not read" in refusal(wav[:24] + struct.pack("<I", 1000) + wav[28:])
    assert "at 2,147,483,647 Hz" in refusal(wav[:24] + struct.pack("<I", 0x7FFFFFFF) + wav[28:])
    many = np.zeros((RATE, MAX_CHANNELS + 1), np.float32)
    assert f"only up to {MAX_CHANNELS}" in refusal(sound_file(many, RATE))
    assert len(heard(sound_file(many[:, 1:], RATE))) == RATE


def test_silence_of_many_channels_at_a_high_rate_is_refused() -> None:
    flac = sound_file(np.zeros((192_000 * 2, 8), np.float32), 192_000, "FLAC")
    assert len(flac) < 10_000
    assert "too many samples for its length" in refusal(flac)
    assert "too many samples for its length" in refusal(with_frames(flac, 0))


@pytest.mark.parametrize(
    ("form", "code"),
    [("AIFF", "PCM_16"), ("AU", "PCM_16"), ("CAF", "PCM_16"), ("W64", "PCM_16"), ("VOC", "PCM_16"), ("RF64", "PCM_16")],
)
@pytest.mark.parametrize("before", [b"", b"ID3\4\0\0\0\0\0\0"])
def test_no_other_parser_of_libsndfile_is_reached(form: str, code: str, before: bytes) -> None:
    message = refusal(before + sound_file(tone(1, RATE), RATE, form, code))
    assert message == "the sound is no WAV, FLAC, Ogg or MP3 file; convert it to one of them"


def test_codes_that_are_not_read() -> None:
    assert "has codes that are not read" in refusal(sound_file(tone(1, RATE), RATE, "WAV", "GSM610"))
    flac_in_ogg = b"OggS" + bytes(24) + b"\x7fFLAC" + bytes(99)
    assert "neither Opus nor Vorbis" in refusal(flac_in_ogg)


def test_tags_and_chunks_before_a_sound() -> None:
    mp3, wav = sound_file(tone(1, RATE), RATE, "MP3"), sound_file(tone(1, RATE), RATE)
    tag, piece = b"ID3\4\0\0\0\0\1\0" + bytes(128), b"abcd\2\0\0\0xx"
    assert len(heard(tag * (MAX_TAGS - 1) + mp3)) == pytest.approx(RATE, abs=2000)
    assert "ID3 tags" in refusal(tag * MAX_TAGS + mp3)
    assert len(heard(wav[:12] + piece * 9 + wav[12:])) == RATE
    assert "chunks before its samples" in refusal(wav[:12] + piece * (MAX_CHUNKS + 1) + wav[12:])


def test_what_is_no_sound() -> None:
    assert refusal(b"") == "the sound's file is empty; send the whole file"
    assert "is no WAV, FLAC, Ogg or MP3 file" in refusal(b"\0\0\0\x20ftypM4A ")
