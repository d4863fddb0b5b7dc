"""Parameters of the chat API that are not read: ignored because they change nothing here, or refused with a remedy.

Nothing is dropped in silence that would change an answer. A refused parameter passes when it has a value that asks
for nothing (`harmless`), because many clients send every parameter they know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.errors import UnsupportedParameter

IGNORED = frozenset(
    {
        "metadata",
        "moderation",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "user",
    }
)
"""Accepted and without effect on the answer: labels for the provider's own bookkeeping, hints about caches."""


@dataclass(frozen=True, slots=True)
class Refusal:
    remedy: str
    harmless: tuple[Any, ...] = ()


REFUSED: dict[str, Refusal] = {
    "audio": Refusal("Paddock answers in text; leave it out."),
    "function_call": Refusal("It is the older form; use `tool_choice`.", ("auto", "none")),
    "functions": Refusal("It is the older form; use `tools`.", ([],)),
    "modalities": Refusal('Paddock answers in text; leave it out or send ["text"].', (["text"],)),
    "n": Refusal("One answer per request: send 1, and the request again for each further answer.", (1,)),
    "parallel_tool_calls": Refusal("The model decides how many tools it calls; leave it out or send true.", (True,)),
    "prediction": Refusal("Leave it out."),
    "reasoning_effort": Refusal("Leave it out; the model's template decides.", ("none",)),
    "service_tier": Refusal("There is one tier; leave it out.", ("auto", "default")),
    "store": Refusal("Paddock keeps no answers; leave it out or send false.", (False,)),
    "verbosity": Refusal("Say in the prompt how long the answer should be.", ("medium",)),
    "web_search_options": Refusal("Paddock does not search; leave it out."),
}


def sift(document: dict[str, Any]) -> dict[str, Any]:
    """The parameters that are read. Raises UnsupportedParameter for the first that is refused; null is 'not given'."""
    kept: dict[str, Any] = {}
    for name, value in document.items():
        if value is None or name in IGNORED:
            continue
        refusal = REFUSED.get(name)
        if refusal is None:
            kept[name] = value
        elif not _harmless(value, refusal.harmless):
            raise UnsupportedParameter(f"`{name}` is not supported with this value. {refusal.remedy}", param=name)
    return kept


def _harmless(value: Any, harmless: tuple[Any, ...]) -> bool:
    # `True == 1` in Python, so the types count as well.
    return any(value == other and type(value) is type(other) for other in harmless)
