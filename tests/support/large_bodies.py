"""Bodies of a few MiB that would take gigabytes and half a minute if everything in them became an object."""

from __future__ import annotations

from dataclasses import dataclass

FULL_BYTES = 8 << 20
"""What a gateway reads by default."""


@dataclass(frozen=True, slots=True)
class LargeBody:
    name: str
    path: str
    begin: bytes
    unit: bytes
    end: bytes

    def of(self, num_bytes: int = FULL_BYTES) -> bytes:
        """Return it filled up to about so many bytes."""
        number = (num_bytes - len(self.begin) - len(self.end) - 1) // (len(self.unit) + 1)
        return self.begin + b",".join([self.unit] * number) + self.end


def fields(number: int = 620_000) -> bytes:
    """Return that many fields that nobody knows."""
    return b",".join(b'"k%06d":1' % n for n in range(number))


TURN = b'{"role":"user","content":[' + b",".join([b"{}"] * 9_999) + b"]}"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"

LARGE_BODIES = (
    LargeBody("strings-for-tokens", "/detokenize", b'{"tokens":[', b'""', b"]}"),
    LargeBody("tokens", "/detokenize", b'{"tokens":[', b"1", b"]}"),
    LargeBody("wrong-parts", CHAT, b'{"messages":[', TURN, b"]}"),
    LargeBody("wrong-parts-of-responses", RESPONSES, b'{"input":[', TURN, b"]}"),
    LargeBody("wrong-blocks", MESSAGES, b'{"max_tokens":1,"messages":[', TURN, b"]}"),
    LargeBody("nested-parts", CHAT, b'{"messages":[{"role":"user","content":[', b"[]", b"]}]}"),
    LargeBody("empty-parts", CHAT, b'{"messages":[{"role":"user","content":[', b'{"type":"text","text":""}', b"]}]}"),
    LargeBody("unknown-fields", CHAT, b"{" + fields(600_000) + b',"stop":[', b'""', b"]}"),
    LargeBody("token-prompt", "/v1/completions", b'{"prompt":[', b"1", b"]}"),
    LargeBody("mixed-prompt", "/completion", b'{"prompt":[1,', b'""', b"]}"),
    LargeBody("inputs", "/v1/embeddings", b'{"input":[', b"{}", b"]}"),
    LargeBody("documents", "/v1/rerank", b'{"query":"x","documents":[', b"{}", b"]}"),
    LargeBody("biases", CHAT, b'{"messages":[{"role":"user","content":"x"}],"logit_bias":[', b"[1,1]", b"]}"),
    LargeBody("tools", CHAT, b'{"messages":[{"role":"user","content":"x"}],"tools":[', b"{}", b"]}"),
    LargeBody("smallest-floats", "/v1/completions", b'{"prompt":[', b"2.2250738585072011e-308", b"]}"),
    LargeBody("long-integers", "/v1/completions", b'{"prompt":[', b"7" * 4_300, b"]}"),
)
