"""Train the demo model, or its pirate adapter, on the text of text.py.

python train.py base  --build build            # the first stage: model.pt and merges.json in build/
python train.py wide  --build build            # the second stage, from model.pt to model.pt
python train.py focus --build build            # the third stage, likewise
python train.py final --build build            # the fourth, likewise
python train.py voice --build build            # the adapter's first stage, on model.pt: adapter.pt in build/
python train.py revoice --build build          # its second, from adapter.pt to adapter.pt on the last model.pt
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from model import CONTEXT, Llama
from text import Conversation, Final, Focused, Plain, Source, Voiced, Wider, pirate
from tokenizer import TURN_END, Tokenizer
from torch import Tensor
from torch.nn import functional

HERE = Path(__file__).parent
SEED = 20260101
BLEND = 0.35  # how much of the last stage's change of the weights is kept
SHORT = 256  # tokens in a row of packed short conversations
STEP = 4096  # tokens in a step

Batch = tuple[Tensor, Tensor | None, Tensor]


@dataclass(frozen=True)
class Plan:
    """How long to train: steps, the steps after which the rate would be nothing, and a limit in seconds."""

    steps: int
    schedule: int
    seconds: float = math.inf
    rate: float = 1.0  # the share of the full learning rate to start from
    every: int = 4  # one step in so many is one of long conversations
    warmup: int = 100  # steps

    def spent(self, start: float) -> float:
        """The share of the seconds gone by since `start`."""
        return (time.monotonic() - start) / self.seconds


def chat_template() -> Template:
    """The chat template as serving programs compile it, but keeping the order of JSON keys."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    return environment.from_string((HERE / "chat_template.jinja").read_text())


class Rows:
    """Endless training rows of tokens, each token with its conversation and whether it is learnt."""

    def __init__(self, tokenizer: Tokenizer, source: Source, revoice: bool) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self.revoice = revoice
        self.template = chat_template()
        self.opening = tokenizer.encode("<|im_start|>assistant\n")

    def document(self, turns: int) -> tuple[list[int], list[bool]]:
        """One conversation's tokens, and which of them the assistant says (its end mark included)."""
        talk: Conversation = self.source.conversation(turns)
        if self.revoice:
            talk = pirate(talk)
        tokens = self.tokenizer.encode(self.template.render(messages=talk.messages, tools=talk.tools))
        said, inside = [False] * len(tokens), False
        for at, token in enumerate(tokens):
            said[at] = inside
            if inside and token == TURN_END:
                inside = False
            elif tokens[max(0, at - 2) : at + 1] == self.opening:
                inside = True
        return tokens, said

    def row(self, length: int, turns: Callable[[], int]) -> tuple[list[int], list[bool], list[int]]:
        """`length` + 1 tokens of whole conversations, the last one cut off."""
        tokens: list[int] = []
        said: list[bool] = []
        number: list[int] = []
        while len(tokens) <= length:
            more, learnt = self.document(turns())
            number += [len(number)] * len(more)
            tokens += more
            said += learnt
        end = length + 1
        return tokens[:end], said[:end], number[:end]

    def batch(self, long: bool) -> Batch:
        """Tokens (B, T+1), attention mask (B, 1, T, T) or None for causal, and learnt (B, T)."""
        choose = self.source.random.choice
        length = CONTEXT if long else SHORT
        turns = (lambda: 24) if long else (lambda: choose((1, 1, 1, 2)))
        rows = [self.row(length, turns) for _ in range(STEP // length)]
        tokens, said, number = (torch.tensor(part) for part in zip(*rows, strict=True))
        learnt = said[:, 1:]
        if long:
            return tokens, None, learnt
        same = number[:, None, :-1] == number[:, :-1, None]
        return tokens, (same & torch.ones(length, length, dtype=torch.bool).tril())[:, None], learnt


def orthogonal(matrices: Tensor) -> Tensor:
    """Nearly orthogonal matrices in the direction of the given ones, (N, rows, columns).

    Newton-Schulz iteration with the quintic of the Muon optimiser; bfloat16 is enough for it.
    """
    x = matrices.bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    turned = x.shape[1] > x.shape[2]
    x = x.mT if turned else x
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * (square @ square)) @ x
    return (x.mT if turned else x).float()


class Muon:
    """Momentum whose steps are made orthogonal, for matrices; equal shapes are done together."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.groups: dict[tuple[int, int], list[Tensor]] = {}
        for parameter in parameters:
            self.groups.setdefault((parameter.shape[0], parameter.shape[1]), []).append(parameter)
        self.momentum = {shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()}

    @torch.no_grad()
    def step(self, rate: float, decay: float = 0.01) -> None:
        for shape, group in self.groups.items():
            gradient = torch.stack([parameter.grad for parameter in group if parameter.grad is not None])
            momentum = self.momentum[shape].mul_(0.95).add_(gradient)
            change = orthogonal(gradient + 0.95 * momentum) * max(1.0, shape[0] / shape[1]) ** 0.5
            for parameter, delta in zip(group, change, strict=True):
                parameter.mul_(1 - rate * decay).sub_(delta, alpha=rate)
                parameter.grad = None


def pace(step: int, warmup: int, done: float) -> float:
    """The learning rate's share: a warm-up, then half a cosine down to nothing where `done` is 1."""
    return min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * min(1.0, done)))


def loss_of(model: Llama, batch: Batch) -> Tensor:
    """Mean cross-entropy, in nats per token, over what the assistant says."""
    tokens, mask, learnt = batch
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens[:, :-1], mask, learnt)
    return functional.cross_entropy(logits.float(), tokens[:, 1:][learnt])


def learnt_tokenizer(build: Path) -> Tokenizer:
    """The vocabulary, learnt from 4,000 conversations of its own seed if the build has none."""
    path = build / "merges.json"
    if not path.exists():
        source, template = Source(SEED + 1), chat_template()
        talks = [source.conversation(1 + at % 2) for at in range(4000)]
        texts = [template.render(messages=talk.messages, tools=talk.tools) for talk in talks]
        Tokenizer.learn(texts).save(path)
    return Tokenizer.load(path)


def run(model: Llama, rows: Rows, step: Callable[[float], None], plan: Plan, save: Callable[[], None]) -> None:
    """The training loop."""
    start, total, at = time.monotonic(), 0.0, 0
    while at < plan.steps and plan.spent(start) < 1.0:
        loss = loss_of(model, rows.batch(long=at % plan.every == plan.every - 1))
        loss.backward()
        step(plan.rate * pace(at, plan.warmup, max(at / plan.schedule, plan.spent(start))))
        total += loss.item()
        at += 1
        if at % 50 == 0:
            seconds = time.monotonic() - start
            speed = at * STEP / seconds
            print(f"step {at}/{plan.steps} loss {total / 50:.4f} {speed:.0f} tokens/s {seconds:.0f} s", flush=True)
            total = 0.0
        if at % 250 == 0:
            save()
    save()
    print(f"{at} steps in {time.monotonic() - start:.0f} s", flush=True)


def train_whole(model: Llama, rows: Rows, build: Path, plan: Plan) -> None:
    """Train all weights and leave model.pt."""
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if not any(parameter is matrix for matrix in matrices)]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)

    def step(share: float) -> None:
        muon.step(0.02 * share)
        adam.param_groups[0]["lr"] = 0.004 * share
        adam.step()
        adam.zero_grad()

    run(model, rows, step, plan, lambda: torch.save(model.state_dict(), build / "model.pt"))


def train_base(build: Path, plan: Plan) -> None:
    """The first stage, from nothing, at a high rate: it ends before its schedule does."""
    train_whole(Llama(), Rows(learnt_tokenizer(build), Source(SEED), revoice=False), build, plan)


def train_on(build: Path, plan: Plan, source: Source) -> None:
    """A later stage, from model.pt to model.pt, down to a rate of nothing."""
    model = Llama()
    model.load_state_dict(torch.load(build / "model.pt"))
    train_whole(model, Rows(Tokenizer.load(build / "merges.json"), source, revoice=False), build, plan)


def train_wide(build: Path, plan: Plan) -> None:
    """The second stage, on wider text."""
    train_on(build, plan, Wider(SEED + 3))


def train_focus(build: Path, plan: Plan) -> None:
    """The third stage, on the main tasks."""
    train_on(build, plan, Focused(SEED + 4))


def train_final(build: Path, plan: Plan) -> None:
    """The fourth stage, on what was weakest."""
    train_on(build, plan, Final(SEED + 7))


def train_plain(build: Path, plan: Plan) -> None:
    """The last stage, on everyday requests; taken over in part, so that other requests are not forgotten."""
    before = torch.load(build / "model.pt")
    train_on(build, plan, Plain(SEED + 9))
    after = torch.load(build / "model.pt")
    torch.save({name: torch.lerp(before[name], value, BLEND) for name, value in after.items()}, build / "model.pt")


def train_adapter(build: Path, plan: Plan, source: Source, again: bool) -> None:
    """Train the adapter, from nothing or from adapter.pt, on the same tasks told by a pirate."""
    model = Llama()
    model.load_state_dict(torch.load(build / "model.pt"))
    parameters = model.adapt()
    if again:
        model.load_state_dict(torch.load(build / "adapter.pt"), strict=False)
    rows = Rows(Tokenizer.load(build / "merges.json"), source, revoice=True)
    adam = torch.optim.AdamW(parameters, betas=(0.9, 0.98), weight_decay=0.0)

    def step(share: float) -> None:
        adam.param_groups[0]["lr"] = 0.005 * share
        adam.step()
        adam.zero_grad()

    def save() -> None:
        kept = {name: value for name, value in model.state_dict().items() if name[-2:] in (".a", ".b")}
        torch.save(kept, build / "adapter.pt")

    run(model, rows, step, plan, save)


def train_voice(build: Path, plan: Plan) -> None:
    """The adapter's first stage."""
    train_adapter(build, plan, Wider(SEED + 2), again=False)


def train_revoice(build: Path, plan: Plan) -> None:
    """The adapter's second stage, at a lower rate."""
    train_adapter(build, plan, Voiced(SEED + 6), again=True)


STAGES: dict[str, tuple[Callable[[Path, Plan], None], Plan]] = {
    "base": (train_base, Plan(3000, 6500)),
    "wide": (train_wide, Plan(1570, 1570, rate=0.6)),
    "focus": (train_focus, Plan(901, 901, rate=0.5, every=8)),
    "final": (train_final, Plan(194, 194, rate=0.35, every=12, warmup=30)),
    "plain": (train_plain, Plan(1500, 1500, rate=0.5, every=12, warmup=30)),
    "voice": (train_voice, Plan(380, 380)),
    "revoice": (train_revoice, Plan(271, 271, rate=0.4, every=16)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=tuple(STAGES))
    parser.add_argument("--build", type=Path, default=HERE / "build")
    parser.add_argument("--steps", type=int, default=0, help="stop after this many steps of 4096 tokens")
    parser.add_argument("--seconds", type=float, default=0.0, help="come down to nothing within this time")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    given.build.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    torch.set_num_threads(given.threads)
    stage, plan = STAGES[given.what]
    stage(given.build, replace(plan, steps=given.steps or plan.steps, seconds=given.seconds or plan.seconds))


if __name__ == "__main__":
    main()
