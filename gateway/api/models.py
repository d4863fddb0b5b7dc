"""`GET /v1/models` in the dialect of whoever asks: OpenAI's and Anthropic's APIs have it at the same address."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.anthropic.error_shape import ANTHROPIC
from gateway.api.dialect import SHAPE

VERSION_HEADER = b"anthropic-version"
"""The header that every request of Anthropic's API has."""


class SpokenModels:
    """Answers with the list, or with one model."""

    def __init__(self, openai: ASGIApp, anthropic: ASGIApp) -> None:
        self._openai = openai
        self._anthropic = anthropic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if any(name == VERSION_HEADER for name, _ in scope["headers"]):
            scope[SHAPE] = ANTHROPIC
            await self._anthropic(scope, receive, send)
        else:
            await self._openai(scope, receive, send)
