"""Names of answers, in OpenAI's manner: a prefix and random letters."""

from __future__ import annotations

import os


def completion_id() -> str:
    return "chatcmpl-" + os.urandom(12).hex()
