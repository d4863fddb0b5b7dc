"""System prompts that the catalog marks shareable: how many tokens of a prompt are everybody's.

A conversation that begins with a marked text, word for word, begins with tokens that only the text and the model's
template decide. Those are found once per text, as what several conversations that differ from there on have in common.
A prompt either begins with all of them, or nothing of it is shared: so whether they are cached tells that the text was
in use, and nothing of what anybody said after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import date

from workers.protocol.failures import CallFailed
from workers.protocol.requests import GenerateRequest, Message, Role

Tokenize = Callable[[Sequence[Message]], Sequence[int]]

OPENINGS = ("a", "Q", "7", " ", "\n\n", "\n", ".", "'s", "\u00e9", "\u4f60", "<", "{")
"""First words of users, as different as can be: a token that could run together with what follows is not common to
all of them."""


class SharedPrompts:
    """Safe to ask from several threads."""

    def __init__(self, texts: Iterable[str], tokenize: Tokenize, today: Callable[[], date] = date.today) -> None:
        """`texts`: of system messages. `tokenize`: a conversation without tools -> its prompt; raises CallFailed.

        `today`: the local date, which is what templates write.
        """
        self._texts = frozenset(texts)
        self._tokenize = tokenize
        self._today = today
        self._found: dict[tuple[str, str], tuple[date, Sequence[int]]] = {}

    def num_public(self, request: GenerateRequest, tokens: Sequence[int]) -> int:
        """How many of `tokens`, the request's prompt, have no secret in them; 0 where no marked text begins it."""
        if request.prompt is not None or request.tools or not request.messages:
            return 0
        first = request.messages[0]
        if first.role not in ("system", "developer") or first.content not in self._texts:
            return 0
        public = self._public(first.role, first.content)
        return len(public) if list(tokens[: len(public)]) == list(public) else 0

    def _public(self, role: Role, text: str) -> Sequence[int]:
        """Templates may write the date, which everybody knows: it holds for a day."""
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
