"""Ids of answers, in OpenAI's manner: a prefix and random letters."""

from __future__ import annotations

import os


def chat_id() -> str:
    return "chatcmpl-" + os.urandom(12).hex()


def completion_id() -> str:
    return "cmpl-" + os.urandom(12).hex()
