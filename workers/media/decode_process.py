"""Decodes pictures and sounds in a helper process (`workers.media.decoder` starts it).

    python -m workers.media.decode_process

The process reads a `Setup` and then `Question`s as lines of JSON, each of these with a file after it. It answers each
with a line, and with pixels or samples after that.
"""

from __future__ import annotations

import sys

import msgspec
import numpy as np
from numpy.typing import NDArray

from workers.media import pictures, sounds
from workers.media.messages import Answer, Pixels, Question, Refused, Samples, Setup, Undecodable
from workers.process.limits import bound_cpu, bound_memory, keep_little, shut_off

BYTES_PER_PIXEL = 24
"""Maximum bytes of memory for each pixel of a picture. Animated WebP takes most: two canvases, a copy and Pillow's own,
of 4 bytes each, and 3 for the result."""

EXTRA_BYTES = 256 << 20
"""Maximum bytes of memory beside a picture's pixels: the file, and ten minutes of sound, twice for a moment."""

READY = b"true"
NOTHING = memoryview(b"")

Decoded = NDArray[np.uint8] | NDArray[np.float32]

decode_setup = msgspec.json.Decoder(Setup).decode
decode_question = msgspec.json.Decoder(Question).decode
encode = msgspec.json.Encoder().encode


def main() -> None:
    setup = decode_setup(sys.stdin.buffer.readline())
    keep_little()
    if setup.sees:
        pictures.warm_up(setup.limits)
    if setup.sample_rate:
        sounds.warm_up(setup.limits, setup.sample_rate)
    bound_memory(EXTRA_BYTES + BYTES_PER_PIXEL * setup.limits.max_pixels * setup.sees)
    shut_off()
    _tell(READY, NOTHING)
    for line in sys.stdin.buffer:
        bound_cpu(setup.cpu_s)
        question = decode_question(line)
        _tell(*_answer(question, sys.stdin.buffer.read(question.num_bytes), setup))


def _answer(question: Question, data: bytes, setup: Setup) -> tuple[bytes, memoryview]:
    """Return an answer's line, and what follows it."""
    answer: Answer
    try:
        if question.kind == "picture":
            decoded: Decoded = pictures.decode_picture(data, setup.limits)
            answer = Pixels(width=decoded.shape[1], height=decoded.shape[0])
        else:
            decoded = sounds.decode_sound(data, setup.limits, setup.sample_rate or 0)
            answer = Samples(len(decoded))
        return encode(answer), decoded.data.cast("B")
    except Undecodable as refused:
        message = str(refused)
    except MemoryError:
        message = f"decoding the {question.kind} takes more memory than one medium may; send a smaller one"
    return encode(Refused(message)), NOTHING


def _tell(line: bytes, follows: memoryview) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.write(follows)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
