"""Which of llama.cpp's cases are run, and which end otherwise with Paddock, each with its reason."""

from __future__ import annotations

FILES = (
    "test_basic.py",
    "test_chat_completion.py",
    "test_compat_anthropic.py",
    "test_compat_oai_responses.py",
    "test_completion.py",
    "test_ctx_shift.py",
    "test_embedding.py",
    "test_ignore_eos.py",
    "test_infill.py",
    "test_lora.py",
    "test_metrics.py",
    "test_rerank.py",
    "test_security.py",
    "test_slot_save.py",
    "test_stream.py",
    "test_template.py",
    "test_tokenize.py",
    "test_tool_call.py",
)

LEFT_OUT = {
    "test_compat_gcp.py": "Google's prediction routes are no part of llama-server's API",
    "test_kv_keep_only_active.py": "tells of flags of llama-server's own cache",
    "test_mcp_servers.py": "llama-server's agent tools are no part of an endpoint",
    "test_proxy.py": "llama-server's proxy for its web UI is no part of an endpoint",
    "test_router.py": "llama-server's several-model mode has routes of its own",
    "test_sleep.py": "a model that is put to sleep is started and stopped by the supervisor here",
    "test_speculative.py": "nothing is drafted yet",
    "test_tools_builtin.py": "llama-server's agent tools are no part of an endpoint",
    "test_vision_api.py": "pictures are not taken yet",
}
"""Files that are not run."""

EMPTY = "a stream of chat begins with an empty text, as OpenAI's does, not with null: programs add up what chunks have"
NO_UI = "there is no web page to serve yet"
ROUTER = "starts llama-server's several-model mode, which has no models to begin with"
STREAMS = (
    f"{ROUTER}; `/v1/stream` and `/v1/streams/lookup` are not here either: streams are read again by "
    "`x-resume-grace` and `Last-Event-ID`"
)
BY_REQUEST = "a flag of the whole server there; here each request asks for it"
LETTERS = "looks for a header's name in capital letters; names of headers have no case, and ours are in small ones"
CREDENTIALS = "no answer allows credentials: any page may ask, with a key that it has itself"
HEADERS = "the headers that a page wants to send are named in the answer: `*` does not stand for `Authorization`"
OPENAI_WORDS = "chat has OpenAI's words and code; the native routes have llama-server's"
OTHER_MODEL = "what the model says, and its tokens, are those of another one, which stands in for it"
PICTURES = "pictures are not taken yet, which is a 501 here"
INCOMPLETE = (
    "an answer that its token limit ends is `response.incomplete`, as OpenAI has it; `response.completed` there"
)
BY_WORKER = "tokens are counted at each worker's own address, with the name of its model"

WITHOUT_CALL = (
    "fast[meta-llama-Llama-3.3-70B-Instruct-128-tools0-None",
    "fast[meta-llama-Llama-3.3-70B-Instruct-128-tools1-None",
    "fast[meta-llama-Llama-3.3-70B-Instruct-128-tools2-none",
    "slow[meetkai-functionary-medium-v3.1-256-tools3-None",
    "slow[meetkai-functionary-medium-v3.1-256-tools4-None",
    "slow[meetkai-functionary-medium-v3.1-256-tools5-none",
    "slow[meetkai-functionary-medium-v3.2-256-tools0-None",
    "slow[meetkai-functionary-medium-v3.2-256-tools1-None",
    "slow[meetkai-functionary-medium-v3.2-256-tools2-none",
    "slow[meta-llama-Llama-3.2-3B-Instruct-256-tools6-None",
    "slow[meta-llama-Llama-3.2-3B-Instruct-256-tools7-None",
    "slow[meta-llama-Llama-3.2-3B-Instruct-256-tools8-none",
)
"""Streamed cases of chats whose tools are not called."""

OTHERWISE: dict[str, str] = {
    "test_basic.py::test_no_ui": NO_UI,
    "test_basic.py::test_server_multiple_addresses": "a gateway listens on one address",
    "test_chat_completion.py::test_chat_completion[None-Book-What is the best book-8-^ blue-23-8-length-True-"
    "This is not a chat template, it is]": "a template has marks of Jinja; without them the catalog's is the name of a "
    "file",
    "test_chat_completion.py::test_chat_completion_stream[": EMPTY,
    "test_chat_completion.py::test_chat_completion_with_timings_per_token": EMPTY,
    "test_chat_completion.py::test_logprobs_stream": EMPTY,
    "test_chat_completion.py::test_chat_template": BY_REQUEST,
    "test_chat_completion.py::test_chat_template_assistant_prefill[": BY_REQUEST,
    "test_chat_completion.py::test_chat_template_continue_final_message_vllm_compat": BY_REQUEST,
    "test_chat_completion.py::test_invalid_chat_completion_req[messages7]": "two turns of the assistant at the end are "
    "answered: the last one is gone on from",
    "test_chat_completion.py::test_context_size_exceeded": OPENAI_WORDS,
    "test_chat_completion.py::test_context_size_exceeded_stream": OPENAI_WORDS,
    "test_compat_anthropic.py::test_anthropic_tool_result_with_image": PICTURES,
    "test_compat_anthropic.py::test_anthropic_vision_format_accepted": PICTURES,
    "test_compat_oai_responses.py::test_responses_stream_with_llama_telemetry": INCOMPLETE,
    "test_ctx_shift.py::test_ctx_shift_enabled": BY_REQUEST,
    "test_lora.py::test_lora[1.0-(eye|love|glass|sun)+]": OTHER_MODEL,
    "test_lora.py::test_lora_per_request": OTHER_MODEL,
    "test_metrics.py::test_metrics_embedding_prompt_is_counted": BY_WORKER,
    "test_metrics.py::test_metrics_predicted_total_matches_requests": BY_WORKER,
    "test_metrics.py::test_metrics_prometheus_format": BY_WORKER,
    "test_metrics.py::test_metrics_prompt_processed_and_cached": BY_WORKER,
    "test_rerank.py::test_rerank": OTHER_MODEL,
    "test_rerank.py::test_rerank_tei_format": OTHER_MODEL,
    "test_rerank.py::test_rerank_usage[": OTHER_MODEL,
    "test_security.py::test_access_static_assets_without_api_key": NO_UI,
    "test_security.py::test_cors_options[localhost-Access-Control-Allow-Origin-localhost]": LETTERS,
    "test_security.py::test_cors_options[origin-Access-Control-Allow-Credentials-true]": CREDENTIALS,
    "test_security.py::test_cors_options[web.mydomain.fr-Access-Control-Allow-Headers-*]": HEADERS,
    "test_security.py::test_cors_options[web.mydomain.fr-Access-Control-Allow-Methods-GET, POST, DELETE, OPTIONS]": (
        LETTERS
    ),
    "test_security.py::test_cors_options[web.mydomain.fr-Access-Control-Allow-Origin-web.mydomain.fr]": LETTERS,
    "test_security.py::test_cors_origins_defaults_to_localhost_with_tools_enabled": ROUTER,
    "test_security.py::test_cors_origins_localhost_reflects[": ROUTER,
    "test_security.py::test_cors_origins_localhost_rejects[": ROUTER,
    "test_security.py::test_cors_proxy_only_forwards_explicit_proxy_headers": "there is no proxy for a web page",
    "test_slot_save.py::test_slot_restore_legacy_token_list": "saved slots are sealed, in a form of their own",
    "test_slot_save.py::test_slot_save_restore": "slots share what they have computed: less is left to compute",
    "test_stream.py::test_stream_resume_and_stop_with_slashed_model_name": STREAMS,
    "test_stream.py::test_stream_resumes_after_reload_during_model_load": STREAMS,
    "test_stream.py::test_stream_stop_during_model_load": STREAMS,
    **{
        f"test_tool_call.py::test_completion_without_tool_call_{case}-CompletionMode.STREAMED]": EMPTY
        for case in WITHOUT_CALL
    },
}
"""A case's id, or its beginning up to the bracket where all of one function end so -> why it ends otherwise here."""


def reason_of(case: str) -> str | None:
    """Return why the case ends otherwise; None: it does not."""
    return next((reason for listed, reason in OTHERWISE.items() if names(listed, case)), None)


def names(listed: str, case: str) -> bool:
    """Whether an entry of the list is of this case."""
    return case == listed or (listed.endswith("[") and case.startswith(listed))
