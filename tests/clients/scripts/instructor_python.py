"""What users of instructor do, in each of its modes."""

from __future__ import annotations

from collections.abc import Iterable

import instructor
from openai import OpenAI
from pydantic import BaseModel
from steps import CHAT, KEY, PERSON, URL, run

ASKED = [{"role": "user", "content": PERSON}]
openai = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)


class Person(BaseModel):
    """A person"""

    name: str
    age: int


def asked_in(mode):
    def step():
        client = instructor.from_openai(openai, mode=mode)
        client.chat.completions.create(model=CHAT, messages=ASKED, response_model=Person, max_retries=1, temperature=0)

    step.__name__ = mode.name
    return step


def streamed():
    client = instructor.from_openai(openai)
    list(client.chat.completions.create_partial(model=CHAT, messages=ASKED, response_model=Person, max_retries=1))


def several():
    client = instructor.from_openai(openai, mode=instructor.Mode.PARALLEL_TOOLS)
    list(client.chat.completions.create(model=CHAT, messages=ASKED, response_model=Iterable[Person], max_retries=1))


MODES = ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "MD_JSON", "FUNCTIONS", "RESPONSES_TOOLS")
run(*(asked_in(instructor.Mode[name]) for name in MODES if name in instructor.Mode.__members__), streamed, several)
