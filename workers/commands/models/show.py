"""`paddock models show`: what a GGUF file says of itself, and what the catalog puts beside it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workers.commands.layout import card, write_number
from workers.commands.models.facts import Facts, read_facts
from workers.commands.models.inventory import Item, chosen, take_inventory
from workers.commands.models.parser import Request, Unusable
from workers.llama.gguf import read_header
from workers.llama.native import ModelError
from workers.models.catalog import Catalog
from workers.models.files import first_part, parts
from workers.models.folder.folder import named_by
from workers.models.hub.progress import size_text
from workers.models.library import ModelUnusable
from workers.models.spec import NO_PROJECTOR
from workers.protocol.exits import Exit

THOUSAND, MILLION, BILLION = 10**3, 10**6, 10**9


def run(request: Request) -> Exit:
    """Print what the file says. Raises CatalogError, ModelUnusable, Unusable, OSError."""
    name, library, catalog = request.options.name, request.library, named_by(request.settings, may_be_empty=True)
    item = _item(name, take_inventory(library, catalog, request.settings.state_dir))
    if not item.files or item.missing or item.is_unfinished:
        raise ModelUnusable(f"model {name}: {item.state} here; fetch it with `paddock models pull`")
    try:
        facts = read_facts(read_header(item.files[0]))
    except ModelError as error:
        raise ModelUnusable(str(error)) from None
    beside = _companions(item, catalog)
    if request.options.json:
        told = {"name": item.name, "files": [str(file) for file in item.files], "bytes": item.num_bytes}
        print(json.dumps({**told, **asdict(facts), "beside": beside}, indent=2))
    else:
        print(card(_fields(item, facts, beside, library.fetched.commit_of(item.name))))
    return Exit.OK


def _item(name: str, items: tuple[Item, ...]) -> Item:
    try:
        return chosen(items, [name], "show")[0]
    except Unusable:
        path = first_part(Path(name))
        if not path.is_file():
            raise
        return Item(name, False, parts(path))


def _companions(item: Item, catalog: Catalog) -> dict[str, list[str]]:
    """Return the projectors, drafts and adapters that belong to a model: those of the catalog, and the projector that
    came with it from the hub."""
    found: dict[str, list[str]] = {"projector": [], "draft": [], "adapters": []}
    models = [model for model in catalog.models if model.name in item.used_by]
    for model in models:
        if model.projector not in ("", NO_PROJECTOR):
            found["projector"].append(model.projector)
        if (draft := model.speculation.draft) is not None:
            found["draft"].append(draft.hf or draft.path or "")
        found["adapters"] += [f"{one.name} ({one.hf or one.path})" for one in model.adapters]
    own = parts(item.files[0])
    found["projector"] += [str(file) for file in item.files if file not in own]
    return found


def _fields(item: Item, facts: Facts, beside: dict[str, list[str]], commit: str) -> dict[str, Any]:
    tokens = ", ".join(f"{name} {token}" for name, token in facts.special_tokens.items())
    return {
        "name": item.name,
        "file": "\n".join(str(file) for file in item.files),
        "commit": commit,
        "size": size_text(item.num_bytes),
        "kind": facts.kind,
        "title": facts.name,
        "architecture": facts.architecture,
        "parameters": _parameters(facts.num_parameters),
        "quantisation": facts.quant,
        "layers": write_number(facts.num_layers) if facts.num_layers else "",
        "width": write_number(facts.n_embd) if facts.n_embd else "",
        "context": f"{write_number(facts.n_ctx)} tokens" if facts.n_ctx else "",
        "vocabulary": f"{write_number(facts.num_tokens)} tokens ({facts.vocabulary})" if facts.vocabulary else "",
        "special tokens": tokens,
        "chat template": (", ".join(facts.templates) or "no") if facts.vocabulary else "",
        "reads": ", ".join(facts.senses),
        "alpha": f"{facts.lora_alpha:g}" if facts.lora_alpha else "",
        "in catalog as": ", ".join(item.used_by),
        "runs as": ", ".join(item.running),
        **{name: "\n".join(found) for name, found in beside.items()},
    }


def _parameters(count: int) -> str:
    for unit, name in ((BILLION, "billion"), (MILLION, "million"), (THOUSAND, "thousand")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return str(count) if count else ""
