"""Counts the tokens of a prompt that all teams share: those of system prompts that the catalog marks shareable.

A conversation that begins with a marked text, word for word, begins with tokens that only the text and the model's
template decide. They are found once per text, as the common tokens of several conversations that differ after it. A
prompt either begins with all of them, or nothing of it is shared. So whether they are cached tells only that the text
was in use, and nothing of what anybody said after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import date

from workers.protocol.failures import CallFailed
from workers.protocol.requests import GenerateRequest, Message, Role

Tokenize = Callable[[Sequence[Message]], Sequence[int]]

OPENINGS = ("a", "Q", "7", " ", "\n\n", "\n", ".", "'s", "\u00e9", "\u4f60", "<", "{")
"""First words of users, as different as can be, so that a token which could merge with the next text is not common
to all."""


class SharedPrompts:
    """The shareable system prompts of a model. For several threads."""

    def __init__(self, texts: Iterable[str], tokenize: Tokenize, today: Callable[[], date] = date.today) -> None:
        """`texts`: of system messages. `tokenize` returns the prompt of messages without tools, or raises CallFailed.

        `today` returns the local date, which is what templates write.
        """
        self._texts = frozenset(texts)
        self._tokenize = tokenize
        self._today = today
        self._found: dict[tuple[str, str], tuple[date, Sequence[int]]] = {}

    def num_public(self, request: GenerateRequest, tokens: Sequence[int]) -> int:
        """Return how many of `tokens`, the request's prompt, hold no secret; 0 where it begins with no marked text."""
        if request.prompt is not None or request.tools or not request.messages:
            return 0
        first = request.messages[0]
        if first.role not in ("system", "developer") or first.content not in self._texts:
            return 0
        public = self._public(first.role, first.content)
        return len(public) if list(tokens[: len(public)]) == list(public) else 0

    def _public(self, role: Role, text: str) -> Sequence[int]:
        """Return a marked text's shared tokens, kept for a day: templates may write the date, which is no secret."""
        today = self._today()
        known = self._found.get((role, text))
        if known is None or known[0] != today:
            known = self._found[role, text] = (today, self._common(role, text))
        return known[1]

    def _common(self, role: Role, text: str) -> Sequence[int]:
        first = Message(role, text)
        prompts = []
        for opening in OPENINGS:
            try:
                prompts.append(self._tokenize([first, Message("user", f"{opening} {opening}")]))
            except CallFailed:  # a template without a place for system messages
                return ()
        shortest = min(prompts, key=len)
        for position, token in enumerate(shortest):
            if any(prompt[position] != token for prompt in prompts):
                return shortest[:position]
        return ()
