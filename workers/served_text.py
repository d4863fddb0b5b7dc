"""Makes the parts of a worker that deal with text: its template renderer, infill prompts and routes for text."""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path

from workers.chat.infill import InfillPrompts, InfillRoom, InfillTokens
from workers.chat.named_templates import NAMED
from workers.chat.prompts import Prompts
from workers.chat.renderer import Renderer
from workers.chat.template import DEFAULT
from workers.llama.model import Model
from workers.llama.native import version
from workers.llama.sampling.stages import Settings
from workers.llama.tokens.vocab import Vocab
from workers.models.files import open_regular
from workers.models.spec import LlamaSettings, is_template
from workers.process.helper_process import Launch
from workers.protocol.heartbeat import Modality, WorkerKind
from workers.protocol.queries import Props
from workers.protocol.requests import Sampling
from workers.service.calls.lanes import FairLane
from workers.service.routes.text import TextRoutes, Texts

MAX_TEMPLATE_BYTES = 1 << 20


class TemplateFileUnusable(ValueError):
    """The file that `chat_template` names can't be read; the message says why."""


def open_renderer(model: Model, override: str, number: int, launch: Launch) -> Renderer:
    """Open the renderer of chat templates, with `number` processes. `override` is the setting `chat_template`: a file's
    path, the name of a built-in template, or a template. If it is empty, the model's own templates are used.

    Raises TemplateFileUnusable, TemplateUnusable."""
    sources = {DEFAULT: template_of(override)} if override else model.chat_templates
    return Renderer(sources, bos_text=model.bos_text, eos_text=model.eos_text, number=number, launch=launch)


def template_of(setting: str) -> str:
    """Return the Jinja source that the setting `chat_template` names or holds. Raises TemplateFileUnusable."""
    if is_template(setting):
        return setting
    if setting in NAMED:
        return NAMED[setting]
    path = Path(setting).expanduser()
    try:
        with io.BufferedReader(open_regular(path)) as file:
            data = file.read(MAX_TEMPLATE_BYTES + 1)
        source = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise TemplateFileUnusable(f"chat_template: can't read {path}: {reason}; give a Jinja file") from None
    if len(data) > MAX_TEMPLATE_BYTES:
        raise TemplateFileUnusable(
            f"chat_template: {path} is longer than {MAX_TEMPLATE_BYTES} bytes; give a shorter one"
        )
    return source


def infill_prompts(vocab: Vocab, llama: LlamaSettings, *, n_ctx: int) -> InfillPrompts:
    tokens = vocab.infill_tokens()
    room = InfillRoom(n_ctx=n_ctx, n_batch=llama.n_batch, suffix_first=llama.spm_infill)
    if not {"pre", "suf", "mid"} <= tokens.keys():
        return InfillPrompts(None, room)
    return InfillPrompts(
        InfillTokens(
            prefix=tokens["pre"],
            suffix=tokens["suf"],
            middle=tokens["mid"],
            repository=tokens.get("rep"),
            file=tokens.get("sep"),
            begin=vocab.bos if vocab.adds_bos else None,
        ),
        room,
    )


def text_routes(
    model: Model,
    prompts: Prompts,
    lane: FairLane,
    media: FairLane,
    renderer: Renderer | None,
    defaults: Sampling,
    *,
    name: str,
    kind: WorkerKind = "generate",
    slots: int,
    n_ctx: int,
    inputs: tuple[Modality, ...] = ("text",),
) -> TextRoutes:
    """Make the routes for text. `lane`, `media`: threads for texts, and for pictures and sounds. `renderer` None: the
    model does not chat. `defaults`: the model's sampling parameters where a caller sets none. `inputs`: the kinds of
    input that the model takes."""
    values = asdict(Settings.of(defaults, n_ctx)) | {"seed": defaults.seed}
    props = Props(
        kind=kind,
        model=name,
        slots=slots,
        n_ctx=n_ctx,
        facts=model.facts,
        model_file=model.path.name,
        architecture=model.architecture,
        ftype=model.ftype,
        n_embd=model.n_embd,
        vocab_type=model.vocab.kind,
        bos_token=model.bos_text,
        eos_token=model.eos_text,
        chat_templates=dict(renderer.sources) if renderer is not None else {},
        chat_template_caps=renderer.abilities[DEFAULT].caps() if renderer is not None else {},
        has_infill={"pre", "suf", "mid"} <= model.vocab.infill_tokens().keys(),
        input_modalities=inputs,
        build_info=version(),
        sampling=Sampling(**values),
    )
    begin = model.bos_text if model.vocab.adds_bos else ""
    return TextRoutes(Texts(model.vocab, prompts, bos_text=begin), props, lane, media)
