"""Predicts a worker's footprint: starts the helper process of a dry run, and adds what that does not tell.

llama.cpp is loaded in the helper only, so a supervisor or a command can predict.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import msgspec

from workers.footprint.footprint import Footprint
from workers.footprint.predict import Bounds, predict
from workers.footprint.rehearsal import Answer, DryRun, Question
from workers.models.spec import ModelSpec
from workers.process.helper_process import NotStarted, ending, launched

WALL_S = 120.0
"""Maximum seconds of a dry run. It takes one, on a busy machine some."""


class Unpredictable(Exception):
    """A worker's memory can't be predicted. The message is one line: what is wrong, and the remedy."""


class TooLarge(Unpredictable):
    """The worker asks for more memory than there is, whatever else runs."""


def build_of() -> str:
    """Return what, besides a model and its settings, decides what a worker takes: the versions of what runs it."""
    try:
        native = version("llama-cpp-python")
    except PackageNotFoundError:
        native = "unknown"
    return f"llama-cpp-python {native}, Python {sys.version_info.major}.{sys.version_info.minor}"


def dry_run(spec: ModelSpec, *, free_bytes: int | None, workers: int = 1) -> DryRun:
    """Return what llama.cpp would take for a worker with this spec, whose files are all here. Blocks for a second.

    `free_bytes`: memory that is free for the KV cache; None: a GPU has it, or it is not known. `workers`: number of
    workers that share the machine. Raises Unpredictable, TooLarge."""
    question = msgspec.json.encode(Question(spec=spec, free_bytes=free_bytes, workers=workers))
    command = [sys.executable, "-m", "workers.footprint.dry_run"]
    try:
        with launched(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            try:
                told, _ = process.communicate(question, WALL_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise Unpredictable(
                    f"{spec.name}: its memory was not predicted within {WALL_S:g} s; try again when the machine is "
                    "less busy"
                ) from None
    except NotStarted as error:
        raise Unpredictable(f"{spec.name}: the process that predicts its memory did not start: {error}") from None
    lines = told.splitlines()
    if process.returncode or not lines:
        reason = lines[-1].decode("utf-8", "replace")[:200] if lines else "it said nothing"
        raise Unpredictable(
            f"{spec.name}: llama.cpp ends its process over {spec.path} ({ending(process.returncode)}: {reason}); "
            "check the file and the `llama` settings"
        )
    try:
        answer = msgspec.json.decode(lines[-1], type=Answer)
    except msgspec.DecodeError:
        raise Unpredictable(
            f"{spec.name}: the process that predicts its memory gave no answer that can be read "
            f"({lines[-1].decode('utf-8', 'replace')[:200]}); try again"
        ) from None
    if answer.refused is not None:
        raise (TooLarge if answer.refused.is_too_large else Unpredictable)(answer.refused.reason)
    if answer.found is None:
        raise Unpredictable(f"{spec.name}: the process that predicts its memory gave no answer; try again")
    return answer.found


def predicted(
    spec: ModelSpec,
    *,
    free_bytes: int | None,
    workers: int = 1,
    bounds: Bounds | None = None,
    gpus: Sequence[int] = (),
) -> Footprint:
    """Return the footprint of a worker with this spec, as `dry_run` and `predict` have the parameters. Blocks for a
    second. Raises Unpredictable, TooLarge."""
    run = dry_run(spec, free_bytes=free_bytes, workers=workers)
    return predict(run, spec, bounds=bounds, gpus=gpus)
