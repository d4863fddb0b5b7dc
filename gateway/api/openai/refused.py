"""Parameters of OpenAI's API that are not read (`gateway.api.parameters.unread`)."""

from __future__ import annotations

from gateway.api.parameters.others import ONE_OF_SEVERAL, OTHERS_IGNORED, OTHERS_REFUSED
from gateway.api.parameters.unread import Refusal

LABELS = {
    "metadata": "a label for the provider's own bookkeeping",
    "safety_identifier": "a label for the provider's own bookkeeping",
    "user": "a label for the provider's own bookkeeping",
}

SERVER_SIDE = {
    "backend_sampling": "where sampling runs is the worker's choice; the answer is the same",
    "n_cache_reuse": "the prompt cache finds what it knows by itself",
    "sse_ping_interval": "the gateway's `ping_interval_s` says how often a waiting stream is kept alive",
    "t_max_prompt_ms": "the header `x-slo-ttft-ms` says how urgent the first token is",
}
"""llama-server's parameters, in every dialect that has its extensions."""

IGNORED = {
    **LABELS,
    **SERVER_SIDE,
    **OTHERS_IGNORED,
    "moderation": "there is no moderation to choose",
    "prompt_cache_key": "the prompt cache finds what it knows by itself",
    "prompt_cache_options": "the prompt cache finds what it knows by itself",
    "prompt_cache_retention": "the prompt cache keeps what pays",
    "reasoning_control": "nothing ends a thought from outside; a budget bounds it",
}
"""Parameters of chat that are accepted and have no effect on the answer, and why."""

LLAMA_SERVER: dict[str, Refusal] = {
    "n_discard": Refusal("A context shift drops the older half; leave it out.", (0,)),
    "response_fields": Refusal("Fields can be chosen at POST /completion; leave it out.", ([],), is_hint=True),
}
"""llama-server's extensions that are not served."""

STORE = Refusal("Paddock keeps no answers of this route; leave it out or send false.", (False,), is_hint=True)

REFUSED: dict[str, Refusal] = {
    **LLAMA_SERVER,
    **OTHERS_REFUSED,
    "add_special_tokens": Refusal("The model's template begins the prompt; leave it out.", (False,)),
    "audio": Refusal("Paddock answers in text; leave it out."),
    "best_of": ONE_OF_SEVERAL,
    "chat_template": Refusal("Templates come with the model or its catalog entry; leave it out."),
    "echo": Refusal("An answer is told without its prompt; leave it out.", (False,)),
    "modalities": Refusal('Paddock answers in text; leave it out or send ["text"].', (["text"],)),
    "parse_tool_calls": Refusal("Tool calls are parsed where `tools` are given; leave it out.", (True,)),
    "prediction": Refusal("Answers are not compared with a predicted text.", is_hint=True),
    "service_tier": Refusal("There is one tier.", ("auto", "default"), is_hint=True),
    "store": STORE,
    "verbosity": Refusal("Say in the prompt how long the answer should be.", ("medium",), is_hint=True),
    "web_search_options": Refusal("Paddock does not search; leave it out."),
}
"""Parameters of chat that are refused."""

COMPLETION_IGNORED = {**LABELS, **SERVER_SIDE, **OTHERS_IGNORED}
COMPLETION_REFUSED: dict[str, Refusal] = {
    **LLAMA_SERVER,
    **OTHERS_REFUSED,
    "add_special_tokens": Refusal("A prompt begins as the model wants it; send tokens to leave that out.", (True,)),
    "store": STORE,
}

POOLED_IGNORED = {**LABELS}

RERANK_REFUSED: dict[str, Refusal] = {
    "max_chunks_per_doc": Refusal("Documents are ranked whole; leave it out."),
    "raw_scores": Refusal("Scores are told as the model gives them; leave it out or send true.", (True,)),
    "truncate": Refusal("A document that is too long is refused; shorten it.", (False,)),
}
