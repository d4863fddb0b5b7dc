"""Loads projectors that were changed at random, each in a process of its own, and tells how each of those ended.

    python -m tests.support.projector_trials MODEL PROJECTOR FOLDER FIRST NUMBER

Prints one line of JSON per projector: its seed, `loaded`, `refused` or the signal's name, and what was said.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path

from gguf import GGUFReader

from tests.support.media_files import mutated
from workers.llama.media.projector import Projector, ProjectorSettings
from workers.llama.model import Model
from workers.llama.native import EncodeFailed, ModelError
from workers.models.spec import LlamaSettings

NUMBERS = (0, 1, 2, 3, 7, 63, 65, 255, 4096, 1 << 20, 1 << 31, (1 << 32) - 1)
N_UBATCH = 512
SECONDS = 20
"""After which a child is ended: it counts as one that does not end."""


def changed(path: Path, seed: int) -> bytes:
    """Return the file's bytes after a change: of a number in its metadata or of a tensor's shape, or of any bytes."""
    chance = random.Random(seed)
    data = path.read_bytes()
    if chance.random() < 0.3:
        return mutated(data, seed)
    reader = GGUFReader(path)
    whole = bytearray(data)
    if chance.random() < 0.6:
        fields = [one for key, one in reader.fields.items() if key.startswith("clip.") and len(one.data) == 1]
        field = chance.choice(fields)
        width = field.parts[field.data[0]].nbytes
        at = field.offset + sum(part.nbytes for part in field.parts[: field.data[0]])
        whole[at : at + width] = (chance.choice(NUMBERS) % (1 << 8 * width)).to_bytes(width, "little")
    else:
        field = chance.choice(reader.tensors).field
        index = chance.randrange(len(field.parts))
        at = field.offset + sum(part.nbytes for part in field.parts[:index])
        width = field.parts[index].nbytes
        whole[at : at + min(width, 8)] = chance.choice(NUMBERS).to_bytes(8, "little")[: min(width, 8)]
    return bytes(whole)


def trial(model: Model, path: Path) -> tuple[str, str]:
    """Load the file in a child process; return how that ended, and what it said."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        signal.alarm(SECONDS)
        code = 0
        try:
            with Projector.load(model, ProjectorSettings(path, n_threads=1, use_gpu=False), n_ubatch=N_UBATCH) as one:
                one.warm_up()
        except (ModelError, EncodeFailed) as refused:
            print(refused, flush=True)
            code = 1
        os._exit(code)
    os.close(writing)
    with os.fdopen(reading, errors="replace") as said:
        text = said.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name, text[-300:]
    return ("loaded", "refused", "raised")[min(2, os.WEXITSTATUS(status))], text[-300:]


def main() -> None:
    model_path, projector, folder, first, number = sys.argv[1:]
    changed_path = Path(folder) / "changed.gguf"
    with Model.load(Path(model_path), LlamaSettings(n_threads=1)) as model:
        for seed in range(int(first), int(first) + int(number)):
            changed_path.write_bytes(changed(Path(projector), seed))
            print(json.dumps([seed, *trial(model, changed_path)]), flush=True)


if __name__ == "__main__":
    main()
