"""Guesses which setting was meant by an argument that is none: a flag of llama-server, one mistyped, a model's file."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

OF_LLAMA_SERVER: Mapping[str, str] = {
    "-m": "model",
    "-hf": "hf",
    "-hfr": "hf",
    "--hf-repo": "hf",
    "-a": "alias",
    "-c": "ctx",
    "--ctx-size": "ctx",
    "-np": "slots",
    "--parallel": "slots",
    "-mm": "projector",
    "--mmproj": "projector",
    "--lora": "adapters",
    "--chat-template-file": "chat_template",
    "--slot-save-path": "slot_save_dir",
    "--ssl-cert-file": "tls_cert",
    "--ssl-key-file": "tls_key",
}
"""Flag of llama-server -> the setting of the same meaning. Source: tools/server/README.md of llama.cpp."""
OF_LLAMA_CPP: Mapping[str, str] = {
    "-ngl": "n_gpu_layers",
    "--gpu-layers": "n_gpu_layers",
    "--n-gpu-layers": "n_gpu_layers",
    "-t": "n_threads",
    "--threads": "n_threads",
    "-tb": "n_threads_batch",
    "--threads-batch": "n_threads_batch",
    "-b": "n_batch",
    "--batch-size": "n_batch",
    "-ub": "n_ubatch",
    "--ubatch-size": "n_ubatch",
    "-fa": "flash_attn",
    "--flash-attn": "flash_attn",
    "-ctk": "cache_type_k",
    "--cache-type-k": "cache_type_k",
    "-ctv": "cache_type_v",
    "--cache-type-v": "cache_type_v",
    "-sm": "split_mode",
    "--split-mode": "split_mode",
    "-mg": "main_gpu",
    "--main-gpu": "main_gpu",
    "-ncmoe": "n_cpu_moe",
    "--n-cpu-moe": "n_cpu_moe",
}
"""The same for what is handed to llama.cpp -> the field of the setting `llama`."""


def hint(words: Sequence[str], settings: Collection[str], of_catalog: Collection[str], beside: Collection[str]) -> str:
    """Return ` (did you mean --ctx?)` or the like for arguments that are not known; empty: there is no guess.

    `settings`: names of those that may be given; `of_catalog`: fields that models have in a catalog only; `beside`:
    flags that are no settings."""
    flags = [_flag(name) for name in settings]
    wrong = next((word for word in words if word.startswith("-") and word not in flags), "")
    if not wrong:
        return _served_by(words[0], settings) if words else ""
    name = wrong.partition("=")[0]
    if (meant := OF_LLAMA_SERVER.get(name)) in settings:
        return f" (did you mean {_flag(str(meant))}?)"
    if (field := OF_LLAMA_CPP.get(name)) is not None and "llama" in settings:
        return f" (did you mean --llama '{{\"{field}\": {_value_of(wrong, words)}}}'?)"
    if name.lstrip("-").replace("-", "_") in of_catalog and "catalog" in settings:
        return " (it is a field of a model in a catalog: give --catalog FILE, see docs/catalog.md)"
    close = difflib.get_close_matches(name, [*beside, *flags], n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _value_of(wrong: str, words: Sequence[str]) -> str:
    """Return the value of an unknown flag as JSON; `...`: it has none."""
    _, is_set, value = wrong.partition("=")
    following = words[words.index(wrong) + 1 :]
    if not is_set and (not following or following[0].startswith("--")):
        return "..."
    value = value if is_set else following[0]
    try:
        return json.dumps(json.loads(value))
    except ValueError:
        return json.dumps(value)


def _served_by(word: str, settings: Collection[str]) -> str:
    """Return ` (did you mean --model FILE?)` for a word that stands for something to serve; else an empty text."""
    kinds = {
        "model": word.endswith(".gguf"),
        "catalog": word.endswith((".yaml", ".yml", ".json")),
        "models_dir": Path(word).is_dir(),
        "hf": word.count("/") == 1,
    }
    if not {"model", "hf"} <= set(settings):
        return ""
    named = next((name for name, fits in kinds.items() if fits and name in settings), "")
    return f" (did you mean {_flag(named)} {word}?)" if named else " (name a model by --model FILE or --hf OWNER/NAME)"
