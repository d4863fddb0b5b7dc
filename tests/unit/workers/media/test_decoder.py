"""Media are decoded in a process that can be stopped: what it can't reach or use up, and who it can't hold up."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from tests.support.media_files import corners, picture_file, png, sound_file, tone
from tests.support.waiting import wait_until
from workers.llama.media.parts import Picture, Sound
from workers.media.bounds import MediaLimits
from workers.media.decoder import MediaDecoder
from workers.process.helper_process import processor_s
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.requests import Medium

PARAM = "messages.0.content.1"
RATE = 16_000
SIDE = 4096


def picture(data: bytes) -> Medium:
    return Medium("picture", data, PARAM)


def sound(data: bytes) -> Medium:
    return Medium("sound", data, PARAM)


SMALL = picture(picture_file(corners(), "PNG"))
LARGE = picture(png(SIDE, SIDE, bytes(SIDE * (1 + 3 * SIDE))))


def failure(decoder: MediaDecoder, medium: Medium) -> Failure:
    with pytest.raises(CallFailed) as caught:
        decoder.decode(medium)
    return caught.value.failure


def assert_it_decodes(decoder: MediaDecoder) -> None:
    decoded = decoder.decode(SMALL)
    assert isinstance(decoded, Picture)
    assert np.array_equal(decoded.pixels, np.asarray(corners()))


@pytest.fixture(scope="module")
def decoder() -> Iterator[MediaDecoder]:
    with MediaDecoder(MediaLimits(), sample_rate=RATE, sees=True, decode_s=60.0) as one:
        one.start()
        yield one


def test_pictures_and_sounds_come_as_they_are(decoder: MediaDecoder) -> None:
    assert_it_decodes(decoder)
    heard = decoder.decode(sound(sound_file(tone(1, RATE), RATE, "WAV", "FLOAT")))
    assert isinstance(heard, Sound)
    assert heard.samples == pytest.approx(tone(1, RATE), abs=1e-6)
    noise = Image.effect_noise((3000, 2000), 90).convert("RGB")
    seen = decoder.decode(picture(picture_file(noise, "PNG", compress_level=1)))
    assert isinstance(seen, Picture)
    assert np.array_equal(seen.pixels, np.asarray(noise))


@pytest.mark.parametrize("medium", [picture(b"GIF89a"), sound(b"RIFF"), picture(sound_file(tone(1, RATE), RATE))])
def test_a_refusal_names_the_parameter_and_the_remedy_and_nothing_within(decoder: MediaDecoder, medium: Medium) -> None:
    told = failure(decoder, medium)
    assert (told.code, told.param) == (FailureCode.INVALID_REQUEST, PARAM)
    assert "; " in told.message
    assert not re.search(r"PIL|libsnd|/|Error|line \d", told.message)


def test_a_medium_of_a_kind_that_the_model_does_not_read() -> None:
    with MediaDecoder(MediaLimits(), sample_rate=None, sees=True) as seeing:
        told = failure(seeing, sound(b"RIFF"))
        assert (told.code, told.param) == (FailureCode.UNSUPPORTED, PARAM)
        assert "reads no sounds" in told.message
        assert_it_decodes(seeing)
    with MediaDecoder(MediaLimits(), sample_rate=RATE, sees=False) as hearing:
        assert "reads no pictures" in failure(hearing, SMALL).message
        assert hearing.pid is None, "a process was started for it"
        assert isinstance(hearing.decode(sound(sound_file(tone(1, RATE), RATE))), Sound)


def test_nothing_that_decodes_is_loaded_by_the_worker() -> None:
    program = "import sys, workers.media.decoder, workers.chat_worker; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "workers.media.decoder" in loaded
    assert not {"PIL", "soundfile", "_soundfile", "soxr", "workers.media.pictures", "workers.media.sounds"} & {*loaded}


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_process_has_no_secret_no_llama_cpp_and_can_open_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDOCK_WORKER_SECRET", "hush")
    with MediaDecoder(MediaLimits(), sample_rate=RATE, sees=True) as decoder:
        assert_it_decodes(decoder)
        process = Path(f"/proc/{decoder.pid}")
        assert b"hush" not in (process / "environ").read_bytes()
        maps = (process / "maps").read_text()
        assert "libsndfile" in maps
        assert not re.search("llama|ggml|mtmd|ffmpeg|libav", maps)
        limits = (process / "limits").read_text()
    for what in ("open files", "file size", "processes"):
        assert re.search(rf"^Max {what} +0 +0 ", limits, re.MULTILINE)
    for what in ("address space", "cpu time"):
        assert re.search(rf"^Max {what} +\d+ ", limits, re.MULTILINE)


def test_a_process_that_somebody_killed_is_replaced(decoder: MediaDecoder) -> None:
    assert decoder.pid is not None
    os.kill(decoder.pid, signal.SIGKILL)
    time.sleep(0.05)
    assert_it_decodes(decoder)


def test_a_process_that_is_killed_while_it_decodes_is_not_the_callers_fault() -> None:
    with MediaDecoder(MediaLimits(), sample_rate=None, sees=True, number=1) as decoder:
        assert_it_decodes(decoder)
        killer = threading.Thread(target=signal_at_work, args=(decoder.pid, signal.SIGKILL))
        killer.start()
        told = failure(decoder, LARGE)
        killer.join()
        assert told.code is FailureCode.OUT_OF_MEMORY
        assert "send it again" in told.message
        assert_it_decodes(decoder)


def test_a_process_that_is_stopped_while_it_decodes_is_not_the_callers_fault() -> None:
    with MediaDecoder(MediaLimits(), sample_rate=None, sees=True, number=1, decode_s=3.0) as decoder:
        assert_it_decodes(decoder)
        assert decoder.pid is not None
        os.kill(decoder.pid, signal.SIGSTOP)
        told = failure(decoder, LARGE)
        assert told.code is FailureCode.UNAVAILABLE
        assert "had no processor for 3 s" in told.message
        assert_it_decodes(decoder)


def signal_at_work(pid: int, number: signal.Signals) -> None:
    """Send a process a signal once it has computed for some hundredths of a second."""
    before_s = processor_s(pid)
    wait_until(lambda: processor_s(pid) > before_s + 0.03, 20)
    os.kill(pid, number)


def test_decoding_that_takes_too_long_is_the_callers_fault() -> None:
    with MediaDecoder(MediaLimits(), sample_rate=None, sees=True, number=1, decode_s=0.05) as decoder:
        decoder.start()
        first = decoder.pid
        told = failure(decoder, LARGE)
        assert (told.code, told.param) == (FailureCode.INVALID_REQUEST, PARAM)
        assert "takes longer than 0.05 s; send a smaller picture" in told.message
        assert decoder.pid not in (None, first)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded on Linux")
def test_decoding_that_takes_too_much_memory_is_the_callers_fault() -> None:
    limits = MediaLimits(max_pixels=1 << 20)
    with MediaDecoder(limits, sample_rate=None, sees=True, decode_s=60.0, number=1) as decoder:
        decoder.start()
        assert "is no PNG" in failure(decoder, picture(bytes(64 << 20))).message
        told = failure(decoder, picture(bytes(300 << 20)))
        assert (told.code, told.param) == (FailureCode.INVALID_REQUEST, PARAM)
        assert "takes more memory" in told.message
        assert_it_decodes(decoder)


FALLEN = """
import sys
read = sys.stdin.buffer.readline
read()
print(flush=True)
read()
print(sys.argv[1], flush=True)
read()
"""


@pytest.mark.parametrize(
    "said", ["", "{}", '{"type":"Pixels","width":9000,"height":9000}', '{"type":"Samples","number":9999}']
)
def test_a_process_that_was_taken_over_is_not_believed(said: str) -> None:
    """It says sizes beyond the limits, another kind, or what can't be read."""
    with MediaDecoder(MediaLimits(), sample_rate=RATE, sees=True, number=1) as decoder:
        decoder._pool._processes[0]._command = [sys.executable, "-c", FALLEN, said]
        assert failure(decoder, picture(b"\n")).code is FailureCode.INTERNAL


def test_one_slow_medium_leaves_a_process_for_others(decoder: MediaDecoder) -> None:
    decoder.decode(SMALL)
    slow = threading.Thread(target=decoder.decode, args=(LARGE,))
    slow.start()
    try:
        assert_it_decodes(decoder)
    finally:
        slow.join()


def test_many_threads_get_their_own(decoder: MediaDecoder) -> None:
    seen: dict[int, object] = {}

    def decode(number: int) -> None:
        got = decoder.decode(picture(picture_file(Image.new("RGB", (300 + number, 200), (number, 0, 0)), "PNG")))
        assert isinstance(got, Picture)
        seen[number] = (got.pixels.shape, int(got.pixels.max()))

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == {number: ((200, 300 + number, 3), number) for number in range(1, 17)}


def test_the_workers_memory_stays_what_it_was(decoder: MediaDecoder) -> None:
    decoder.decode(LARGE)
    before = psutil.Process().memory_info().rss
    for _ in range(4):
        decoder.decode(LARGE)
    assert psutil.Process().memory_info().rss < before + (16 << 20)


@pytest.mark.serial
def test_other_threads_run_meanwhile(decoder: MediaDecoder) -> None:
    """A thread that wakes every millisecond waits for the interpreter's lock no longer than it takes to hand over a
    piece of a file."""
    decoder.decode(SMALL)
    file = picture(picture_file(Image.effect_noise((2800, 2800), 120), "BMP"))
    gaps: list[float] = []
    done = threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    ticking = threading.Thread(target=tick)
    ticking.start()
    try:
        for _ in range(4):
            decoder.decode(LARGE)
            decoder.decode(file)
    finally:
        done.set()
        ticking.join()
    gaps.sort()
    assert gaps[int(0.99 * len(gaps))] < 0.01, gaps[-5:]


def test_a_second_process_is_kept_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.process.helper_pool.SPARE_AFTER_S", 0.01)
    before = decoding()
    with MediaDecoder(MediaLimits(), sample_rate=None, sees=True, number=3) as decoder:
        assert not decoding() - before
        decoder.start()
        wait_until(lambda: len(decoding() - before) == 2, 20)
        assert decoder.pid in decoding()
    assert not decoding() - before


def decoding() -> set[int]:
    """Return the decoding processes of this one."""
    found = set[int]()
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # a zombie as well
            if any("decode_process" in part for part in child.cmdline()):
                found.add(child.pid)
    return found
