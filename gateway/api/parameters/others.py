"""Parameters of vLLM, Ollama, llama-cpp-python and web clients that no dialect reads, for the tables of each.

Parameters that would change an answer are refused. Those of loading a model, or of a client's own affairs, are ignored.
Sources: "OpenAI-Compatible Server" of vLLM's documentation and its SamplingParams; "Parameter" of Ollama's Modelfile
reference and its API; llama-cpp-python's server (`llama_cpp/server/types.py`); tools/server/README.md of llama.cpp.
"""

from __future__ import annotations

from gateway.api.parameters.unread import Refusal

_LOADING = "how a model is loaded is the catalog's and the workers' to say"
_BEAMS = "it counts in a beam search only"
_GUIDES = "forms are kept to in one way"

OTHERS_IGNORED = {
    "chat_id": "a label of the client's own",
    "early_stopping": _BEAMS,
    "guided_decoding_backend": _GUIDES,
    "guided_whitespace_pattern": _GUIDES,
    "keep_alive": "a model stays as long as the catalog says",
    "kv_transfer_params": "where cached prompts lie is the workers' affair",
    "length_penalty": _BEAMS,
    "logit_bias_type": "in `logit_bias` numbers are tokens, and other texts are texts",
    "low_vram": _LOADING,
    "main_gpu": _LOADING,
    "mm_processor_kwargs": "the models here read text",
    "num_batch": _LOADING,
    "num_ctx": _LOADING,
    "num_gpu": _LOADING,
    "num_thread": _LOADING,
    "numa": _LOADING,
    "penalize_newline": "llama.cpp penalises line ends like other tokens",
    "penalize_nl": "llama.cpp penalises line ends like other tokens",
    "raw": "conversations go through the model's template, prompts of completions never do",
    "request_id": "the header `x-request-id` names a request",
    "spaces_between_special_tokens": "a text has the spaces that its tokens have",
    "tfs_z": "llama.cpp has no such sampler any more",
    "use_mlock": _LOADING,
    "use_mmap": _LOADING,
}
"""Parameters that are accepted and have no effect, and why."""

OTHERS_REFUSED: dict[str, Refusal] = {
    "allowed_token_ids": Refusal("Rule other tokens out by `logit_bias`, or send a `grammar`.", ([],)),
    "bad_words": Refusal("Rule texts out by `logit_bias`, with false.", ([],)),
    "format": Refusal("Send `response_format`.", ("",)),
    "include_stop_str_in_output": Refusal("A stop string is never part of an answer; leave it out.", (False,)),
    "logits_processors": Refusal("Paddock runs no code of callers; leave it out.", ([],)),
    "prompt_embeds": Refusal("Send the prompt as text or tokens."),
    "prompt_logprobs": Refusal(
        "`/v1/completions` tells how likely a prompt is, with `echo` and `logprobs`; leave it out.", (0,)
    ),
    "return_tokens_as_token_ids": Refusal("`return_tokens` tells the tokens; leave it out.", (False,)),
    "truncate_prompt_tokens": Refusal("A prompt that is too long is refused; send a shorter one."),
    "use_beam_search": Refusal("Answers are drawn token by token; leave it out.", (False,)),
}
"""Parameters that are refused, with what to do instead."""

ONE_OF_SEVERAL = Refusal("Of several answers none is chosen here; ask for them with `n`.", (0, 1))
"""The refusal of `best_of`."""
