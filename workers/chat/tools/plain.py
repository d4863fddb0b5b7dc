"""The family of all other models, read as Hermes' are: where a template can't show tools, the prompt asks for that
form, and bare JSON is what most others try first.
"""

from __future__ import annotations

from dataclasses import replace

from workers.chat.tools.hermes import HERMES

PLAIN = replace(HERMES, name="json", marks=())
