"""Models that no other family knows are read as Hermes' are: where a template has no place for tools, the prompt asks
for that form, and bare JSON is what most others try first.
"""

from __future__ import annotations

from dataclasses import replace

from workers.chat.tools.hermes import HERMES

PLAIN = replace(HERMES, name="json", marks=())
