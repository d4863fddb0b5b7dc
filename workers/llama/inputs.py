"""The tokens of inputs that are embedded or ranked, as llama-server makes them.

Source: `tokenize_input_prompts` and `format_prompt_rerank` in server-common.cpp of llama.cpp.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence

from llama_cpp import llama_cpp as c

from workers.chat.prompts import Tokenizer
from workers.llama.errors import ModelError
from workers.llama.model import Model
from workers.llama.pooling import Pooling
from workers.llama.vocab import NO_TOKEN

_PLACEHOLDER = re.compile(r"\{(query|document)\}")


class PooledInputs:
    """Tokenises inputs. For any thread; valid as long as its model. Tokens are arrays: lists take ten times as much."""

    def __init__(self, model: Model, pooling: Pooling, tokenizer: Tokenizer) -> None:
        """Raise ModelError for a ranking model whose file does not say how to separate query and document."""
        self._tokenizer = tokenizer
        vocab = model.vocab.pointer
        template = c.llama_model_chat_template(model.pointer, b"rerank")
        self._template: str | None = template.decode("utf-8", "replace") if template else None
        separator = c.llama_vocab_sep(vocab)
        end = model.vocab.eos if model.vocab.eos != NO_TOKEN else separator
        ends = [end] if c.llama_vocab_get_add_eos(vocab) else []
        separators = [separator] if c.llama_vocab_get_add_sep(vocab) else []
        self._before = [model.vocab.bos] if c.llama_vocab_get_add_bos(vocab) else []
        self._between = ends + separators
        self._after = ends
        if pooling is Pooling.RANK and self._template is None and not self._between:
            raise ModelError(
                f"{model.path}: can't rank: its vocabulary adds no end or separator token and it has no `rerank` "
                "template; give a reranker's file"
            )

    def of_text(self, text: str, *, add_special: bool = True) -> Sequence[int]:
        """Return the tokens of a text for embedding, with begin and end tokens as the model asks.

        Control tokens in the text count as such. `add_special` False: no begin and end tokens, for a text that follows
        others in one input. Raises CallFailed.
        """
        return array("i", self._tokenizer.tokenize(text, add_special=add_special, parse_special=True))

    def of_pair(self, query: str, document: str) -> Sequence[int]:
        """Return the tokens of query and document for ranking, in the model's form for pairs. Raises CallFailed."""
        if self._template is not None:
            texts = {"query": query, "document": document}
            text = _PLACEHOLDER.sub(lambda match: texts[match[1]], self._template)
            return array("i", self._tokenizer.tokenize(text, add_special=False, parse_special=True))
        pair = array("i", self._before)
        for part in (self._plain(query), self._between, self._plain(document), self._after):
            pair.extend(part)
        return pair

    def _plain(self, text: str) -> Sequence[int]:
        return self._tokenizer.tokenize(text, add_special=False, parse_special=False)
