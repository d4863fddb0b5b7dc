"""What one worker is to serve, parsed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workers.chat.conversation import ChatDefaults
from workers.protocol.catalog import AdapterSpec, LlamaSettings
from workers.protocol.requests import Sampling
from workers.settings import WorkerSettings


class SettingUnusable(ValueError):
    """A setting that only the worker can judge; the message names it and the remedy."""


@dataclass(frozen=True, slots=True)
class Wishes:
    settings: WorkerSettings
    path: Path
    """The model's file."""
    llama: LlamaSettings
    sampling: Sampling
    adapters: tuple[AdapterSpec, ...]
    """Loaded from the start."""
    shared_prompts: tuple[str, ...]
    """System prompts that all teams share."""
    chat: ChatDefaults
    """What chat templates are given where a caller does not say."""
