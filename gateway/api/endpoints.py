"""Every body that the gateway reads, by dialect: what docs/compatibility.md tells and the fuzzer sends."""

from __future__ import annotations

from gateway.api.anthropic import unread as anthropic
from gateway.api.anthropic.body import MessagesBody, PromptBody
from gateway.api.compatibility import DialectTable, Endpoint, page
from gateway.api.native import refused as native
from gateway.api.native.completion_body import CompletionBody as NativeCompletionBody
from gateway.api.native.completion_body import InfillBody
from gateway.api.native.embedding import EmbeddingBody
from gateway.api.native.lora import LoadBody, UnloadBody
from gateway.api.native.slots import ActionBody
from gateway.api.native.texts import DetokenizeBody, TokenizeBody
from gateway.api.openai import refused as openai
from gateway.api.openai.chat_body import ChatBody
from gateway.api.openai.completion_body import CompletionBody
from gateway.api.openai.embeddings import EmbeddingsBody
from gateway.api.openai.rerank import RerankBody
from gateway.api.responses import refused as responses
from gateway.api.responses.body import ResponsesBody

UNSERVED = "nothing: it answers 501 with what to do instead"

OPENAI = DialectTable(
    "OpenAI",
    "OpenAI's API with llama-server's and vLLM's extensions; reranking has no place in OpenAI's and is Jina's.",
    (
        Endpoint(
            (
                "POST /v1/chat/completions",
                "POST /chat/completions",
                "POST /v1/chat/completions/input_tokens",
                "POST /chat/completions/input_tokens",
                "POST /admin/explain",
            ),
            ChatBody,
            openai.IGNORED,
            openai.REFUSED,
        ),
        Endpoint(("POST /v1/completions",), CompletionBody, openai.COMPLETION_IGNORED, openai.COMPLETION_REFUSED),
        Endpoint(("POST /v1/embeddings",), EmbeddingsBody, openai.POOLED_IGNORED),
        Endpoint(
            ("POST /v1/rerank", "POST /v1/reranking", "POST /rerank", "POST /reranking"),
            RerankBody,
            openai.POOLED_IGNORED,
            openai.RERANK_REFUSED,
        ),
    ),
    {
        "POST /health/drain": "nothing; `timeout_s` and `settle_s` stand in the address",
        "POST /v1/moderations": UNSERVED,
        "POST /v1/audio/transcriptions": UNSERVED,
    },
)

RESPONSES = DialectTable(
    "OpenAI's Responses",
    "With the extensions of chat.",
    (
        Endpoint(
            (
                "POST /v1/responses",
                "POST /responses",
                "POST /v1/responses/input_tokens",
                "POST /responses/input_tokens",
            ),
            ResponsesBody,
            responses.IGNORED,
            responses.REFUSED,
        ),
    ),
    {
        "POST /v1/responses/{response_id}/cancel": "nothing",
        "POST /v1/responses/compact": UNSERVED,
        "POST /v1/conversations": UNSERVED,
    },
)

ANTHROPIC = DialectTable(
    "Anthropic",
    "Anthropic's messages, with llama-server's sampling parameters.",
    (
        Endpoint(("POST /v1/messages",), MessagesBody, anthropic.IGNORED, anthropic.REFUSED),
        Endpoint(("POST /v1/messages/count_tokens",), PromptBody),
    ),
)

NATIVE = DialectTable(
    "llama-server",
    "llama-server's own routes. The model is `model` of the body, "
    "else `?model=`, else the default for the route (docs/catalog.md).",
    (
        Endpoint(
            ("POST /completion", "POST /completions"),
            NativeCompletionBody,
            native.IGNORED,
            native.REFUSED,
        ),
        Endpoint(("POST /infill",), InfillBody, native.IGNORED, native.REFUSED),
        Endpoint(("POST /tokenize",), TokenizeBody),
        Endpoint(("POST /detokenize",), DetokenizeBody),
        Endpoint(("POST /embedding", "POST /embeddings"), EmbeddingBody),
        Endpoint(("POST /slots/{id_slot}",), ActionBody),
    ),
    {
        "POST /apply-template": "the body of `POST /v1/chat/completions`",
        "POST /props": "any object; nothing in it can be changed",
        "POST /lora-adapters": 'an array of `{"id", "scale"}`',
        "POST /models/load": "an object with `model`",
        "POST /models/unload": "an object with `model`",
        "POST /models": UNSERVED,
        "POST /audio/transcriptions": UNSERVED,
        "POST /v1/chat/completions/control": UNSERVED,
        "POST /v1/streams/lookup": UNSERVED,
        "POST /tools": UNSERVED,
    },
)

VLLM = DialectTable(
    "vLLM",
    "vLLM's routes for LoRA adapters.",
    (
        Endpoint(("POST /v1/load_lora_adapter",), LoadBody),
        Endpoint(("POST /v1/unload_lora_adapter",), UnloadBody),
    ),
)

TABLES = (OPENAI, RESPONSES, ANTHROPIC, NATIVE, VLLM)


def compatibility_page() -> str:
    return page(TABLES)
