"""Reads llama-server's prompts; where one is an object, its text is read in its place.

Source of the forms: "POST /completion" in tools/server/README.md of llama.cpp.
"""

from __future__ import annotations

from typing import Any

from gateway.api.parameters.faults import shown
from gateway.api.parameters.prompts import Prompt, read_prompts
from gateway.errors import InvalidRequest, NotSupported


def read_native_prompts(given: Any, path: str = "prompt") -> tuple[Prompt, ...]:
    """Return one prompt or several. Raises InvalidRequest, NotSupported for what is more than text."""
    if isinstance(given, list):
        # There is nearly always none among what may be a million tokens; a generator over them takes twice as long.
        if dict in set(map(type, given)):
            given = [_text_of(one, f"{path}.{n}") for n, one in enumerate(given)]
        return read_prompts(given, path)
    return read_prompts(_text_of(given, path), path)


def read_native_prompt(given: Any, path: str) -> Prompt:
    """Return one prompt; an array is always its parts. Raises InvalidRequest, NotSupported."""
    return read_prompts([given] if isinstance(given, list) else _text_of(given, path), path)[0]


def _text_of(given: Any, path: str) -> Any:
    """Return the text of an object, and everything else as it is."""
    if not isinstance(given, dict):
        return given
    if given.get("multimodal_data"):
        message = f"`{path}.multimodal_data` is not supported: the models here read text. Leave it out."
        raise NotSupported(message, param=f"{path}.multimodal_data")
    text = given.get("prompt_string")
    if not isinstance(text, str):
        message = f"`{path}.prompt_string` is {shown(text)}. Send a string."
        raise InvalidRequest(message, param=f"{path}.prompt_string")
    return text
