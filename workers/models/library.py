"""Turns the settings into a checked catalog of the models to serve, and finds or fetches their GGUF files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from workers.models import catalog
from workers.models.catalog import Catalog, CatalogError
from workers.models.catalog_faults import told
from workers.models.fetched import Fetched, FileChanged
from workers.models.files import (
    NotAFile,
    check_regular,
    clean_name,
    decode_model,
    first_part,
    open_regular,
    parse_reference,
)
from workers.models.generation import DraftSpec, SpeculationSettings
from workers.models.hub.watch import DownloadWatch
from workers.models.spec import NO_PROJECTOR, TEMPLATE_NAMES, AdapterSpec, ModelSpec, is_template
from workers.process import parent_death
from workers.protocol.exits import Exit
from workers.settings import SPEC_FIELDS, SupervisorSettings

MAGIC = b"GGUF"
HEADER_BYTES = 24
"""Minimum size of a GGUF file: magic, version, counts of tensors and key-value pairs (ggml's docs/gguf.md)."""

DEMO_ALIAS = "paddock-demo"
DEMO_PACKAGED = Path(__file__).parent / "demo" / "paddock-demo.gguf"
DEMO_CHECKOUT = Path(__file__).parents[2] / "deploy" / "demo" / "paddock-demo.gguf"

OFFLINE = "HF_HUB_OFFLINE"
TRUE = frozenset({"1", "on", "yes", "true"})
"""Values of the hub's library's variables that mean true."""

PATIENCE_S = 7200.0
POLL_S = 0.2


class ModelUnusable(Exception):
    """The model's file can't be served; the message names the file and the remedy."""

    exit = Exit.BAD_MODEL


def wanted(settings: SupervisorSettings) -> Catalog:
    """Return the catalog that the settings ask for: a catalog's file, or one entry made of a GGUF file, a model of the
    hub, or the demo. All paths in it are absolute, since workers can run in another folder. Raises CatalogError."""
    given = [name for name in ("catalog", "model", "hf") if getattr(settings, name)]
    if settings.model and re.match(r"https?:/", str(settings.model)):
        url = str(settings.model).replace(":/", "://", 1)  # a Path keeps one slash only
        raise CatalogError(
            f"--model: {url} is no file; name a model of the hub by --hf OWNER/NAME[:QUANT], or download the file first"
        )
    if len(given) > 1:
        flags = " and ".join(f"--{name}" for name in given)
        raise CatalogError(f"{flags} each say what to serve; give one of them (`paddock config show` tells from where)")
    if not settings.catalog:
        source = {"hf": settings.hf} if settings.hf else {"hf": None, "path": str(settings.model or demo())}
        entry = settings.entry(name=settings.alias or _alias(settings), **source)
        return with_absolute_paths(catalog.convert({"models": [entry]}, catalog.SETTINGS), Path.cwd())
    told_twice = [name for name in ("alias", *SPEC_FIELDS) if name in settings.model_fields_set and name != "hf"]
    if told_twice:
        names = ", ".join(told_twice)
        raise CatalogError(f"{names}: with a catalog, say this per model in {settings.catalog} and leave it out here")
    return with_paths(catalog.load(settings.catalog, partial(missing_files, settings.catalog)), settings.catalog)


def missing_files(file: Path, found: Catalog) -> Iterator[str]:
    """Yield what is wrong with the local files that the catalog of this file names for this machine."""
    for model in with_absolute_paths(found, file.resolve().parent).models:
        if model.workers:
            yield from _file_faults(model)


def with_paths(found: Catalog, file: Path) -> Catalog:
    """Return the catalog of a file with absolute paths. Raises CatalogError if it has no worker for this machine."""
    return with_absolute_paths(_some_work(found, file), file.resolve().parent)


def demo() -> Path:
    """Return the path of the model that comes with Paddock: in the wheel, or if it is not there, in the checkout."""
    return DEMO_PACKAGED if DEMO_PACKAGED.is_file() else DEMO_CHECKOUT


class Library:
    """Finds the models' files on this machine. `locate` downloads a missing model of the hub, and blocks meanwhile."""

    def __init__(
        self, folder: Path, patience_s: float = PATIENCE_S, *, quota_mib: int = 0, is_offline: bool = False
    ) -> None:
        """`quota_mib`: most MiB of all files in the folder, 0: any number. `is_offline`: nothing is fetched."""
        self.folder = folder
        self.fetched = Fetched(folder)
        self._patience_s = patience_s
        self._quota_mib = quota_mib
        self._is_offline = is_offline

    @classmethod
    def of(cls, settings: SupervisorSettings) -> Library:
        return cls(
            (settings.models_dir or settings.state_dir / "hub").absolute(),
            settings.fetch_timeout_s,
            quota_mib=settings.models_mib,
            is_offline=settings.offline or os.environ.get(OFFLINE, "").lower() in TRUE,
        )

    def locate_all(self, found: Catalog) -> tuple[ModelSpec, ...]:
        """Return the models that have workers on this machine, each with its checked local file as its only source.

        Raises ModelUnusable, which tells all local files that can't be used, or the first model of the hub that can't
        be had: nothing is fetched while a file is missing."""
        served = [model for model in found.models if model.workers]
        if faults := [fault for model in served for fault in _file_faults(model)]:
            raise ModelUnusable(told("", faults))
        return tuple(self._with_companions(model) for model in served)

    def locate(self, model: ModelSpec) -> Path:
        """Return the path of one model's checked local file, or of its first part. Raises ModelUnusable."""
        return self._locate(model, model.name, with_projector=not model.projector)

    def locate_reference(self, reference: str) -> Path:
        """Return the path of a model of the hub, or of its first part, with the projector beside it if it has one.
        Raises ModelUnusable."""
        path = self._from_hub(reference, with_projector=True)
        check_gguf(path, reference)
        return path

    def bring(self, reference: str, watch: DownloadWatch) -> Path:
        """Download a model of the hub, with its projector if it has one, unless it is there, and return its path.
        Blocks until it is there, or `watch` is cancelled. Raises ModelUnusable."""
        try:
            found = self.fetched.path_of(reference, with_projector=True)
            path = self._brought(reference, with_projector=True, watch=watch) if found is None else found
        except FileChanged as error:
            raise ModelUnusable(str(error)) from None
        check_gguf(path, reference)
        return path

    @property
    def is_offline(self) -> bool:
        """Whether nothing is fetched."""
        return self._is_offline

    def _with_companions(self, model: ModelSpec) -> ModelSpec:
        """Return the model with the checked local files of itself, its projector, adapters and draft model. Raises
        ModelUnusable."""
        path, projector = self.locate(model), model.projector
        if model.hf and not projector:
            beside = self.fetched.projector_of(model.hf)
            projector = "" if beside is None else str(beside)
        if projector not in ("", NO_PROJECTOR):
            check_gguf(Path(projector), f"{model.name}, projector")
        adapters = tuple(self._located_adapter(model, adapter) for adapter in model.adapters)
        return self._with_draft(replace(model, path=str(path), hf=None, projector=projector, adapters=adapters))

    def _located_adapter(self, model: ModelSpec, adapter: AdapterSpec) -> AdapterSpec:
        if not adapter.hf:
            return adapter
        return replace(adapter, path=str(self._locate(adapter, f"{model.name}, adapter {adapter.name}")), hf=None)

    def _with_draft(self, model: ModelSpec) -> ModelSpec:
        """Return the model with the checked local file of its draft model, if it has one. Raises ModelUnusable."""
        draft = model.speculation.draft
        if draft is None:
            return model
        path = self._locate(draft, f"{model.name}, draft model")
        return replace(model, speculation=replace(model.speculation, draft=replace(draft, path=str(path), hf=None)))

    def _locate(self, source: ModelSpec | DraftSpec | AdapterSpec, name: str, *, with_projector: bool = False) -> Path:
        if source.hf:
            path = self._from_hub(source.hf, with_projector=with_projector)
        else:
            path = first_part(Path(source.path or ""))
        check_gguf(path, name)
        return path

    def _from_hub(self, reference: str, *, with_projector: bool) -> Path:
        # A model that was fetched once is served without asking the hub, so that starts are fast and work offline.
        try:
            found = self.fetched.path_of(reference, with_projector=with_projector)
            if found is None:
                return self._brought(reference, with_projector=with_projector)
            if with_projector and not self.fetched.has_looked_for_projector(reference) and not self._is_offline:
                return self._with_projector(reference, found)
        except FileChanged as error:
            raise ModelUnusable(str(error)) from None
        return found

    def _with_projector(self, reference: str, found: Path) -> Path:
        """Fetch the projector of a model that is there without one, and return the model's path. If the hub can't be
        asked, the model is served without: it reads text, as it did before."""
        try:
            return self._brought(reference, with_projector=True)
        except ModelUnusable as error:
            print(f"paddock: {error}; {reference} is served as it is, without a projector", file=sys.stderr)
            return found

    def _brought(self, reference: str, *, with_projector: bool, watch: DownloadWatch | None = None) -> Path:
        """Fetch a model from the hub and return the path of its file. Raises ModelUnusable, FileChanged."""
        if self._is_offline:
            raise ModelUnusable(
                f"{reference} is not in {self.folder}, and nothing is fetched because `offline` or {OFFLINE} is set; "
                "run `paddock models pull` where the hub can be reached, or unset it"
            )
        deadline = time.monotonic() + self._patience_s
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.alone(deadline, self._late(reference), watch):
                # Another machine on the same volume may have fetched it meanwhile.
                found = self.fetched.path_of(reference, with_projector=with_projector)
                if found and (not with_projector or self.fetched.has_looked_for_projector(reference)):
                    return found
                return self._fetch(reference, deadline, with_projector=with_projector, watch=watch)
        except OSError as error:
            raise ModelUnusable(
                f"could not keep {reference} in {self.folder}: {error.strerror}; "
                "name a folder that you may write to with --models-dir"
            ) from None

    def _fetch(
        self, reference: str, deadline: float, *, with_projector: bool, watch: DownloadWatch | None = None
    ) -> Path:
        command = [sys.executable, "-m", "workers.models.hub", reference, str(self.folder)]
        # Missing files of a model are fetched of the same commit as the files that are there.
        command += ["--commit", commit] if (commit := self.fetched.commit_of(reference)) else []
        command += ["--with-projector"] if with_projector else []
        command += ["--quota-bytes", str(self._quota_mib << 20)]
        environment = {**os.environ, parent_death.VARIABLE: str(os.getpid())}
        left_s = max(deadline - time.monotonic(), 1.0)
        try:
            code, last = _run(command, environment, left_s, watch)
        except subprocess.TimeoutExpired:
            raise self._late(reference) from None
        if code != 0:
            reason = f": {watch.complaint}" if watch is not None and watch.complaint else ""
            raise ModelUnusable(f"could not fetch {reference} from the Hugging Face hub{reason}")
        model = decode_model(last)
        self.fetched.keep(reference, model)
        return Path(model.path)

    @contextlib.contextmanager
    def alone(self, deadline: float, late: ModelUnusable, watch: DownloadWatch | None = None) -> Iterator[None]:
        """Hold the folder's lock, which allows one download or removal at a time. Raises `late` when it is not free by
        `deadline`, or when `watch` is cancelled before."""
        with (self.folder / ".fetching").open("a") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline or (watch is not None and watch.is_cancelled):
                        raise late from None
                time.sleep(POLL_S)
            yield

    def _late(self, reference: str) -> ModelUnusable:
        return ModelUnusable(
            f"{reference} was not fetched within {self._patience_s:g} s (fetch_timeout_s); what has come is kept: "
            "start again to go on, or allow more time"
        )


def _run(
    command: Sequence[str], environment: Mapping[str, str], timeout_s: float, watch: DownloadWatch | None
) -> tuple[int, str]:
    """Return the exit code of a process, and the last line that it printed. Raises subprocess.TimeoutExpired."""
    # In its own session, the child does not get Ctrl-C from the terminal in the middle of its imports: it is killed
    # from here.
    if watch is None:
        answer = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            env=environment,
            start_new_session=True,
            timeout=timeout_s,
        )
        return answer.returncode, next(iter(answer.stdout.strip().splitlines()[-1:]), "")
    with subprocess.Popen(
        [*command, "--progress"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        last = watch.follow(process, timeout_s)
        return process.returncode, last


def _file_faults(model: ModelSpec) -> Iterator[str]:
    """Yield what is wrong with the local files that a model names."""
    draft = model.speculation.draft
    named: list[tuple[str | None, str]] = [
        (model.path, model.name),
        ("" if model.projector == NO_PROJECTOR else model.projector, f"{model.name}, projector"),
        *((adapter.path, f"{model.name}, adapter {adapter.name}") for adapter in model.adapters),
        (draft.path if draft else None, f"{model.name}, draft model"),
        *((vector.path, f"{model.name}, control vector") for vector in model.llama.control_vectors),
    ]
    for path, name in named:
        if path:
            try:
                check_gguf(first_part(Path(path)), name)
            except ModelUnusable as error:
                yield str(error)
    try:
        check_template(model)
    except ModelUnusable as error:
        yield str(error)


def check_template(model: ModelSpec) -> None:
    """Raise ModelUnusable if a model's `chat_template` is the path of something that is no file. A worker reads it, and
    tells what else is wrong with it."""
    if not model.chat_template or is_template(model.chat_template):
        return
    path = Path(model.chat_template).expanduser()
    try:
        check_regular(path)
    except FileNotFoundError:
        if model.chat_template not in TEMPLATE_NAMES:
            raise ModelUnusable(
                f"model {model.name}: chat_template: no file {path}; give a Jinja file, or a name such as chatml "
                "(docs/chat-templates.md)"
            ) from None
    except (NotAFile, IsADirectoryError) as error:
        raise ModelUnusable(f"model {model.name}: chat_template: {path}: {error.strerror}; give a Jinja file") from None
    except (OSError, ValueError):  # the name of a template that comes with Paddock, or the worker tells
        return


def check_gguf(path: Path, name: str) -> None:
    """Raise ModelUnusable unless the file exists and begins like a GGUF file. `name`: the model's, for the message."""
    try:
        with open_regular(path) as file:
            head = file.read(HEADER_BYTES)
    except FileNotFoundError:
        raise ModelUnusable(f"model {name}: no file {path}; check the path") from None
    except IsADirectoryError:
        raise ModelUnusable(
            f"model {name}: {path} is a folder; name a GGUF file in it, or serve all that lies in it by --models-dir"
        ) from None
    except OSError as error:
        raise ModelUnusable(f"model {name}: {path}: {error.strerror}; it must be a readable file") from None
    if head[:4] != MAGIC:
        raise ModelUnusable(
            f"model {name}: {path} is not a GGUF file (it begins with {head[:4]!r}); convert it to GGUF"
        )
    if len(head) < HEADER_BYTES:
        raise ModelUnusable(f"model {name}: {path} is cut off after {len(head)} bytes; copy or download it again")


def _some_work(found: Catalog, file: Path) -> Catalog:
    if not any(model.workers for model in found.models):
        raise CatalogError(
            f"{file}: each model has `workers: 0`, so nothing would run on this machine; give one of them a worker"
        )
    return found


def with_absolute_paths(found: Catalog, folder: Path) -> Catalog:
    """Return the catalog with the paths of models, projectors, draft models, adapters, control vectors and chat
    templates joined to `folder`."""

    def located(path: str) -> str:
        return str(folder / Path(path).expanduser())

    def is_file(template: str) -> bool:
        return bool(template) and template not in TEMPLATE_NAMES and not is_template(template)

    def drafted(speculation: SpeculationSettings) -> SpeculationSettings:
        draft = speculation.draft
        if draft is None or draft.path is None:
            return speculation
        return replace(speculation, draft=replace(draft, path=located(draft.path)))

    models = tuple(
        replace(
            model,
            speculation=drafted(model.speculation),
            path=located(model.path) if model.path else None,
            projector=model.projector if model.projector in ("", NO_PROJECTOR) else located(model.projector),
            chat_template=located(model.chat_template) if is_file(model.chat_template) else model.chat_template,
            adapters=tuple(
                replace(adapter, path=located(adapter.path)) if adapter.path else adapter for adapter in model.adapters
            ),
            llama=replace(
                model.llama,
                control_vectors=tuple(
                    replace(vector, path=located(vector.path)) for vector in model.llama.control_vectors
                ),
            ),
        )
        for model in found.models
    )
    return replace(found, models=models)


def _alias(settings: SupervisorSettings) -> str:
    if settings.hf:
        repository = parse_reference(settings.hf).repo.rpartition("/")[2]
        return re.sub(r"[-_]gguf$", "", repository, flags=re.IGNORECASE)
    if settings.model is None:
        return DEMO_ALIAS
    return clean_name(settings.model.stem)
