"""The parsed settings of what one worker is to serve: its model and how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workers.chat.conversation import ChatDefaults
from workers.protocol.catalog import AdapterSpec, LlamaSettings
from workers.protocol.requests import Sampling
from workers.settings import WorkerSettings


class SettingUnusable(ValueError):
    """A setting that only the worker can check can't be used; the message names it and the remedy."""


@dataclass(frozen=True, slots=True)
class Wishes:
    settings: WorkerSettings
    path: Path
    """The model's file."""
    llama: LlamaSettings
    sampling: Sampling
    adapters: tuple[AdapterSpec, ...]
    """LoRA adapters that are known from the start."""
    shared_prompts: tuple[str, ...]
    """System prompts that all teams share."""
    chat: ChatDefaults
    """Values for chat templates, and of thinking, where a caller does not say."""
