"""Turns a command line of llama-server into a model's entry of a catalog."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from gateway.commands.imports.options import INSTEAD, LLAMA, MODEL, SAMPLING, UNNEEDED, WITH_VALUE, Kind

NUMBER = re.compile(r"-?\.?\d")
FLASH = {"on": "on", "1": "on", "true": "on", "off": "off", "0": "off", "false": "off", "auto": "auto"}
MAX_DRAFT = 32
"""Most tokens that a draft model guesses at once, in a catalog."""


class BadOption(ValueError):
    """An option's value makes no sense; the message says which."""


@dataclass(slots=True)
class Words:
    """A command line that is being read."""

    words: Sequence[str]
    at: int = 0

    def __iter__(self) -> Iterator[str]:
        while self.at < len(self.words):
            self.at += 1
            yield self.words[self.at - 1]

    def value(self, option: str) -> str:
        """Return the next word, which is the option's value. Raises BadOption."""
        found = self.optional(lambda word: not word.startswith("--"))
        if found is None:
            raise BadOption(f"{option} has no value; give it one")
        return found

    def optional(self, is_value: Callable[[str], bool]) -> str | None:
        """Return the next word if it is a value; else None."""
        if self.at < len(self.words) and is_value(self.words[self.at]):
            self.at += 1
            return self.words[self.at - 1]
        return None


@dataclass(slots=True)
class Reading:
    """An entry that is being made, and what it can't have."""

    entry: dict[str, Any] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    """What has no counterpart, one sentence each."""
    unneeded: set[str] = field(default_factory=set)
    n_ctx: int = 0
    """The context of all slots together, as llama-server counts it."""
    is_unified: bool = False
    hf_file: str = ""

    def part(self, name: str) -> dict[str, Any]:
        """Return an object of the entry, such as its `llama`."""
        found: dict[str, Any] = self.entry.setdefault(name, {})
        return found


def read_command(words: Sequence[str]) -> Reading:
    """Return the entry that options of llama-server make. Raises BadOption."""
    reading, left = Reading(), Words(words)
    for word in left:
        _read(reading, word, left)
    _finish(reading)
    return reading


def _read(reading: Reading, option: str, left: Words) -> None:
    if option in SPECIAL:
        SPECIAL[option](reading, option, left)
    elif option in LLAMA:
        _set(reading.part("llama"), LLAMA[option], option, left)
    elif option in SAMPLING:
        _set(reading.part("sampling"), SAMPLING[option], option, left)
    elif option in MODEL:
        _set(reading.entry, MODEL[option], option, left)
    elif option in UNNEEDED:
        reading.unneeded.add(option)
        if option in WITH_VALUE:
            left.optional(_is_value)
    else:
        value = left.optional(_is_value)
        told = option if value is None or option in SECRET else f"{option} {value}"
        reading.lost.append(f"{told} has no counterpart{_instead(option)}")


SECRET = frozenset({"--api-key", "-hft", "--hf-token"})
"""Options whose values are not repeated."""


def _instead(option: str) -> str:
    return f"; {INSTEAD[option]}" if option in INSTEAD else ""


def _is_value(word: str) -> bool:
    return not word.startswith("-") or NUMBER.match(word) is not None


def _set(part: dict[str, Any], target: tuple[str, Kind], option: str, left: Words) -> None:
    name, kind = target
    if kind in ("on", "off"):
        part[name] = kind == "on"
    elif kind == "text":
        part[name] = left.value(option)
    else:
        part[name] = _number(option, left.value(option), is_whole=kind == "int")


def _number(option: str, text: str, *, is_whole: bool) -> int | float:
    try:
        return int(text) if is_whole else float(text)
    except ValueError:
        raise BadOption(f"{option} {text}: not a {'whole number' if is_whole else 'number'}; correct it") from None


def _context(reading: Reading, option: str, left: Words) -> None:
    reading.n_ctx = int(_number(option, left.value(option), is_whole=True))


def _threads(reading: Reading, option: str, left: Words) -> None:
    count = _number(option, left.value(option), is_whole=True)
    if count > 0:
        reading.part("llama")["n_threads_batch" if option in ("-tb", "--threads-batch") else "n_threads"] = count


def _layers(reading: Reading, option: str, left: Words) -> None:
    value = left.value(option)
    if value not in ("auto", "all"):
        reading.part("llama")["n_gpu_layers"] = max(-1, int(_number(option, value, is_whole=True)))


def _flash(reading: Reading, option: str, left: Words) -> None:
    value = left.optional(lambda word: word.lower() in FLASH)
    reading.part("llama")["flash_attn"] = FLASH[value.lower()] if value else "on"


def _unified(reading: Reading, option: str, left: Words) -> None:
    reading.is_unified = True
    reading.unneeded.add(option)


def _hub(reading: Reading, option: str, left: Words) -> None:
    reading.entry["hf"] = left.value(option)


def _hub_file(reading: Reading, option: str, left: Words) -> None:
    reading.hf_file = left.value(option)


def _no_projector(reading: Reading, option: str, left: Words) -> None:
    reading.entry["projector"] = "none"


def _tags(reading: Reading, option: str, left: Words) -> None:
    reading.entry["tags"] = [tag.strip() for tag in left.value(option).split(",") if tag.strip()]


def _json(reading: Reading, option: str, left: Words) -> None:
    text = left.value(option)
    try:
        values = json.loads(text)
    except ValueError:
        raise BadOption(f"{option} {text}: not valid JSON; correct it") from None
    if not isinstance(values, dict):
        raise BadOption(f"{option} {text}: must be a JSON object; correct it")
    reading.part("chat_template_kwargs").update(values)


def _effort(reading: Reading, option: str, left: Words) -> None:
    if (level := left.value(option)) != "default":
        reading.part("chat_template_kwargs")["reasoning_effort"] = level


def _rope_scale(reading: Reading, option: str, left: Words) -> None:
    factor = _number(option, left.value(option), is_whole=False)
    if factor <= 0:
        raise BadOption(f"{option} {factor:g}: must be above 0; correct it")
    reading.part("llama")["rope_freq_scale"] = 1 / factor


def _shares(reading: Reading, option: str, left: Words) -> None:
    texts = re.split(r"[,/]", left.value(option))
    reading.part("llama")["tensor_split"] = [_number(option, text, is_whole=False) for text in texts]


def _devices(reading: Reading, option: str, left: Words) -> None:
    reading.part("llama")["devices"] = [name.strip() for name in left.value(option).split(",")]


def _rank(reading: Reading, option: str, left: Words) -> None:
    reading.part("llama")["pooling"] = "rank"


def _load_mode(reading: Reading, option: str, left: Words) -> None:
    mode = left.value(option)
    if mode == "dio":
        reading.lost.append(f"{option} dio has no counterpart; the file is mapped")
    elif mode != "auto":
        reading.part("llama")["use_mmap"] = "mmap" in mode
        reading.part("llama")["use_mlock"] = "mlock" in mode


def _samplers(reading: Reading, option: str, left: Words) -> None:
    reading.part("sampling")["samplers"] = [name for name in left.value(option).split(";") if name]


def _breaker(reading: Reading, option: str, left: Words) -> None:
    breaker = left.value(option).encode().decode("unicode_escape")
    reading.part("sampling").setdefault("dry_sequence_breakers", []).append(breaker)


def _metadata(reading: Reading, option: str, left: Words) -> None:
    for one in left.value(option).split(","):
        key, _, typed = one.partition("=")
        kind, _, text = typed.partition(":")
        reading.part("llama").setdefault("override_kv", {})[key] = _metadata_value(option, kind, text)


def _metadata_value(option: str, kind: str, text: str) -> int | float | bool | str:
    if kind in ("int", "float"):
        return _number(option, text, is_whole=kind == "int")
    if kind == "bool":
        return text == "true"
    if kind == "str":
        return text
    raise BadOption(f"{option}: {kind!r} is no type; it is int, float, bool or str")


def _tensors(reading: Reading, option: str, left: Words) -> None:
    for one in left.value(option).split(","):
        pattern, _, buffer = one.rpartition("=")
        reading.part("llama").setdefault("override_tensor", []).append({"pattern": pattern, "buffer": buffer})


def _adapters(reading: Reading, option: str, left: Words) -> None:
    for path, scale in _scaled(option, left):
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", PurePosixPath(path).stem) or "adapter"
        taken = {one["name"] for one in reading.entry.get("adapters", ())}
        name = next(free for free in (name, *(f"{name}-{number}" for number in range(2, 4096))) if free not in taken)
        adapter = {"name": name, "path": path, "pinned": True, "scale": scale}
        reading.entry.setdefault("adapters", []).append(adapter)


def _vectors(reading: Reading, option: str, left: Words) -> None:
    vectors = [{"path": path, "scale": scale} for path, scale in _scaled(option, left)]
    reading.part("llama").setdefault("control_vectors", []).extend(vectors)


def _scaled(option: str, left: Words) -> Iterator[tuple[str, float]]:
    """Yield files and their scales. Older versions had a scale as a word of its own."""
    text = left.value(option)
    if not option.endswith("-scaled"):
        yield from ((path, 1.0) for path in text.split(","))
        return
    if ":" not in text and (scale := left.optional(lambda word: NUMBER.match(word) is not None)) is not None:
        yield text, float(_number(option, scale, is_whole=False))
        return
    for one in text.split(","):
        path, colon, scale_text = one.rpartition(":")
        yield (path, float(_number(option, scale_text, is_whole=False))) if colon else (one, 1.0)


def _unapplied(reading: Reading, option: str, left: Words) -> None:
    reading.part("_")["unapplied"] = True


def _vector_layers(reading: Reading, option: str, left: Words) -> None:
    layers = [int(_number(option, left.value(option), is_whole=True)) for _ in range(2)]
    reading.part("llama")["control_vector_layers"] = layers


def _draft(reading: Reading, option: str, left: Words) -> None:
    draft = reading.part("speculation").setdefault("draft", {})
    value = left.value(option)
    if option in DRAFT_PATHS:
        draft["path"] = value
    elif option in DRAFT_HUB:
        draft["hf"] = value
    elif option in DRAFT_LAYERS:
        if value not in ("auto", "all"):
            draft["n_gpu_layers"] = max(-1, int(_number(option, value, is_whole=True)))
    else:
        asked = int(_number(option, value, is_whole=True))
        draft["n_max"] = min(max(asked, 1), MAX_DRAFT)
        if asked > MAX_DRAFT:
            reading.lost.append(f"{option} {asked}: a draft has {MAX_DRAFT} tokens at most")


DRAFT_PATHS = ("-md", "--model-draft", "--spec-draft-model")
DRAFT_HUB = ("-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf")
DRAFT_LAYERS = ("-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft", "--spec-draft-ngl")
DRAFT_SIZES = ("--draft", "--draft-n", "--draft-max", "--spec-draft-n-max")

Special = Callable[[Reading, str, Words], None]

SPECIAL: Mapping[str, Special] = {
    **dict.fromkeys(("-c", "--ctx-size"), _context),
    **dict.fromkeys(("-t", "--threads", "-tb", "--threads-batch"), _threads),
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers"), _layers),
    **dict.fromkeys(("-fa", "--flash-attn"), _flash),
    **dict.fromkeys(("-kvu", "--kv-unified"), _unified),
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo"), _hub),
    **dict.fromkeys(("-hff", "--hf-file"), _hub_file),
    **dict.fromkeys(("--no-mmproj", "--no-mmproj-auto"), _no_projector),
    "--tags": _tags,
    "--chat-template-kwargs": _json,
    "--reasoning-effort": _effort,
    "--rope-scale": _rope_scale,
    **dict.fromkeys(("-ts", "--tensor-split"), _shares),
    **dict.fromkeys(("-dev", "--device"), _devices),
    **dict.fromkeys(("--rerank", "--reranking"), _rank),
    **dict.fromkeys(("-lm", "--load-mode"), _load_mode),
    "--samplers": _samplers,
    "--dry-sequence-breaker": _breaker,
    "--override-kv": _metadata,
    **dict.fromkeys(("-ot", "--override-tensor"), _tensors),
    **dict.fromkeys(("--lora", "--lora-scaled"), _adapters),
    "--lora-init-without-apply": _unapplied,
    **dict.fromkeys(("--control-vector", "--control-vector-scaled"), _vectors),
    "--control-vector-layer-range": _vector_layers,
    **dict.fromkeys((*DRAFT_PATHS, *DRAFT_HUB, *DRAFT_LAYERS, *DRAFT_SIZES), _draft),
}
"""Option whose value is more than a field's -> what reads it."""


def _finish(reading: Reading) -> None:
    """Set what follows from several options together."""
    entry = reading.entry
    if entry.pop("_", None):
        for adapter in entry.get("adapters", ()):
            adapter["scale"] = 0.0
    if entry.get("slots", 1) < 1:
        del entry["slots"]
    if reading.n_ctx:
        # llama-server divides the context among its slots, unless these share it.
        slots = 1 if reading.is_unified else entry.get("slots", 1)
        entry["ctx"] = max(1, reading.n_ctx // slots)
        entry["kv_tokens"] = reading.n_ctx
    if "hf" in entry and reading.hf_file:
        entry["hf"] = f"{entry['hf'].partition(':')[0]}:{reading.hf_file}"
    if "path" in entry and "hf" in entry:
        reading.lost.append(f"-hf {entry.pop('hf')} is left out, since -m names a file")
    draft = entry.get("speculation", {}).get("draft")
    if draft is not None and "path" not in draft and "hf" not in draft:
        reading.lost.append(
            "options of drafts have no use without a draft model; `speculation` drafts without one, too"
        )
        del entry["speculation"]
    llama = entry.get("llama")
    if llama is not None and "none" not in llama.get("devices", ()):
        gpus = max(len(llama.get("tensor_split", ())), len(llama.get("devices", ())), llama.get("main_gpu", 0) + 1)
        entry.update({"gpus": gpus} if gpus > 1 else {})
    if llama is not None and llama.get("split_mode") in ("layer", "tensor"):
        llama.pop("main_gpu", None)
