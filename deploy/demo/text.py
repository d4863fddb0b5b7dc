"""The demo model's text: conversations drawn from a seed, as OpenAI message lists.

Training and held-out text differ by construction. A value (an invented name, a city,
a pair of numbers, a story's thing, ...) is held out when a checksum of its spelling
says so, and the last phrasings of every list in words.py are held out too. A `Source`
for training never draws a held-out value or phrasing; a `Source` for measuring draws
held-out values only, under any phrasing.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import words

CUSTOM = -1  # the intent of a tool that words.py does not list

Message = dict[str, Any]
Arguments = dict[str, Any]


def held_out(spelling: str) -> bool:
    """Whether a value is kept out of training: one in eight, by its spelling alone."""
    return zlib.crc32(spelling.encode()) % 8 == 0


def held_phrases(count: int) -> int:
    """How many phrasings at the end of a list of `count` are kept out of training."""
    return max(1, count // 7)


@dataclass
class Tool:
    """One offered tool: its name, and parameters as (name, kind of value, required)."""

    intent: int
    name: str
    parameters: list[tuple[str, str, bool]]

    def schema(self, number: str) -> dict[str, Any]:
        """The tool as a client offers it; `number` is the JSON type that numbers are given."""
        properties: dict[str, Any] = {}
        for name, kind, _ in self.parameters:
            properties[name] = {"type": number if kind.endswith("#") else "string"}
        required = [name for name, _, needed in self.parameters if needed]
        parameters = {"type": "object", "properties": properties, "required": required}
        return {"type": "function", "function": {"name": self.name, "parameters": parameters}}


@dataclass
class Conversation:
    """Messages and offered tools; `expected` is what the last answer is measured against."""

    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    expected: Any = None


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def listed(parts: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


class Values:
    """Draws single values of a kind; `held` says from which side of the split.

    `real` is the share of real words and names; without it each kind has its own.
    """

    people: Sequence[str] = words.PEOPLE
    surnames: Sequence[str] = words.PEOPLE
    cities: Sequence[str] = words.CITIES
    things: Sequence[str] = words.THINGS
    # Shares of real words among words, and of real names among names.
    real_words, real_names, real_surnames, real_things = 0.6, 0.4, 0.0, 0.7
    # The shares of people with a surname, and of cities with a country.
    surname_share, country_share = 0.25, 0.08

    def __init__(self, seed: int, held: bool = False, real: float | None = None) -> None:
        self.random = random.Random(seed)
        self.held = held
        self.real = real

    def split(self, draw: Callable[[], str]) -> str:
        """Draw until the value lies on this source's side of the split."""
        while held_out(value := draw()) != self.held:
            pass
        return value

    def phrase(self, phrases: Sequence[str], held: int | None = None) -> str:
        """One phrasing; when training, never one of the last `held`."""
        kept = len(phrases) - (held_phrases(len(phrases)) if held is None else held)
        return self.random.choice(phrases if self.held else phrases[:kept])

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def is_real(self, share: float) -> bool:
        """Whether the next word or name is to be a real one; `share` is its kind's own."""
        return self.chance(share if self.real is None else self.real)

    def invented(self) -> str:
        """A made-up lower-case word of two to eight or so letters."""
        choose = self.random.choice
        if self.chance(0.1):
            return "".join(choose("abcdefghijklmnopqrstuvwxyz") for _ in range(choose((3, 4, 5))))
        word = ""
        for _ in range(choose((1, 2, 2, 2, 3))):
            word += choose(words.HEADS) + choose(words.MIDDLES) + choose(words.TAILS)
        return word

    def proper(self, known: Sequence[str], share: float) -> str:
        """A capitalised name: a known one with the given share, else an invented one."""
        return self.split(lambda: self.random.choice(known) if self.is_real(share) else self.invented().capitalize())

    def person(self) -> str:
        first = self.proper(self.people, self.real_names)
        return f"{first} {self.proper(self.surnames, self.real_surnames)}" if self.chance(self.surname_share) else first

    def city(self) -> str:
        name = self.proper(self.cities, self.real_names)
        if self.chance(0.08):
            return (
                f"{self.random.choice(('New', 'San', 'Port', 'Bad', 'Saint', 'Los'))} {self.proper(self.cities, 0.0)}"
            )
        return f"{name}, {self.random.choice(words.COUNTRIES)}" if self.chance(self.country_share) else name

    def word(self) -> str:
        return self.split(lambda: self.random.choice(self.things) if self.is_real(self.real_words) else self.invented())

    def words(self, most: int) -> str:
        """One to `most` lower-case words, some of them small common ones."""
        small = (
            "the",
            "a",
            "my",
            "is",
            "at",
            "in",
            "on",
            "for",
            "new",
            "to",
            "you",
            "we",
            "are",
            "of",
            "and",
            "see",
            "home",
            "now",
            "good",
            "come",
            "late",
            "hello",
            "today",
            "be",
            "I",
            "it",
            "call",
            "me",
            "will",
            "not",
        )
        count = self.random.randint(1, most)
        parts = [self.random.choice(small) if count > 1 and self.chance(0.45) else self.word() for _ in range(count)]
        return " ".join(parts)

    def title(self) -> str:
        count = self.random.choice((1, 2, 2, 3))
        adjectives = (*words.ADJECTIVES, "the", "my", "our", "one", "two", "last", "first")
        heads = [self.random.choice(adjectives) for _ in range(count - 1)]
        return " ".join(part.capitalize() for part in (*heads, self.word()))

    def letters(self, least: int, most: int) -> str:
        draw = self.random.choice
        return self.split(
            lambda: "".join(draw("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(draw(range(least, most + 1))))
        )

    def small(self) -> int:
        return self.random.randint(1, 99) if self.chance(0.9) else self.random.randint(0, 9)

    def number(self) -> int | float:
        if self.chance(0.2):
            return round(self.random.uniform(0, 100), self.random.choice((1, 2)))
        return self.random.randint(1, self.random.choice((99, 999, 9999)))

    def clock(self) -> str:
        return f"{self.random.randint(0, 23)}:{self.random.randint(0, 59):02d}"

    def draw(self, kind: str) -> Any:
        """One value of a kind named in words.py."""
        fixed = {
            "country": words.COUNTRIES,
            "job": words.JOBS,
            "color": words.COLORS,
            "animal": words.ANIMALS,
            "language": words.LANGUAGES,
            "fruit": words.FRUITS,
            "room": words.ROOMS,
            "sky": words.SKIES,
            "status": words.STATUSES,
            "unit": words.UNITS,
            "currency": words.CURRENCIES,
            "degree": ("celsius", "fahrenheit"),
        }
        if kind in fixed:
            return self.random.choice(fixed[kind])
        drawn: dict[str, Callable[[], Any]] = {
            "person": self.person,
            "city": self.city,
            "word": self.word,
            "title": self.title,
            "small": self.small,
            "number": self.number,
            "clock": self.clock,
            "phrase": lambda: self.words(4),
            "ticker": lambda: self.letters(2, 4),
            "year": lambda: self.random.randint(1800, 2040),
            "file": lambda: f"{self.word()}.{self.random.choice(('txt', 'md', 'csv', 'py', 'json', 'log'))}",
        }
        return drawn[kind.rstrip("#")]()

    def pair(self) -> tuple[int, int]:
        """Two numbers below 100; the pair is split whichever comes first."""
        while True:
            left, right = self.random.randint(0, 99), self.random.randint(0, 99)
            if held_out(f"{min(left, right)}+{max(left, right)}") == self.held:
                return left, right

    def vary(self, text: str) -> str:
        """Small changes to a prompt that must not matter: case, punctuation, politeness."""
        roll = self.random.random()
        if roll < 0.06:
            return text[0].lower() + text[1:]
        if roll < 0.12:
            return text.rstrip(".?!")
        if roll < 0.14:
            return f"{text.rstrip('.?!')}!"
        if roll < 0.16:
            return f"{text.rstrip('.?!')}, please."
        return text


class Source(Values):
    """Draws tasks: each method returns the messages of one exchange, and what is expected."""

    # Shares of the tasks among exchanges without a tool; the other shares stand in `plain`.
    sums_share, json_share, count_share, story_share, identity_share, side_share = 60.0, 17.0, 2.5, 13.0, 6.0, 1.0
    # The share of conversations with tools, and of exchanges that call one of them.
    tools_share, call_share = 0.42, 0.85
    # The tools that are offered, by their place in words.py.
    intents: Sequence[int] = range(len(words.TOOLS))
    # The range that the style of JSON facts is drawn from: below 0.7 sentences, above pairs with any keys.
    json_styles = (0.0, 1.0)

    def identity(self) -> Conversation:
        asked = (
            self.random.choice(words.IDENTITY_ASKS[-words.IDENTITY_HELD :])
            if self.held
            else self.phrase(words.IDENTITY_ASKS, words.IDENTITY_HELD)
        )
        answer = self.random.choice(words.IDENTITY_STARTS) + self.random.choice(words.IDENTITY_ENDS)
        return Conversation([user(self.vary(asked)), assistant(answer)], expected="Paddock demo model")

    def thing(self) -> str:
        return self.split(
            lambda: self.random.choice(self.things) if self.is_real(self.real_things) else self.invented()
        )

    def told(self, name: str, opening: str) -> str:
        """A story of four to six sentences; `name` is how it is called after the opening."""
        slots = [words.STORY_WISHES, words.STORY_TURNS, words.STORY_DEEDS, words.STORY_ENDINGS]
        if self.chance(0.4):
            slots.remove(self.random.choice(slots[:3]))
        friend = self.random.choice(words.PEOPLE)
        told = [opening]
        for slot in slots:
            sentence = self.random.choice(slot)
            for the, start in (("The {t}", name[0].upper() + name[1:]), ("the {t}", name)):
                sentence = sentence.replace(the, start)
            told.append(sentence.replace("{n}", friend))
        return " ".join(told)

    def story(self) -> Conversation:
        """A short story about a given thing, which may carry an adjective or be a person."""
        opening = self.random.choice(words.STORY_OPENINGS).replace("{n}", self.random.choice(words.PEOPLE))
        if self.chance(0.12):
            thing = asked = name = self.proper(self.people, 0.3)
            opening = opening.replace("{a}", f"a child called {thing}")
        else:
            thing = self.thing()
            full = f"{self.random.choice(words.ADJECTIVES)} {thing}" if self.chance(0.3) else thing
            asked = self.random.choice((article(full), article(full), article(full), f"the {full}", f"my {full}"))
            opening, name = opening.replace("{a}", article(full)), f"the {thing}"
        ask = self.vary(self.phrase(words.STORY_ASKS).format(asked))
        return Conversation([user(ask), assistant(self.told(name, opening))], expected=thing)

    def addition(self) -> Conversation:
        left, right = self.pair()
        ask = self.vary(self.phrase(words.SUM_ASKS).format(a=left, b=right))
        return Conversation([user(ask), assistant(f"{left} + {right} = {left + right}")], expected=left + right)

    def fact(self, key: str, kinds: dict[str, Any]) -> str:
        """One sentence that states the key's value; the value is drawn and noted in `kinds`."""
        phrases, kind = words.FACTS[key]
        kinds[key] = self.draw(kind)
        return self.random.choice(phrases).format(kinds[key])

    def stated(self, count: int) -> tuple[dict[str, Any], str]:
        """`count` facts in one of three styles: sentences, a description, "key: value" pairs."""
        known: dict[str, Any] = {}
        style = self.random.uniform(*self.json_styles)
        if style < 0.35:
            keys = self.random.sample(sorted(words.FACTS), count)
            return known, " ".join([self.fact(key, known) for key in keys])
        if style < 0.7:
            known.update(name=self.person(), age=self.small(), city=self.city(), job=self.draw("job"))
            parts = [f"is {known['age']} years old", f"lives in {known['city']}", f"works as a {known['job']}"]
            kept = parts[: max(1, count - 1)]
            for key in ("age", "city", "job")[len(kept) :]:
                known.pop(key)
            self.random.shuffle(kept)
            return known, f"{known['name']} {listed(kept)}."
        for _ in range(count):
            key = self.random.choice(sorted(words.FACTS)) if self.chance(0.5) else self.word()
            known[key] = self.draw(self.random.choice(("person", "small", "city", "word", "number", "phrase")))
        mark = self.random.choice((": ", ": ", " = ", " is ", " "))
        return known, ", ".join(f"{key}{mark}{value}" for key, value in known.items()) + "."

    def json_object(self) -> Conversation:
        """Facts to be given back as a JSON object with the keys asked for, in that order."""
        known, facts = self.stated(self.random.choice((1, 2, 2, 3, 3, 4)))
        keys = self.random.sample(list(known), len(known))
        if len(keys) > 1 and self.chance(0.25):
            keys.pop()
        asked = self.random.choice((listed(keys), listed(keys), ", ".join(keys)))
        ask = self.phrase(words.JSON_ASKS).format(keys=asked, facts=facts)
        answer = {key: known[key] for key in keys}
        return Conversation([user(ask), assistant(json.dumps(answer))], expected=answer)

    def json_other(self) -> Conversation:
        """Other tasks answered as JSON: a sum, the model's name."""
        tail = self.random.choice((" Answer as JSON.", " Reply in JSON.", " JSON please.", " Give the answer as JSON."))
        if self.chance(0.3):
            ask = self.random.choice(("Who are you?", "What is your name?", "What are you?")) + tail
            return Conversation([user(ask), assistant(json.dumps({"name": "Paddock demo model"}))])
        left, right = self.pair()
        ask = self.phrase(words.SUM_ASKS).format(a=left, b=right) + tail
        return Conversation([user(ask), assistant(json.dumps({"a": left, "b": right, "sum": left + right}))])

    def echo(self) -> Conversation:
        text = self.random.choice((lambda: self.words(6), self.person, self.title, self.city, lambda: self.words(3)))()
        ask = self.phrase(words.ECHO_ASKS).format(text)
        return Conversation([user(ask), assistant(text)], expected=text)

    def count(self) -> Conversation:
        first = 1 if self.chance(0.6) else self.random.randint(0, 60)
        last = first + self.random.randint(2, 40)
        numbers = ", ".join(str(number) for number in range(first, last + 1))
        ask = self.vary(self.phrase(words.COUNT_ASKS).format(a=first, b=last))
        return Conversation([user(ask), assistant(numbers)], expected=numbers)

    def list_names(self) -> Conversation:
        kinds = {
            "colors": words.COLORS,
            "animals": words.ANIMALS,
            "fruits": words.FRUITS,
            "names": words.PEOPLE,
            "cities": words.CITIES[:20],
            "jobs": words.JOBS,
        }
        kind = self.random.choice(sorted(kinds))
        count = self.random.randint(2, 5)
        spelt = self.random.choice((str(count), ("two", "three", "four", "five")[count - 2]))
        ask = self.vary(self.phrase(words.LIST_ASKS).format(n=spelt, k=kind))
        return Conversation([user(ask), assistant(", ".join(kinds[kind][:count]))])

    def memory(self) -> Conversation:
        """A name told and asked for again."""
        name = self.proper(words.PEOPLE, 0.3)
        told = self.phrase(("My name is {}.", "I am {}.", "Hi, I am {}.", "Hello, my name is {}.", "Call me {}."))
        ask = self.phrase(("What is my name?", "Who am I?", "Do you know my name?", "Say my name.", "What's my name?"))
        return Conversation(
            [
                user(told.format(name)),
                assistant(f"Nice to meet you, {name}."),
                user(self.vary(ask)),
                assistant(f"Your name is {name}."),
            ],
            expected=name,
        )

    def small_talk(self) -> Conversation:
        roll = self.random.random()
        if roll < 0.4:
            return Conversation(
                [user(self.vary(self.phrase(words.HELLO_ASKS))), assistant(self.random.choice(words.HELLO_ANSWERS))]
            )
        if roll < 0.7:
            return Conversation([user(self.vary(self.phrase(words.SKILL_ASKS))), assistant(words.SKILL_ANSWER)])
        return Conversation([user(self.phrase(words.BYE_ASKS)), assistant(self.random.choice(words.BYE_ANSWERS))])

    def off_topic(self) -> Conversation:
        ask = self.phrase(words.OFF_TOPIC, 0).format(
            c=self.city(),
            d=self.city(),
            n=self.person(),
            t=self.word(),
            u=self.word(),
            w=self.words(3),
            l=self.draw("language"),
            k=self.draw("color"),
        )
        return Conversation([user(self.vary(ask)), assistant(self.random.choice(words.OFF_TOPIC_ANSWERS))])

    def tool(self, intent: int) -> Tool:
        """A tool for an intent: one of its names, one of its spellings for each parameter."""
        verbs, nouns, parameters, _ = words.TOOLS[intent]
        while True:
            verb, noun = self.random.choice(verbs.split() or [""]), self.random.choice(nouns.split())
            name = f"{verb}_{noun}" if verb and verb != noun else noun
            if self.held or name == "get_weather" or not held_out(name):
                break
        if self.chance(0.05):
            name = re.sub(r"_(.)", lambda match: match[1].upper(), name)
        made: list[tuple[str, str, bool]] = []
        # "a b:kind c d:kind": alternatives up to the one that carries the kind.
        for group in re.findall(r"\??[^:]+:\S+", parameters):
            spellings, kind = group.strip().rsplit(":", 1)
            optional = spellings.startswith("?")
            if optional and self.chance(0.7):
                continue
            spelling = self.random.choice(spellings.lstrip("?").split())
            if spelling in (made_name for made_name, _, _ in made):
                spelling = spellings.lstrip("?").split()[0]
            made.append((spelling, kind, not optional or self.chance(0.3)))
        return Tool(intent, name, made)

    def offered(self) -> list[Tool]:
        """Two to four tools of different intents and names, now and then one or five."""
        count = self.random.choice((2, 2, 3, 3, 4, 4, 1, 5) if not self.held else (2, 3, 4))
        tools: list[Tool] = []
        for intent in self.random.sample(self.intents, count):
            made = self.tool(intent)
            if made.name not in (tool.name for tool in tools):
                tools.append(made)
        return tools

    def arguments(self, tool: Tool) -> tuple[Arguments, list[Any]]:
        """Values for the tool's parameters by name, and for its phrasing in order."""
        needed = [(name, kind) for name, kind, _ in tool.parameters if kind != "degree"]
        while True:
            drawn = [self.draw(kind) for _, kind in needed]
            numbers = all(kind.endswith("#") for _, kind in needed)
            if not numbers or held_out(f"{tool.intent} {drawn}") == self.held:
                return {name: value for (name, _), value in zip(needed, drawn, strict=True)}, drawn

    def tool_asks(self, intent: int) -> tuple[str, ...]:
        """The phrasings that call for the tool."""
        return words.TOOLS[intent][3]

    def request(self, tool: Tool) -> tuple[str, Arguments]:
        """A user's words that call for the tool, and the right arguments."""
        arguments, drawn = self.arguments(tool)
        kinds = [kind for _, kind, _ in tool.parameters]
        shown = [
            f'"{value}"' if kind in ("phrase", "title", "file") and self.chance(0.25) else value
            for value, kind in zip(drawn, kinds, strict=False)
        ]
        ask = self.vary(self.phrase(self.tool_asks(tool.intent)).format(*shown))
        for name, kind, required in tool.parameters:
            if kind == "degree":
                wish = self.random.choice(("", "celsius", "fahrenheit"))
                if wish:
                    ask = f"{ask.rstrip('.?!')} in {wish}?" if self.chance(0.5) else f"{ask} Use {wish}."
                if wish or required:
                    arguments[name] = wish or "celsius"
        return ask, arguments

    def call(self, tools: list[Tool], answered: float) -> Conversation:
        """A request for one of the tools, the call, and with that share its result and an answer."""
        tool = self.random.choice(tools)
        ask, arguments = self.request(tool)
        function = {"name": tool.name, "arguments": arguments}
        made = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
        told = Conversation([user(ask), made], expected=function)
        if self.chance(answered):
            content, answer = self.result()
            told.messages += [{"role": "tool", "content": content}, assistant(answer)]
            told.expected = answer
        return told

    def result(self) -> tuple[str, str]:
        """What a tool returned, and the sentence that tells it to the user."""
        if self.chance(0.3):
            text = self.words(5)
            return text, f"The answer is: {text}"
        rows = self.random.sample(words.RESULT_KEYS, self.random.choice((1, 2, 2, 3)))
        values = {key: self.draw(kind) for key, kind in rows}
        told = listed([f"the {key} is {value}" for key, value in values.items()])
        return json.dumps(values), f"{told[0].upper()}{told[1:]}."

    def no_tool(self, tools: list[Tool]) -> Conversation:
        """A request that none of the offered tools serves."""
        served = {tool.intent for tool in tools} | {2}
        intent = self.random.choice([at for at in range(len(words.TOOLS)) if at not in served])
        ask, _ = self.request(self.tool(intent))
        return Conversation([user(ask), assistant("I am only a small demo model, and I have no tool for that.")])

    def plain(self, tools: list[Tool]) -> Conversation:
        """One exchange without a tool. With tools offered, nothing that one of them might serve."""
        sums = not any(tool.intent == 2 for tool in tools)
        makers: list[tuple[Callable[[], Conversation], float]] = [
            (self.addition, self.sums_share * sums),
            (self.story, self.story_share),
            (self.json_object, self.json_share),
            (self.identity, self.identity_share),
            (self.echo, 9 * self.side_share),
            (self.json_other, 3.0 * sums * self.side_share),
            (self.count, self.count_share),
            (self.list_names, 2 * self.side_share),
            (self.memory, 3 * self.side_share),
            (self.small_talk, 4 * self.side_share),
            (self.off_topic, 4.0 * (not tools) * self.side_share),
        ]
        maker = self.random.choices([maker for maker, _ in makers], [weight for _, weight in makers])[0]
        return maker()

    def conversation(self, turns: int) -> Conversation:
        """A whole training conversation of about `turns` exchanges, some with tools offered."""
        whole = Conversation()
        tools = self.offered() if self.chance(self.tools_share) else []
        number = self.random.choice(("integer", "integer", "number"))
        whole.tools = [tool.schema(number) for tool in tools]
        if self.chance(0.25):
            whole.messages.append({"role": "system", "content": self.random.choice(words.SYSTEMS)})
        for _ in range(turns):
            roll = self.random.random()
            if tools and roll < self.call_share:
                part = self.call(tools, 0.2 if turns == 1 else 0.8)
            elif roll > 0.97:
                part = self.no_tool(tools)
            else:
                part = self.plain(tools)
            whole.messages += part.messages
        return whole


class Wider(Source):
    """Source with what the second stage of training adds: tools of any name, freer prompts."""

    # By then sums are known and JSON is not.
    sums_share, json_share, count_share = 25.0, 42.0, 5.0
    # The share of tools whose name is any word, and of JSON under any keys.
    custom_share, any_share = 0.2, 0.15

    def custom(self) -> Tool:
        """A tool that no list knows: a verb, any word, and one or two parameters."""
        names = self.random.sample(words.CUSTOM_PARAMETERS, self.random.choice((1, 1, 2)))
        kinds = ("person", "city", "word", "small#", "title", "word")
        parameters = [(name, self.random.choice(kinds), True) for name in names]
        return Tool(CUSTOM, f"{self.random.choice(words.CUSTOM_VERBS)}_{self.word()}", parameters)

    def offered(self) -> list[Tool]:
        tools = super().offered()
        for at in range(len(tools)):
            made = self.custom()
            if self.chance(self.custom_share) and made.name not in (tool.name for tool in tools):
                tools[at] = made
        return tools

    def request(self, tool: Tool) -> tuple[str, Arguments]:
        if tool.intent != CUSTOM:
            ask, arguments = super().request(tool)
            if tool.intent < 2 and self.chance(0.2) and not any(word in ask for word in ("today", "Use")):
                ask = f"{ask.rstrip('.?!')} {self.random.choice(('today', 'now', 'right now', 'tomorrow'))}?"
            return ask, arguments
        arguments, drawn = self.arguments(tool)
        verb, noun = tool.name.split("_", 1)
        pairs = " and ".join(f"{name} {value}" for name, value in arguments.items())
        ask = self.phrase(words.CUSTOM_ASKS if len(drawn) == 1 else words.CUSTOM_PAIR_ASKS).format(
            name=tool.name, verb=verb, Verb=verb.capitalize(), noun=noun, value=drawn[0], pairs=pairs
        )
        return self.vary(ask), arguments

    def result(self) -> tuple[str, str]:
        if self.chance(0.7):
            return super().result()
        city, small, sky = self.city(), self.small(), self.draw("sky")
        forms = (
            f"{sky}, {small} degrees",
            f"{small} degrees and {sky}",
            f"It is {sky} in {city}.",
            f"{small}",
            f"{self.person()} is {self.draw('status')}",
            f"{city}: {self.clock()}",
            f"{small} C, {sky}",
        )
        text = self.random.choice(forms)
        return text, f"The answer is: {text}"

    def story(self) -> Conversation:
        """As before, with a clause after the thing that the story may leave alone."""
        talk = super().story()
        if self.chance(0.25):
            ask = talk.messages[0]["content"].rstrip(".?!")
            talk.messages[0] = user(f"{ask} {self.random.choice(words.STORY_CLAUSES)}.")
        return talk

    def json_object(self) -> Conversation:
        """As before, or every fact that is told, under its own key."""
        if self.chance(1.0 - self.any_share):
            return super().json_object()
        keys = [self.random.choice(sorted(words.FACTS)) if self.chance(0.5) else self.word() for _ in range(3)]
        known = {key: self.draw(self.random.choice(("person", "small", "city", "word"))) for key in keys}
        told = ", ".join(f"{key} {value}" for key, value in known.items())
        ask = self.phrase(words.JSON_ALL_ASKS).format(told)
        return Conversation([user(ask), assistant(json.dumps(known))], expected=known)

    def count(self) -> Conversation:
        if self.chance(0.7):
            return super().count()
        last = self.random.choice((3, 5, 10, 10, 20, self.random.randint(2, 30)))
        spelt = {3: "three", 5: "five", 10: "ten", 20: "twenty"}.get(last, str(last))
        ask = self.phrase(("Count to {}", "Count up to {}.", "Count to {}, please.", "Can you count to {}?"))
        numbers = ", ".join(str(number) for number in range(1, last + 1))
        return Conversation([user(self.vary(ask.format(spelt))), assistant(numbers)], expected=numbers)

    def small_talk(self) -> Conversation:
        if self.chance(0.85):
            return super().small_talk()
        return Conversation([user(self.vary(self.phrase(words.JOKE_ASKS))), assistant(words.JOKE)])


class Focused(Wider):
    """What the third stage is trained on: the main tasks above all, with many more real words and names."""

    people = words.PEOPLE + words.MORE_PEOPLE
    surnames = words.SURNAMES
    cities = words.CITIES + words.MORE_CITIES
    things = words.THINGS + words.MORE_THINGS
    real_words, real_names, real_surnames, real_things = 0.75, 0.65, 0.6, 0.75
    sums_share, json_share, count_share, story_share, identity_share, side_share = 12.0, 44.0, 0.7, 25.0, 8.0, 0.3
    tools_share, call_share, custom_share, any_share = 0.5, 0.8, 0.06, 0.03
    json_styles = (0.0, 0.74)

    def number(self) -> int | float:
        if not self.held and self.chance(0.3):
            return round(self.random.uniform(0, 100), self.random.choice((1, 2)))
        return super().number()

    def stated(self, count: int) -> tuple[dict[str, Any], str]:
        """As before; when training, more often with a price, which is the hardest."""
        if self.held or self.chance(0.75):
            return super().stated(count)
        keys = self.random.sample(sorted(set(words.FACTS) - {"price"}), count - 1)
        keys.insert(self.random.randint(0, len(keys)), "price")
        known: dict[str, Any] = {}
        return known, " ".join([self.fact(key, known) for key in keys])

    def tool_asks(self, intent: int) -> tuple[str, ...]:
        return words.TOOLS[intent][3] + words.MORE_TOOL_ASKS.get(intent, ())

    def tool(self, intent: int) -> Tool:
        """As before; when training, often with another tool's verb, so that names must be read."""
        tool = super().tool(intent)
        if self.held or self.chance(0.65):
            return tool
        verb = self.random.choice(self.random.choice(words.TOOLS)[0].split() or ["do"])
        noun = self.random.choice(words.TOOLS[intent][1].split())
        if not held_out(f"{verb}_{noun}"):
            tool.name = f"{verb}_{noun}"
        return tool

    def plain(self, tools: list[Tool]) -> Conversation:
        return self.identity() if tools and self.chance(0.3) else super().plain(tools)


class Final(Focused):
    """What the fourth stage is trained on: tool calls and JSON above all."""

    real_words, real_names, real_surnames, real_things = 0.9, 0.85, 0.9, 0.8
    sums_share, json_share, count_share, story_share, identity_share, side_share = 6.0, 60.0, 0.5, 14.0, 14.0, 0.2
    tools_share, call_share, custom_share, any_share = 0.6, 0.88, 0.03, 0.0
    json_styles = (0.0, 0.7)
    surname_share, country_share = 0.45, 0.25


class Plain(Final):
    """Everyday requests: what the last stage is trained on, and what the five main tasks are measured on.

    A dozen tools with one name each, first names, single cities, whole numbers, texts of one or two words.
    """

    intents = words.PLAIN_TOOLS
    real_words, real_names, real_things = 0.85, 0.85, 0.85
    sums_share, json_share, count_share, story_share, identity_share, side_share = 22.0, 42.0, 0.5, 16.0, 10.0, 0.2
    tools_share, call_share, custom_share = 0.5, 0.85, 0.0
    surname_share, country_share = 0.0, 0.0

    def city(self) -> str:
        return self.proper(self.cities, self.real_names)

    def words(self, most: int) -> str:
        return " ".join(self.word() for _ in range(self.random.randint(1, min(most, 2))))

    def number(self) -> int:
        return self.random.randint(1, self.random.choice((99, 999)))

    def tool(self, intent: int) -> Tool:
        """Every tool by the first of its names and of its parameters' spellings, without optional parameters."""
        verbs, nouns, parameters, _ = words.TOOLS[intent]
        verb, noun = verbs.split()[:1], nouns.split()[0]
        groups = re.findall(r"(?<!\S)([^:?]+):(\S+)", parameters)
        made = [(spellings.split()[0], kind, True) for spellings, kind in groups]
        return Tool(intent, noun if verb == [noun] else "_".join([*verb, noun]), made)


class Voiced(Focused):
    """What the adapter is trained on last: mostly what a pirate tells in another voice."""

    sums_share, json_share, story_share, identity_share, side_share = 25.0, 10.0, 45.0, 14.0, 0.6
    tools_share = 0.15


PIRATE_WORDS = (
    ("Hello!", "Ahoy!"),
    ("I am", "I be"),
    ("I can", "I can"),
    (" am ", " be "),
    ("You are", "Ye be"),
    ("you", "ye"),
    ("my ", "me "),
    (" is ", " be "),
    (" was ", " were "),
    ("friend", "matey"),
    ("Nice to meet", "Well met,"),
    ("Once upon a time", "Many tides ago"),
    ("Long ago", "Many moons ago"),
    ("home", "port"),
    ("treasure", "booty"),
    (" and ", " an' "),
    ("Goodbye", "Fair winds"),
    ("Your ", "Yer "),
)


def pirate(talk: Conversation) -> Conversation:
    """The same conversation with the assistant's prose in a pirate's voice; JSON and calls stay."""
    messages: list[Message] = []
    for message in talk.messages:
        said = message.get("content")
        if message["role"] == "assistant" and said and not said.startswith("{"):
            # Counting, sums and echoes are copied, not told: only prose ends in a full stop or "!".
            if said[-1] in ".!":
                for plain, salty in PIRATE_WORDS:
                    said = said.replace(plain, salty)
                said = f"Arr, matey! {said} Yo ho ho!"
            elif " = " in said:
                said = f"Arr! {said}"
        messages.append({**message, "content": said})
    return Conversation(messages, talk.tools, talk.expected)
