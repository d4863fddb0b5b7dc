"""Describes, in Redis, which models are wanted, which are loaded, and which are being downloaded.

Gateways tell which calls wait for which model (`GatewayDemand`), a field of `keys.DEMAND` each; supervisors tell what
has become of the models that they load on demand (`MachineModels`), a field of `keys.RESIDENCY` each. Both say when
they were written, as fields of a hash don't expire: what is older than `LIFE_S` counts as gone. Times are unix seconds.

Of models folders: a gateway writes an order of an admin (`LibraryOrder`), a field of `keys.LIBRARY_ORDERS`, which the
machine's supervisor removes when it has read it. A supervisor tells its answers, and how far its downloads are
(`MachineLibrary`), in its field of `keys.LIBRARY`, again and again while it runs.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

LIFE_S = 5.0
"""Seconds after which what a gateway or supervisor has told counts no more."""
TOLD_EVERY_S = 0.5
"""Maximum seconds between two writings by a gateway while calls wait, and by a supervisor."""
SILENT_S = 4 * TOLD_EVERY_S
"""Seconds after which nothing is loaded, and nothing leaves, for the calls of a gateway that tells nothing: it was
killed, say, and its callers have gone."""
LOOK_EVERY_S = 0.1
"""Seconds between two readings by a supervisor."""
MAX_MODELS = 4096
LONGEST_TOLD = 2 << 20
"""Maximum bytes of what one gateway or machine tells; more is not read."""
MAX_TEAMS = 64
"""Maximum number of teams that are told of a model; those that have waited longest are."""

ModelStatus = Literal["unloaded", "loading", "loaded", "sleeping", "failed"]
"""State of a model on one machine, by llama-server's names. `sleeping`: it has no worker, and its weights are kept in
main memory."""


class Detail(msgspec.Struct, frozen=True):
    """A part of a `Why` that can hold anything, such as a line of a log: not for keys limited to some models."""

    detail: str


class Why(msgspec.Struct, frozen=True):
    """A sentence that says why a model is loaded or not. The models that it names stand apart from its text, since
    callers are told only of models that their keys may use: it is made into text where it is shown."""

    parts: tuple[str | tuple[str, ...] | Detail, ...] = ()
    """Text, names of models, and details, in the order in which they are read."""

    @classmethod
    def of(cls, *parts: str | tuple[str, ...] | Detail) -> Why:
        """Return a sentence of texts, tuples of models' names, and details."""
        return cls(parts)

    def __bool__(self) -> bool:
        return bool(self.parts)

    def shown(self, models: Container[str] | None) -> str:
        """Return the sentence for one who may be told of these models only; None: of everything."""
        return "".join(_shown(part, models) for part in self.parts)

    @property
    def whole(self) -> str:
        """The sentence for admins and for logs."""
        return self.shown(None)


def _shown(part: str | tuple[str, ...] | Detail, models: Container[str] | None) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Detail):
        return part.detail if models is None else ""
    seen = [name for name in part if models is None or name in models]
    hidden = len(part) - len(seen)
    more = [] if not hidden else ["another model"] if hidden == 1 else [f"{hidden} other models"]
    return ", ".join(seen + more)


class ModelDemand(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The calls of one gateway for one model."""

    num_waiting: int = 0
    """Calls that wait for a slot, or for the model to be loaded."""
    oldest_at: float = 0.0
    """When the call that has waited longest arrived, or where none waits the first that is served elsewhere; 0: there
    is none."""
    predicted_wait_s: float = 0.0
    """Predicted wait of a call that comes now, with the workers that there are."""
    num_running: int = 0
    """Calls that hold a slot."""
    num_elsewhere: int = 0
    """Calls lately that a fallback serves in its place, since it is not loaded: nobody waits for it, but the next ones
    are to have it."""
    used_at: float = 0.0
    """When a call last got or left a slot; 0: none has since this gateway started."""
    teams: Annotated[tuple[str, ...], Meta(max_length=MAX_TEAMS)] = ()
    """The teams whose calls wait: models are loaded for teams in turn."""


class GatewayDemand(msgspec.Struct, frozen=True, kw_only=True):
    """The message of one gateway: the models that have calls, or had some within the last minute."""

    at: float
    models: Annotated[dict[str, ModelDemand], Meta(max_length=MAX_MODELS)]


class ModelState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a model on one machine."""

    status: ModelStatus
    progress: float | None = None
    """Share of the loading that is done, 0 to 1; None: not loading, or not known."""
    why: Why = Why()
    """Why the model is not loaded, or is loading."""
    is_hopeless: bool = False
    """Whether waiting alone changes nothing: calls that wait for the model had better be refused."""
    is_closed: bool = False
    """Whether no call loads it at present, so that one is refused without the supervisor having heard of it: only an
    admin loads it, or no machine has room for it, whoever may leave."""
    retry_at: float = 0.0
    """When a model that failed is tried again; 0: it has not failed."""
    num_failures: int = 0
    """How often its workers failed to load, or died soon after, since one was stable."""
    exit_code: int | None = None
    """Exit code of the last of these (negative: a signal); None: none, or it hung and was killed."""
    log: tuple[str, ...] = ()
    """The last lines of its log, for admins."""


class MachineModels(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The message of one machine's supervisor: the states of the models that it loads on demand."""

    at: float
    models: Annotated[dict[str, ModelState], Meta(max_length=MAX_MODELS)]
    wanted: Annotated[dict[str, int], Meta(max_length=MAX_MODELS)] = {}
    """Model -> the workers that it should have, of all machines that this one decides for (`residency.plan.Plan`)."""


LIBRARY_LIFE_S = 15.0
"""Seconds after which what a supervisor has told of its folder counts no more."""
ORDERS_EVERY_S = 0.5
"""Seconds between two readings of the orders, and at least between two writings while something is downloaded."""
ANSWERS_KEPT_S = 60.0
"""Seconds for which answers, and downloads that have ended, are told."""
MAX_DOWNLOADS = 64
MAX_REFERENCE_CHARS = 512

Action = Literal["fetch", "remove"]
"""`fetch`: download a model of the hub; `remove`: stop its download, or else remove its files."""
DownloadStatus = Literal["downloading", "finished", "failed", "removed"]

Reference = Annotated[str, Meta(min_length=1, max_length=MAX_REFERENCE_CHARS)]


class LibraryOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order of an admin to one machine."""

    machine: str
    action: Action
    model: Reference
    """The model's reference: `OWNER/NAME[:QUANT][@REVISION]`."""
    at: float


class LibraryAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to one order."""

    at: float
    refusal: str = ""
    """Why nothing was done, in a sentence with its remedy; empty: it is done, or has begun."""
    is_missing: bool = False
    """Whether it was refused because the machine has no such model."""


class FileProgress(msgspec.Struct, frozen=True, array_like=True):
    """How much of a file has come, in bytes."""

    done: int
    total: int


class Download(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model that is being downloaded, was a moment ago, or whose files were removed a moment ago."""

    since: float
    status: DownloadStatus = "downloading"
    files: dict[str, FileProgress] = {}
    """Address of a file -> how much of it there is."""
    reason: str = ""
    """Why it failed."""


class MachineLibrary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The message of one machine's supervisor: its downloads, and its answers to orders."""

    at: float
    downloads: Annotated[dict[str, Download], Meta(max_length=2 * MAX_DOWNLOADS)] = {}
    """Reference -> its download."""
    answers: dict[str, LibraryAnswer] = {}
    """Order -> the answer."""


encode = msgspec.json.Encoder().encode
decode_demand = msgspec.json.Decoder(GatewayDemand).decode
decode_models = msgspec.json.Decoder(MachineModels).decode
decode_order = msgspec.json.Decoder(LibraryOrder).decode
decode_library = msgspec.json.Decoder(MachineLibrary).decode
