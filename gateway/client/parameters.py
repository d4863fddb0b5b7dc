"""Declares the keyword parameters of the methods that generate. A parameter that is None is not sent.

Sources: llama-server (tools/server/README.md and server-schema.cpp of llama.cpp) for names, defaults and meaning of the
sampling parameters; OpenAI's API reference, "Create chat completion". `cache_salt`, `priority`, `context_shift` and
`special` are Paddock's own. Paddock refuses parameters that it does not have, llama-server ignores them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from gateway.client.answers import Message
from gateway.client.server_answers import LoraScale

Prompt = str | Sequence[int | str] | Mapping[str, Any]
"""Text, token ids, a mix of both, or llama-server's object with `prompt_string`."""

Messages = Sequence[Mapping[str, Any] | Message]
"""Turns of a conversation: dictionaries, or `Message` objects of earlier answers."""

Lora = Sequence[LoraScale | Mapping[str, Any]]
LogitBias = Mapping[str, float | bool] | Mapping[str, float] | Sequence[Sequence[Any]]


class SamplingParameters(TypedDict, total=False):
    """The parameters of sampling."""

    temperature: float | None
    dynatemp_range: float | None
    dynatemp_exponent: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    top_n_sigma: float | None
    xtc_probability: float | None
    xtc_threshold: float | None
    repeat_penalty: float | None
    repeat_last_n: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    dry_multiplier: float | None
    dry_base: float | None
    dry_allowed_length: int | None
    dry_penalty_last_n: int | None
    dry_sequence_breakers: Sequence[str] | None
    mirostat: int | None
    mirostat_tau: float | None
    mirostat_eta: float | None
    adaptive_target: float | None
    adaptive_decay: float | None
    min_keep: int | None
    samplers: Sequence[str] | str | None
    logit_bias: LogitBias | None
    seed: int | None
    n_probs: int | None
    post_sampling_probs: bool | None
    backend_sampling: bool | None


class GenerationParameters(SamplingParameters, total=False):
    """The parameters that chat and completion have in common."""

    model: str | None
    stop: Sequence[str] | str | None
    n_predict: int | None
    """Maximum number of tokens of the answer. -1: until the model ends it; 0: the prompt is only read into the cache.
    """
    ignore_eos: bool | None
    special: bool | None
    grammar: str | None
    grammar_lazy: bool | None
    grammar_triggers: Sequence[Mapping[str, Any]] | None
    preserved_tokens: Sequence[str] | None
    json_schema: Mapping[str, Any] | None
    response_format: Mapping[str, Any] | None
    guided_json: Mapping[str, Any] | str | None
    guided_regex: str | None
    guided_choice: Sequence[str] | None
    guided_grammar: str | None
    structured_outputs: Mapping[str, Any] | None
    cache_prompt: bool | None
    cache_salt: str | None
    id_slot: int | None
    lora: Lora | None
    priority: int | None
    speculation: bool | Literal["auto"] | None
    context_shift: bool | None
    n_keep: int | None
    n_discard: int | None
    n_cache_reuse: int | None
    n_indent: int | None
    t_max_predict_ms: int | None
    timings_per_token: bool | None
    return_tokens: bool | None
    return_progress: bool | None
    sse_ping_interval: int | None
    verbose: bool | None
    reasoning_budget_tokens: int | None
    reasoning_budget_start_tag: str | None
    reasoning_budget_end_tag: str | None
    reasoning_budget_end_tags: Sequence[str] | None
    reasoning_budget_message: str | None
    reasoning_control: bool | None
    extra_body: Mapping[str, Any] | None
    """Further parameters, which are sent as they are."""


class CompletionParameters(GenerationParameters, total=False):
    """The parameters of `complete` and `infill`."""

    n_cmpl: int | None
    response_fields: Sequence[str] | None
    """Names of the fields that the answer should have. `a/b`: field b of object a, which comes in `extra`."""


class ChatParameters(GenerationParameters, total=False):
    """The parameters of `chat.completions.create`."""

    max_tokens: int | None
    max_completion_tokens: int | None
    prediction: Mapping[str, Any] | None
    n: int | None
    stream_options: Mapping[str, bool] | None
    logprobs: bool | None
    top_logprobs: int | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    parse_tool_calls: bool | None
    functions: Sequence[Mapping[str, Any]] | None
    function_call: str | Mapping[str, Any] | None
    reasoning_effort: str | None
    thinking_budget_tokens: int | None
    enable_thinking: bool | None
    thinking: bool | Mapping[str, Any] | None
    reasoning_format: str | None
    generation_prompt: str | None
    continue_final_message: bool | str | None
    add_generation_prompt: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    documents: Sequence[Mapping[str, Any]] | None
    user: str | None
    metadata: Mapping[str, str] | None
    store: bool | None


EncodingFormat = Literal["float", "base64"]
