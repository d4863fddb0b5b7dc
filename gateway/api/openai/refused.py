"""Parameters of OpenAI's API that are not read (`gateway.api.parameters.unread`)."""

from __future__ import annotations

from gateway.api.parameters.unread import Refusal

LABELS = {
    "metadata": "a label for the provider's own bookkeeping",
    "safety_identifier": "a label for the provider's own bookkeeping",
    "user": "a label for the provider's own bookkeeping",
}

SERVER_SIDE = {
    "backend_sampling": "where sampling runs is the worker's choice; the answer is the same",
    "sse_ping_interval": "the gateway's `ping_interval_s` says how often a waiting stream is kept alive",
    "verbose": "there is no more to tell",
}
"""llama-server's, in every dialect that has its extensions."""

IGNORED = {
    **LABELS,
    **SERVER_SIDE,
    "moderation": "there is no moderation to choose",
    "prompt_cache_key": "the prompt cache finds what it knows by itself",
    "prompt_cache_options": "the prompt cache finds what it knows by itself",
    "prompt_cache_retention": "the prompt cache keeps what pays",
}
"""Of chat: accepted and without effect on the answer, and why."""

LLAMA_SERVER: dict[str, Refusal] = {
    "n_cache_reuse": Refusal("Cached prompts are used from their beginning; leave it out.", (0,)),
    "n_discard": Refusal("A context shift drops the older half; leave it out.", (0,)),
    "response_fields": Refusal("Fields can be chosen at POST /completion; leave it out.", ([],)),
    "t_max_prompt_ms": Refusal("Leave it out; the header `x-slo-ttft-ms` says how urgent the first token is.", (-1, 0)),
}
"""llama-server's extensions that are not there."""

REFUSED: dict[str, Refusal] = {
    **LLAMA_SERVER,
    "audio": Refusal("Paddock answers in text; leave it out."),
    "chat_template": Refusal("Templates come with the model or its catalog entry; leave it out."),
    "modalities": Refusal('Paddock answers in text; leave it out or send ["text"].', (["text"],)),
    "parse_tool_calls": Refusal("Tool calls are parsed where `tools` are given; leave it out.", (True,)),
    "prediction": Refusal("Answers are not compared with a predicted text; leave it out."),
    "reasoning_budget_message": Refusal("A thought at its budget is closed without a message; leave it out.", ("",)),
    "reasoning_control": Refusal("Thoughts can't be ended from outside; set a budget.", (False,)),
    "service_tier": Refusal("There is one tier; leave it out.", ("auto", "default")),
    "store": Refusal("Paddock keeps no answers; leave it out or send false.", (False,)),
    "verbosity": Refusal("Say in the prompt how long the answer should be.", ("medium",)),
    "web_search_options": Refusal("Paddock does not search; leave it out."),
}
"""Of chat."""

COMPLETION_IGNORED = {**LABELS, **SERVER_SIDE}
COMPLETION_REFUSED: dict[str, Refusal] = {
    **LLAMA_SERVER,
    "store": Refusal("Paddock keeps no answers; leave it out or send false.", (False,)),
}

POOLED_IGNORED = {**LABELS}

RERANK_REFUSED: dict[str, Refusal] = {
    "max_chunks_per_doc": Refusal("Documents are ranked whole; leave it out."),
    "raw_scores": Refusal("Scores are told as the model gives them; leave it out or send true.", (True,)),
    "truncate": Refusal("A document that is too long is refused; shorten it.", (False,)),
}
