"""Parameters of llama-server's generating routes that are not read (`gateway.api.parameters.unread`)."""

from __future__ import annotations

from gateway.api.parameters.others import ONE_OF_SEVERAL, OTHERS_IGNORED, OTHERS_REFUSED
from gateway.api.parameters.unread import Refusal

_UNPARSED = "the text of a completion is not parsed"

IGNORED = {
    **OTHERS_IGNORED,
    "backend_sampling": "a worker draws tokens where it draws them fastest",
    "chat_format": _UNPARSED,
    "chat_parser": _UNPARSED,
    "continue_final_message": _UNPARSED,
    "echo": _UNPARSED,
    "generation_prompt": _UNPARSED,
    "message_delimiters": "the prompt cache finds what it knows by itself",
    "n_cache_reuse": "the prompt cache finds what it knows by itself",
    "parse_tool_calls": _UNPARSED,
    "preserved_tokens": "a grammar's triggers are found in the text, whichever tokens they are made of",
    "reasoning_budget_end_tag": "without a budget it has no meaning",
    "reasoning_budget_end_tags": "without a budget it has no meaning",
    "reasoning_budget_message": "without a budget it has no meaning",
    "reasoning_budget_start_tag": "without a budget it has no meaning",
    "reasoning_control": "nothing can end a thought from outside",
    "reasoning_format": _UNPARSED,
    "sse_ping_interval": "the gateway's `ping_interval_s` decides",
    "stream_options": "the last event tells the counts in any case",
    "t_max_prompt_ms": "llama-server knows the name and does nothing with it",
    "verbose": "there is nothing more to tell",
}
"""Parameters that are accepted and have no effect on the answer, and why."""

REFUSED: dict[str, Refusal] = {
    **OTHERS_REFUSED,
    "best_of": ONE_OF_SEVERAL,
    "n_discard": Refusal("A shift drops the older half of the context; leave it out.", (0,)),
    "reasoning_budget_tokens": Refusal(
        "A completion has no thoughts; bound them in `/v1/chat/completions`, which knows the model's tags.", (-1,)
    ),
}
