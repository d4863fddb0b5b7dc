"""Finds the family of a model, by its chat template or by the catalog's name for it."""

from __future__ import annotations

from dataclasses import replace

from workers.chat.reasoning import thought_of
from workers.chat.tools.command_r import COMMAND_R, COMMAND_R7B
from workers.chat.tools.deepseek import DEEPSEEK, DEEPSEEK_V31
from workers.chat.tools.family import Family
from workers.chat.tools.functionary import FUNCTIONARY_V31, FUNCTIONARY_V32
from workers.chat.tools.functions import DEEPSEEK_V4, DEEPSEEK_V32, MINIMAX, QWEN3_CODER, SEED_OSS
from workers.chat.tools.gemma4 import GEMMA4
from workers.chat.tools.gigachat import GIGACHAT, GIGACHAT_30
from workers.chat.tools.glm import GLM
from workers.chat.tools.harmony import HARMONY
from workers.chat.tools.hermes import HERMES
from workers.chat.tools.kimi import KIMI
from workers.chat.tools.llama import LLAMA
from workers.chat.tools.mistral import MISTRAL, MISTRAL_LIST
from workers.chat.tools.plain import PLAIN
from workers.chat.tools.python_calls import GEMMA, LFM2, PYTHONIC
from workers.chat.tools.tool_call_list import FUNCTOOLS_FAMILY, GRANITE, NEMOTRON, PHI4

FAMILIES = (
    *(HARMONY, GEMMA4, KIMI, COMMAND_R7B, COMMAND_R, MISTRAL, MISTRAL_LIST, DEEPSEEK_V32),
    *(DEEPSEEK_V4, DEEPSEEK, DEEPSEEK_V31, GIGACHAT, GIGACHAT_30),
    *(SEED_OSS, MINIMAX, QWEN3_CODER, GLM, FUNCTIONARY_V31, FUNCTIONARY_V32, GRANITE, PHI4, LFM2, PYTHONIC),
    *(NEMOTRON, FUNCTOOLS_FAMILY, HERMES, LLAMA, GEMMA, PLAIN),
)
"""All families, in the order in which templates are tried."""


class FamilyUnknown(ValueError):
    """No family has this name; the message lists the known ones."""


def family_of(template: str, name: str = "") -> Family:
    """Return the named family, else the template's, with the thought marks that the template has.

    Raises FamilyUnknown.
    """
    family = _named(name) if name else next((family for family in FAMILIES if family.fits(template)), PLAIN)
    return family if family.thought is not None else replace(family, thought=thought_of(template))


def _named(name: str) -> Family:
    found = next((family for family in FAMILIES if family.name == name), None)
    if found is None:
        known = ", ".join(sorted(family.name for family in FAMILIES))
        raise FamilyUnknown(f"tool_family: there is no family {name!r}; use one of: {known}, or leave it out")
    return found
