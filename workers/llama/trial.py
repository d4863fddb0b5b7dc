"""Tries metadata and patterns of tensors' names (`override_kv`, `override_tensor`) in a process of its own, before the
worker loads the model with them: llama.cpp asserts on much of the metadata, and std::regex can take hours.

    python -m workers.llama.trial MODEL.gguf SECONDS

The process loads the model without its weights, lays out a small context, and writes what llama.cpp said of the
overrides. It takes about a second, most of it for the vocabulary, and no GPU: whether weights fit there is another
matter.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from llama_cpp import llama_cpp as c
from msgspec.structs import replace

from workers.llama.gguf import GgufHeader
from workers.llama.model_params import ModelParams, Overrides, fill_context, wrong_type
from workers.llama.native import ModelError, ModelTooLarge, native_log
from workers.models.overrides import MetadataValue
from workers.models.spec import NO_DEVICE, LlamaSettings
from workers.process.helper_process import NotStarted, launched
from workers.process.limits import bound_cpu, bound_memory
from workers.process.parent_death import end_with_parent

CPU_S = 30
"""Maximum processor seconds of a trial. A pattern takes milliseconds for all names, unless it is made to take long."""

WALL_S = 300.0
EXTRA_BYTES = 8 << 30
N_CTX = 256

_USED = re.compile(r"Using metadata override \( *\w+\) '([^']+)'")
_WRONG = re.compile(r"Bad metadata override type for key '([^']+)', expected (\w+) but got \w+")
_MOVED = re.compile(r"^tensor \S+ \(.*buffer type overridden to")
_ASSERTED = re.compile(r"GGML_ASSERT\(.{1,200}\) failed|GGML_ABORT.{1,200}")
_TYPES = ("int", "float", "bool", "str")


class Outcome(msgspec.Struct, frozen=True):
    """Tells what a trial found."""

    fault: str = ""
    """The setting at fault, and llama.cpp's reason; empty: none, or one that the worker will meet as well."""
    is_loaded: bool = False
    """Whether llama.cpp loads the model; if not, and without a fault, the worker is told why when it loads it."""
    used: frozenset[str] = frozenset()
    """Keys of metadata that llama.cpp has read as they are overridden."""
    wanted: dict[str, str] = {}
    """Keys that were overridden by a value of another type than llama.cpp reads -> the type that it reads."""


def tried(header: GgufHeader, settings: LlamaSettings, *, cpu_s: int = CPU_S) -> Overrides:
    """Return the metadata to override, with whole numbers as floats where llama.cpp reads floats. Blocks for about a
    second. Raises ModelError if llama.cpp can't load the model with these settings, or does not read a key."""
    values: dict[str, MetadataValue] = dict(settings.override_kv)
    outcome = _outcome(header.path, settings, cpu_s)
    whole = {key for key, kind in outcome.wanted.items() if kind == "float" and type(values.get(key)) is int}
    if whole:
        values |= {key: float(values[key]) for key in whole}
        outcome = _outcome(header.path, replace(settings, override_kv=values), cpu_s)
    if outcome.fault:
        raise ModelError(f"{header.path}: llama.{outcome.fault}")
    for key, value in values.items():
        if key in outcome.used or not outcome.is_loaded:
            continue
        if key in outcome.wanted:
            raise wrong_type(header, key, value, _TYPES.index(outcome.wanted[key]))
        raise ModelError(
            f"{header.path}: llama.override_kv: llama.cpp does not read {key} of this model; check its spelling, or "
            "remove it"
        )
    return values


def _outcome(path: Path, settings: LlamaSettings, cpu_s: int) -> Outcome:
    """Run a trial to its end. Raises ModelError if its process dies or takes too long."""
    command = [sys.executable, "-m", "workers.llama.trial", str(path), str(cpu_s)]
    question = msgspec.json.encode(without_devices(settings))
    try:
        with launched(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            try:
                said, _ = process.communicate(question, WALL_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise ModelError(
                    f"{path}: the trial of the `llama` settings has had no processor for {WALL_S:g} s; start again "
                    "when the machine is less busy"
                ) from None
    except NotStarted as error:
        raise ModelError(f"{path}: the trial of the `llama` settings did not start ({error}); start again") from None
    if process.returncode == 0:
        return msgspec.json.decode(said.splitlines()[-1], type=Outcome)
    if process.returncode == -signal.SIGKILL:
        raise ModelTooLarge(f"{path}: the trial of the `llama` settings was killed; give the worker more memory")
    names = " and ".join(name for name in ("override_kv", "override_tensor") if getattr(settings, name))
    if process.returncode == -signal.SIGXCPU:
        raise ModelError(
            f"{path}: llama.{names}: llama.cpp takes more than {cpu_s} s to read the model so; write simpler patterns, "
            "without repetitions of repetitions"
        )
    text = said.decode("utf-8", "replace")
    reason = found[0] if (found := _ASSERTED.search(text)) else (text.strip().splitlines() or ["no reason given"])[-1]
    raise ModelError(f"{path}: llama.{names}: llama.cpp ends its process over this ({reason[:200]}); correct it")


def without_devices(settings: LlamaSettings) -> LlamaSettings:
    """Return the settings for a process that has the processor alone and keeps nothing of the file in memory."""
    return replace(
        settings,
        devices=(NO_DEVICE,),
        n_gpu_layers=0,
        split_mode="none",
        main_gpu=0,
        tensor_split=(),
        cpu_moe=False,
        n_cpu_moe=0,
        use_mmap=False,
        use_mlock=False,
        check_tensors=False,
        control_vectors=(),
        control_vector_layers=(),
        override_tensor=tuple(replace(one, buffer="CPU") for one in settings.override_tensor),
    )


class _Trial:
    """The trial, in its own process."""

    def __init__(self, path: Path, settings: LlamaSettings) -> None:
        self._path = path
        self._settings = settings
        self._text: list[str] = []
        native_log()  # starts the backend
        self._callback = c.llama_log_callback(
            lambda _level, text, _data: self._text.append(text.decode("utf-8", "replace"))
        )
        c.llama_log_set(self._callback, None)

    def run(self) -> Outcome:
        settings = self._settings
        with self._loaded(settings) as model:
            heard = "".join(self._text)
            if model:
                self._lay_out(model)
        if not model:
            return Outcome(fault=self._culprit())
        if settings.override_tensor and not any(map(_MOVED.match, heard.splitlines())):
            return Outcome(
                fault="override_tensor: no pattern fits the name of a tensor, such as blk.0.ffn_down.weight; correct "
                "them"
            )
        return Outcome(is_loaded=True, used=frozenset(_USED.findall(heard)), wanted=dict(_WRONG.findall(heard)))

    @contextmanager
    def _loaded(self, settings: LlamaSettings) -> Iterator[int]:
        """Load the model without its weights; 0: llama.cpp refuses, and `_reason` says why."""
        self._text.clear()
        params = ModelParams(settings)
        params.native.no_alloc = True
        pointer: int = c.llama_model_load_from_file(os.fsencode(self._path), params.native) or 0
        try:
            yield pointer
        finally:
            if pointer:
                c.llama_model_free(pointer)

    def _lay_out(self, model: int) -> None:
        """Make a context, whose graphs are laid out by the metadata. One that is refused is refused again later."""
        params = c.llama_context_default_params()
        fill_context(params, self._settings)
        params.n_ctx = params.n_batch = params.n_ubatch = N_CTX
        params.n_seq_max, params.kv_unified = 2, True
        context = c.llama_init_from_model(model, params)
        if context:
            c.llama_free(context)

    def _culprit(self) -> str:
        """Return the setting without which llama.cpp loads the model, and its reason; empty: it never does."""
        plain = replace(self._settings, override_kv={}, override_tensor=())
        if not self._loads(plain):
            return ""
        for number, one in enumerate(self._settings.override_tensor):
            if not self._loads(replace(plain, override_tensor=(one,))):
                return (
                    f"override_tensor[{number}]: {one.pattern!r} is no regular expression ({self._reason()}); write "
                    "one as ECMAScript has them"
                )
        for key, value in self._settings.override_kv.items():
            if not self._loads(replace(plain, override_kv={key: value})):
                return f"override_kv: llama.cpp can't load the model with this {key} ({self._reason()}); correct it"
        return "override_kv: llama.cpp can't load the model with these values together; correct them"

    def _loads(self, settings: LlamaSettings) -> bool:
        with self._loaded(settings) as model:
            return bool(model)

    def _reason(self) -> str:
        found = re.findall(r"error loading model: (.{1,200})", "".join(self._text))
        return found[-1].removesuffix(";") if found else "no reason given"


def main(path: Path, cpu_s: int) -> None:
    """Try the settings that standard input brings; write the `Outcome` as the last line."""
    end_with_parent()
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=LlamaSettings)
    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())  # what ggml asserts on is told there
    trial = _Trial(path, settings)
    bound_memory(EXTRA_BYTES)
    bound_cpu(cpu_s)
    outcome = msgspec.json.encode(trial.run())
    sys.stdout.buffer.write(b"\n" + outcome + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
