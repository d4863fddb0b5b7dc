"""Parameters of the chat API that are not read (`gateway.api.parameters.unread`)."""

from __future__ import annotations

from gateway.api.parameters.unread import Refusal

IGNORED = {
    "metadata": "a label for the provider's own bookkeeping",
    "moderation": "there is no moderation to choose",
    "prompt_cache_key": "the prompt cache finds what it knows by itself",
    "prompt_cache_options": "the prompt cache finds what it knows by itself",
    "prompt_cache_retention": "the prompt cache keeps what pays",
    "safety_identifier": "a label for the provider's own bookkeeping",
    "user": "a label for the provider's own bookkeeping",
}
"""Accepted and without effect on the answer, and why."""

REFUSED: dict[str, Refusal] = {
    "audio": Refusal("Paddock answers in text; leave it out."),
    "function_call": Refusal("It is the older form; use `tool_choice`.", ("auto", "none")),
    "functions": Refusal("It is the older form; use `tools`.", ([],)),
    "modalities": Refusal('Paddock answers in text; leave it out or send ["text"].', (["text"],)),
    "parallel_tool_calls": Refusal("The model decides how many tools it calls; leave it out or send true.", (True,)),
    "prediction": Refusal("Leave it out."),
    "reasoning_effort": Refusal("Leave it out; the model's template decides.", ("none",)),
    "service_tier": Refusal("There is one tier; leave it out.", ("auto", "default")),
    "store": Refusal("Paddock keeps no answers; leave it out or send false.", (False,)),
    "verbosity": Refusal("Say in the prompt how long the answer should be.", ("medium",)),
    "web_search_options": Refusal("Paddock does not search; leave it out."),
}
