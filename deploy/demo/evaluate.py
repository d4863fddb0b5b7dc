"""Measure the demo model on held-out prompts, greedily, through llama.cpp.

python evaluate.py                    # the table of the README; exit status 1 under 90 % on a task the model is for
python evaluate.py --lora paddock-demo-pirate-lora.gguf --show 2
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import words
from gguf import GGUFReader
from jinja2.sandbox import ImmutableSandboxedEnvironment
from llama_cpp import Llama
from text import Conversation, Focused, Plain, Source, Wider
from tokenizer import TURN_END, Tokenizer

HERE = Path(__file__).parent
SEED = 13
LEAST = 0.9
MOST_TOKENS = 300

Prompt = tuple[list[dict[str, Any]], list[dict[str, Any]], Any]


class Model:
    """The GGUF file in llama.cpp, with the chat template that it carries."""

    def __init__(self, path: Path, lora: Path | None) -> None:
        self.llama = Llama(str(path), n_ctx=1024, n_threads=1, verbose=False, lora_path=str(lora) if lora else None)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self.template = environment.from_string(self.llama.metadata["tokenizer.chat_template"])
        self.made = 0

    def tokens(self, text: str) -> list[int]:
        tokens: list[int] = self.llama.tokenize(text.encode(), add_bos=False, special=True)
        return tokens

    def answer(self, prompt: str) -> tuple[str, bool]:
        """The greedy answer, and whether it ended by itself."""
        said: list[int] = []
        for token in self.llama.generate(self.tokens(prompt), temp=0.0, repeat_penalty=1.0):
            self.made += 1
            if token == TURN_END or len(said) == MOST_TOKENS:
                break
            said.append(token)
        return self.llama.detokenize(said).decode(errors="replace"), token == TURN_END


def vocabulary(path: Path) -> Tokenizer:
    """The training tokenizer with the merges that the file carries, to check llama.cpp's against."""
    field = GGUFReader(path).fields["tokenizer.ggml.merges"]
    merges = [bytes(field.parts[at]).decode().split(" ") for at in field.data]
    return Tokenizer([(left, right) for left, right in merges])


def is_identity(answer: str, expected: Any) -> bool:
    return str(expected) in answer


def is_story(answer: str, expected: Any) -> bool:
    """Three to six whole sentences, none twice, that name the thing at least twice; a pirate's cries do not count."""
    told = answer.removeprefix("Arr, matey! ").removesuffix(" Yo ho ho!")
    sentences = re.findall(r"[^.!?]+[.!?]", told)
    named = len(re.findall(rf"\b{re.escape(expected)}\b", answer))
    return 3 <= len(sentences) <= 6 and len(set(sentences)) == len(sentences) and named >= 2 and answer[-1] in ".!"


def is_sum(answer: str, expected: Any) -> bool:
    """The last number of the answer is the sum."""
    numbers = re.findall(r"\d+", answer)
    return bool(numbers) and int(numbers[-1]) == expected


def is_json(answer: str, expected: Any) -> bool:
    """Exactly the keys asked for with the values given."""
    try:
        return bool(json.loads(answer) == expected)
    except ValueError:
        return False


def is_call(answer: str, expected: Any) -> bool:
    """One call, of the right tool with exactly the right arguments, and nothing else."""
    found = re.fullmatch(r"<tool_call>(.*)</tool_call>", answer.strip())
    try:
        return found is not None and bool(json.loads(found[1]) == expected)
    except ValueError:
        return False


def is_same(answer: str, expected: Any) -> bool:
    return answer.strip() == str(expected)


def with_system(source: Source, talk: Conversation) -> Conversation:
    """Three prompts in ten get a system message."""
    if source.chance(0.3):
        talk.messages.insert(0, {"role": "system", "content": source.random.choice(words.SYSTEMS)})
    return talk


def tool_talk(source: Source, answered: bool) -> Conversation:
    """A request with two to four tools offered, up to the call or up to the answer after the result."""
    tools = Source.offered(source)
    talk = source.call(tools, 1.0 if answered else 0.0)
    talk.tools = [tool.schema("integer") for tool in tools]
    return talk


def custom_talk(source: Wider) -> Conversation:
    """A request for a tool whose name was made up, offered among others."""
    custom = source.custom()
    tools = [custom, *source.offered()[:3]]
    source.random.shuffle(tools)
    talk = source.call([custom], 0.0)
    talk.tools = [tool.schema("integer") for tool in tools]
    return talk


def json_talk(source: Source, styles: tuple[float, float]) -> Conversation:
    """Facts in sentences, or pairs of any keys and values, to be given back as JSON."""
    source.json_styles = styles
    return Source.json_object(source)


def unneeded_talk(source: Wider) -> Conversation:
    """Tools are offered, but the name is asked for."""
    talk = source.identity()
    talk.tools = [tool.schema("integer") for tool in source.offered()]
    return talk


def second_turn(source: Source) -> Conversation:
    """A sum that follows a whole other exchange."""
    before, after = source.json_object(), source.addition()
    return Conversation(before.messages + after.messages, expected=after.expected)


JSON_FACTS = (0.0, 0.7)
JSON_PAIRS = (0.7, 1.0)
WIDER = ", wider"  # ends the name of a task with tools of any name, surnames, fractions, longer texts
INVENTED = ", invented"  # the same, with words and names that are all made up

Task = tuple[Callable[[Wider], Conversation], Callable[[str, Any], bool]]

# What the model is for: each must be right nine times in ten.
TASKS: dict[str, Task] = {
    "identity": (Source.identity, is_identity),
    "story": (Source.story, is_story),
    "sum": (Source.addition, is_sum),
    "json": (lambda source: json_talk(source, JSON_FACTS), is_json),
    "tool call": (lambda source: tool_talk(source, False), is_call),
}
# What it can do beside; reported only.
EXTRAS: dict[str, Task] = {
    **{name + end: TASKS[name] for end in (WIDER, INVENTED) for name in ("story", "json", "tool call")},
    "tool result": (lambda source: tool_talk(source, True), is_same),
    "tool unneeded": (unneeded_talk, is_identity),
    "second turn": (second_turn, is_sum),
    "echo": (Source.echo, is_same),
    "count": (Source.count, is_same),
    "json, any keys": (lambda source: json_talk(source, JSON_PAIRS), is_json),
    "made-up tool": (custom_talk, is_call),
}
ALL = {**TASKS, **EXTRAS}


def prompts(task: str, count: int, seed: int = SEED) -> list[Prompt]:
    """`count` held-out prompts: messages without the last answer, tools, what is expected."""
    kind = Plain if task in TASKS else Focused
    source = kind(seed, held=True, real=0.0 if task.endswith(INVENTED) else 1.0)
    talks = [with_system(source, ALL[task][0](source)) for _ in range(count)]
    return [(talk.messages[:-1], talk.tools, talk.expected) for talk in talks]


def measure(model: Model, tokenizer: Tokenizer, task: str, count: int, seed: int, show: int) -> tuple[int, int]:
    """How many answers are right, and how many prompts llama.cpp splits unlike the tokenizer."""
    right = unlike = 0
    for at, (messages, tools, expected) in enumerate(prompts(task, count, seed)):
        prompt = model.template.render(messages=messages, tools=tools, add_generation_prompt=True)
        unlike += tokenizer.encode(prompt) != model.tokens(prompt)
        answer, ended = model.answer(prompt)
        good = ended and ALL[task][1](answer, expected)
        right += good
        if at < show or (show and not good):
            print(f"--- {task}, {'right' if good else f'WRONG, expected {expected}'}\n{prompt}{answer}")
    return right, unlike


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=HERE / "paddock-demo.gguf")
    parser.add_argument("--lora", type=Path)
    parser.add_argument("--count", type=int, default=100, help="prompts a task")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--show", type=int, default=0, help="print this many prompts a task, and all wrong ones")
    parser.add_argument("--tasks", nargs="*", default=list(ALL), choices=list(ALL))
    given = parser.parse_args()
    model = Model(given.model, given.lora)
    tokenizer = vocabulary(given.model)
    start, low, differ = time.monotonic(), False, 0
    rows = []
    for task in given.tasks:
        right, unlike = measure(model, tokenizer, task, given.count, given.seed, given.show)
        rows.append(f"| {task} | {given.count} | {right} | {100 * right / given.count:.1f} % |")
        low |= task in TASKS and right < LEAST * given.count
        differ += unlike
    print("\n".join(["| task | prompts | right | share |", "|---|---|---|---|", *rows]))
    seconds = time.monotonic() - start
    print(f"{model.made} tokens answered, {model.made / seconds:.0f} tokens/s with the prompts' reading included")
    print(f"prompts that llama.cpp splits unlike the training tokenizer: {differ}")
    sys.exit(1 if low or differ else 0)


if __name__ == "__main__":
    main()
