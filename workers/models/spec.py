"""One model as its catalog entry describes it: its file, how much of it to run, its defaults for sampling and chats.

A `ModelSpec` is passed on from the catalog file to the supervisor and to its workers. Each field is declared here and
nowhere else: its type, its bounds and its description make the catalog's JSON Schema and the setting of its name. So do
the docstrings of the structs here: they are texts of docs/catalog.schema.json.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from workers.models.cores import CORES_PATTERN, cores_of
from workers.models.generation import HF_PATTERN, HF_TEXT, DefaultSampling, SpeculationSettings
from workers.models.overrides import MetadataKey, MetadataValue, TensorOverride, metadata_faults
from workers.models.prices import Rates
from workers.protocol.requests import MAX_BUDGET_MESSAGE_CHARS, MAX_THINKING_BUDGET, Name
from workers.residency.policy import Residency, own_faults, resolve

Count = Annotated[int, Meta(ge=1)]

MAX_CTX = 2**24
"""Maximum context in tokens. It is far beyond what models are trained for, so a larger number is a mistake."""

MAX_SHARED_BYTES = 96 << 10
"""Maximum bytes of a model's shared prompts as JSON. They can be in an environment variable: up to 128 KiB on Linux."""

MAX_SLOTS = 254
"""Maximum number of slots. llama.cpp has 256 sequences: one is used to move cells, and one holds a cached prompt that
no running call uses."""

MAX_KV_TOKENS = 2**31 - 1
"""Maximum number of KV cells: llama.cpp counts them in 32 bits."""


ThinkingMode = Literal["auto", "on", "off"]

RESERVED = frozenset({"messages", "tools", "functions", "raise_exception", "strftime_now"})
"""Variables of a chat template that neither a model's nor a request's `chat_template_kwargs` can set."""

TEMPLATE_NAMES = frozenset(
    {
        "bailing",
        "bailing-think",
        "bailing2",
        "chatglm3",
        "chatglm4",
        "chatml",
        "command-r",
        "deepseek",
        "deepseek-ocr",
        "deepseek2",
        "deepseek3",
        "exaone-moe",
        "exaone3",
        "exaone4",
        "falcon3",
        "gemma",
        "gigachat",
        "glmedge",
        "gpt-oss",
        "granite",
        "granite-4.0",
        "granite-4.1",
        "grok-2",
        "hunyuan-dense",
        "hunyuan-moe",
        "hunyuan-vl",
        "kimi-k2",
        "llama-2",
        "llama-3",
        "llama2",
        "llama2-sys",
        "llama2-sys-bos",
        "llama2-sys-strip",
        "llama3",
        "llama4",
        "megrez",
        "minicpm",
        "mistral-v1",
        "mistral-v3",
        "mistral-v3-tekken",
        "mistral-v7",
        "mistral-v7-tekken",
        "monarch",
        "openchat",
        "orion",
        "pangu-embedded",
        "phi3",
        "phi4",
        "rwkv-world",
        "seed_oss",
        "smolvlm",
        "solar-open",
        "vicuna",
        "vicuna-orca",
        "yandex",
        "zephyr",
    }
)
"""Names of the built-in chat templates (`workers.chat.named_templates`): those of llama-server, and `llama-2` and
`llama-3` of llama-cpp-python."""

NOT_FOR_MODELS = RESERVED | {"add_generation_prompt", "continue_final_message", "chat_template", "documents"}
"""Variables that a model's `chat_template_kwargs` can't set."""


def as_setting(description: str) -> Meta:
    """Return metadata with the text that describes a field of `ModelSpec` among the settings (not in the catalog)."""
    return Meta(extra={"setting": description})


NO_DEVICE = "none"
"""In place of names of devices: no device but the processor."""


class ControlVectorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A file of directions that are added to what a model's layers say."""

    path: Annotated[str, Meta(min_length=1, description="GGUF file, relative to the catalog file")]
    scale: Annotated[
        float, Meta(ge=-16, le=16, description="how strongly it acts; below 0: the other way; 0: not at all")
    ] = 1.0


class LlamaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of llama.cpp, handed to it by its own names."""

    # A setting whose name and value are those of a parameter of llama.cpp needs no code but its line here: it is passed
    # on by `workers.llama.model`.

    n_batch: Annotated[int, Meta(ge=32, le=65536, description="most tokens in one llama_decode")] = 2048
    n_ubatch: Annotated[int, Meta(ge=32, le=65536, description="most tokens computed at once")] = 512
    n_threads: Annotated[
        int, Meta(ge=0, description="CPU threads; 0: this machine's cores divided among its workers")
    ] = 0
    n_threads_batch: Annotated[
        int, Meta(ge=0, description="CPU threads for a step of more than one token; 0: as n_threads")
    ] = 0
    n_gpu_layers: Annotated[int, Meta(ge=-1, description="layers on the GPU; -1: all")] = -1
    split_mode: Annotated[
        str, Meta(pattern="^(none|layer|row|tensor)$", description="how a model is spread over a worker's GPUs")
    ] = "layer"
    main_gpu: Annotated[
        int, Meta(ge=0, description="which of a worker's GPUs, with a split_mode of none or row, counted from 0")
    ] = 0
    tensor_split: Annotated[
        tuple[Annotated[float, Meta(ge=0, le=1e6)], ...],
        Meta(max_length=16, description="share of each of a worker's GPUs; empty: by their free memory"),
    ] = ()
    offload_kqv: Annotated[bool, Meta(description="keep the KV cache on the GPU")] = True
    op_offload: Annotated[
        bool, Meta(description="compute large batches on the GPU also for layers that are not on it")
    ] = True
    cpu_moe: Annotated[bool, Meta(description="keep the experts' weights of every layer in main memory")] = False
    n_cpu_moe: Annotated[
        int,
        Meta(ge=0, le=1024, description="keep the experts' weights of so many layers, from the first, in main memory"),
    ] = 0
    no_host: Annotated[bool, Meta(description="keep no weights in memory that is pinned for the GPU")] = False
    use_extra_bufts: Annotated[bool, Meta(description="repack weights for this processor where that is faster")] = True
    check_tensors: Annotated[bool, Meta(description="look for invalid values in the weights while loading")] = False
    no_perf: Annotated[bool, Meta(description="llama.cpp does not time its own work")] = True
    flash_attn: Annotated[str, Meta(pattern="^(auto|on|off)$")] = "auto"
    cache_type_k: Annotated[str, Meta(pattern="^(f32|f16|bf16|q8_0|q4_0|q4_1|q5_0|q5_1|iq4_nl)$")] = "f16"
    cache_type_v: Annotated[str, Meta(pattern="^(f32|f16|bf16|q8_0|q4_0|q4_1|q5_0|q5_1|iq4_nl)$")] = "f16"
    swa_full: Annotated[
        bool,
        Meta(
            description="keep cells behind a sliding window: more memory, but prompts of such models "
            "can be shared by parts"
        ),
    ] = False
    spm_infill: Annotated[
        bool, Meta(description="for infill, suffix before prefix, as some models have learned it")
    ] = False
    use_mmap: bool = True
    use_mlock: bool = False
    rope_scaling: Annotated[
        str,
        Meta(
            pattern="^(auto|none|linear|yarn|longrope)$",
            description="how rotary positions are scaled for a context beyond the trained one; auto: as the model says",
        ),
    ] = "auto"
    rope_freq_base: Annotated[
        float, Meta(ge=0, le=1e12, description="base of the rotary positions' frequencies; 0: the model's")
    ] = 0.0
    rope_freq_scale: Annotated[
        float,
        Meta(
            ge=0,
            le=64,
            description="factor of rotary positions: 0.25 for a context four times the trained one; 0: the model's",
        ),
    ] = 0.0
    yarn_orig_ctx: Annotated[
        int, Meta(ge=0, le=MAX_CTX, description="context that the model was trained for before YaRN; 0: the model's")
    ] = 0
    yarn_ext_factor: Annotated[
        float, Meta(ge=-1, le=1, description="YaRN's share of extrapolation; 0: none; -1: the model's")
    ] = -1.0
    yarn_attn_factor: Annotated[
        float, Meta(ge=-1, le=64, description="factor of attention, while yarn_ext_factor is 0; -1: the model's")
    ] = -1.0
    yarn_beta_slow: Annotated[
        float, Meta(ge=-1, le=4096, description="YaRN: rotations at which interpolation is whole; -1: the model's")
    ] = -1.0
    yarn_beta_fast: Annotated[
        float, Meta(ge=-1, le=4096, description="YaRN: rotations at which extrapolation is whole; -1: the model's")
    ] = -1.0
    override_kv: Annotated[
        dict[MetadataKey, MetadataValue],
        Meta(max_length=64, description="values in place of those of the file's metadata, by the metadata's keys"),
    ] = {}
    override_tensor: Annotated[
        tuple[TensorOverride, ...],
        Meta(max_length=64, description="types of buffer for tensors by their names; the first pattern that fits wins"),
    ] = ()
    devices: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=64)] | Annotated[int, Meta(ge=0, le=255)], ...],
        Meta(
            max_length=16,
            description="which of a worker's devices are used, by llama.cpp's names (CUDA0) or counted from 0; none: "
            "the processor only; empty: all",
        ),
    ] = ()
    numa: Annotated[
        str,
        Meta(
            pattern="^(off|distribute|isolate|numactl)$",
            description="on machines with several NUMA nodes: threads on all nodes, on one, or on the cores that the "
            "process may use",
        ),
    ] = "off"
    cpus: Annotated[
        str,
        Meta(
            pattern=CORES_PATTERN,
            max_length=1024,
            description="cores that the model's workers may run on, such as 0-3,8, divided among them; empty: all",
        ),
    ] = ""
    control_vectors: Annotated[
        tuple[ControlVectorSpec, ...],
        Meta(max_length=16, description="control vectors for every call of the model; several are added up"),
    ] = ()
    control_vector_layers: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=1024)], ...],
        Meta(max_length=2, description="first and last layer that control vectors act on; empty: all"),
    ] = ()
    embeddings: (
        Annotated[bool, Meta(description="serve embeddings instead of text; unset: if the model is made for it")] | None
    ) = None
    pooling: Annotated[
        str,
        Meta(
            pattern="^(auto|none|mean|cls|last|rank)$",
            description="how an input's tokens become one vector, or with rank a score; auto: what the model says. "
            "Any but auto implies `embeddings`",
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        if self.embeddings is False and self.pooling != "auto":
            raise ValueError(f"`embeddings` is false but `pooling` is {self.pooling}; remove one of the two")
        faults = chain(
            _placement_faults(self),
            _rope_faults(self),
            metadata_faults(self.override_kv),
            _core_faults(self),
            _vector_faults(self),
        )
        if told := "\n".join(faults):
            raise ValueError(told)

    @property
    def scales_positions(self) -> bool:
        """Whether rotary positions are changed, as they are for a context beyond the trained one."""
        return self.rope_scaling in ("linear", "yarn") or self.rope_freq_base > 0 or self.rope_freq_scale > 0

    @property
    def uses_devices(self) -> bool:
        """Whether the model may be put on a GPU, if there is one."""
        return self.n_gpu_layers != 0 and self.devices != (NO_DEVICE,)


YARN = ("yarn_orig_ctx", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_slow", "yarn_beta_fast")


def is_given(llama: LlamaSettings, name: str) -> bool:
    """Return whether a setting of YaRN is given, in place of the model's own."""
    return bool(getattr(llama, name) != (0 if name == "yarn_orig_ctx" else -1))


def _rope_faults(llama: LlamaSettings) -> Iterator[str]:
    """Yield what contradicts itself in the settings of rotary positions."""
    given = [name for name in YARN if is_given(llama, name)]
    if 0 < llama.rope_freq_base <= 1:
        yield f"`rope_freq_base` is {llama.rope_freq_base:g} and must be above 1, or 0 for the model's own; raise it"
    if 0 < llama.rope_freq_scale < 1e-5:
        yield f"`rope_freq_scale` is {llama.rope_freq_scale:g}; the least is 0.00001, and 0 is the model's own"
    if below := next((name for name in given if getattr(llama, name) < 0), None):
        yield f"`{below}` is {getattr(llama, below):g}; below 0 there is only -1, the model's own"
    if llama.rope_scaling == "none" and llama.rope_freq_scale not in (0, 1):
        yield "`rope_freq_scale` has no effect with a `rope_scaling` of none; remove one of the two"
    if given and llama.rope_scaling in ("none", "linear"):
        yield f"`{given[0]}` is for YaRN, and `rope_scaling` is {llama.rope_scaling}; set that to yarn, or remove it"
    if llama.yarn_attn_factor >= 0 and llama.rope_scaling == "yarn" and llama.yarn_ext_factor:
        yield (
            "`yarn_attn_factor` has no effect while YaRN extrapolates, since llama.cpp computes it; remove it, or set "
            "`yarn_ext_factor` to 0"
        )
    if llama.yarn_beta_slow >= 0 and llama.yarn_beta_fast >= 0 and llama.yarn_beta_slow >= llama.yarn_beta_fast:
        yield "`yarn_beta_slow` must be below `yarn_beta_fast`; llama.cpp's own are 1 and 32"


def _placement_faults(llama: LlamaSettings) -> Iterator[str]:
    """Yield what contradicts itself in where a model's weights go."""
    if llama.split_mode in ("layer", "tensor") and llama.main_gpu:
        yield (
            f"`main_gpu` chooses one GPU, but with a `split_mode` of {llama.split_mode} all are used; "
            "set `split_mode` to none, or remove `main_gpu`"
        )
    if llama.cpu_moe and llama.n_cpu_moe:
        yield "`cpu_moe` is for every layer, `n_cpu_moe` for some; remove one of the two"
    if llama.tensor_split and llama.split_mode == "none":
        yield "`tensor_split` has no use with a `split_mode` of none; remove one of the two"
    if llama.tensor_split and not 0 < sum(llama.tensor_split) < math.inf:
        yield "`tensor_split`: at least one share must be above 0"
    if NO_DEVICE in llama.devices and len(llama.devices) > 1:
        yield "`devices`: none stands alone; remove it, or the others"
    if NO_DEVICE in llama.devices and llama.split_mode == "tensor":
        yield "a `split_mode` of tensor needs devices, and `devices` is none; change one of the two"
    if len(set(llama.devices)) < len(llama.devices):
        yield "`devices` names a device twice; name each one once"
    if llama.devices and (wanted := max(len(llama.tensor_split), llama.main_gpu + 1)) > len(llama.devices):
        yield f"`devices` names {len(llama.devices)} devices, and other settings speak of {wanted}; name as many"


def _core_faults(llama: LlamaSettings) -> Iterator[str]:
    """Yield what contradicts itself in which cores are used."""
    try:
        num_cores = len(cores_of(llama.cpus))
    except ValueError as error:
        yield str(error)
        return
    for name in ("n_threads", "n_threads_batch"):
        if num_cores and getattr(llama, name) > num_cores:
            yield (
                f"`{name}` is {getattr(llama, name)}, and `cpus` names {num_cores} cores; threads that share a core "
                f"wait for each other, so lower `{name}` or name more cores"
            )
    if llama.cpus and llama.numa in ("distribute", "isolate"):
        yield (
            f"`cpus` and a `numa` of {llama.numa} both choose cores; set `numa` to numactl, which keeps to `cpus`, or "
            "remove one of the two"
        )


def _vector_faults(llama: LlamaSettings) -> Iterator[str]:
    """Yield what contradicts itself in the settings of control vectors."""
    layers = llama.control_vector_layers
    if layers and not llama.control_vectors:
        yield "`control_vector_layers` has no use without `control_vectors`; remove it"
    if len(layers) == 1 or list(layers) != sorted(layers):
        yield "`control_vector_layers` is the first and the last layer, such as [4, 20]"


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A LoRA adapter that a model's workers know from their start on; calls name it."""

    name: Name
    path: Annotated[str, Meta(min_length=1, description="GGUF file, relative to the catalog file")] | None = None
    hf: Annotated[str, Meta(pattern=HF_PATTERN, description=HF_TEXT)] | None = None
    pinned: Annotated[bool, Meta(description="in memory from the start, and stays, however many others are loaded")] = (
        False
    )
    scale: Annotated[
        float,
        Meta(
            ge=-16,
            le=16,
            description="how strongly it acts on calls that name no adapters, until POST /lora-adapters says "
            "otherwise; 0: on those that name it only",
        ),
    ] = 0.0
    price: Annotated[Rates, Meta(description="what calls cost that name it, in place of the model's price")] | None = (
        None
    )

    def __post_init__(self) -> None:
        if (self.path is None) == (self.hf is None):
            raise ValueError(
                "`adapters`: give exactly one source: `path` (a GGUF file) or `hf` (REPO[:QUANT][@REVISION])"
            )


class ChatDefaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a model's chats are rendered where a caller does not say."""

    thinking: Annotated[
        ThinkingMode | bool,
        Meta(
            description="whether the model thinks where a caller does not say; auto: as llama-server has it. In YAML "
            "a bare on is true, and means the same"
        ),
        as_setting("whether the model thinks where a caller does not say; auto: as llama-server has it"),
    ] = "auto"
    thinking_budget: Annotated[
        int,
        Meta(
            ge=-1,
            le=MAX_THINKING_BUDGET,
            description="most tokens of thought where a caller does not say, then it is closed for the model; -1: no "
            "bound; 0: at once",
        ),
    ] = -1
    thinking_budget_message: Annotated[
        str,
        Meta(
            max_length=MAX_BUDGET_MESSAGE_CHARS,
            description="what the model is made to say before its thought is closed at the budget, where a caller does "
            "not say",
        ),
    ] = ""
    chat_template_kwargs: Annotated[
        dict[str, Any],
        Meta(max_length=64, description="variables for the chat template where a caller does not set them"),
        as_setting("JSON object of variables for the chat template, where a caller does not set them"),
    ] = {}

    def __post_init__(self) -> None:
        if fault := kwargs_fault(self.chat_template_kwargs):
            raise ValueError(f"chat_template_kwargs: {fault}")

    @property
    def thinking_mode(self) -> ThinkingMode:
        """The `thinking` setting as a word: True is "on", False "off"."""
        if isinstance(self.thinking, bool):
            return "on" if self.thinking else "off"
        return self.thinking


NO_PROJECTOR = "none"
"""Value of `ModelSpec.projector` for a model that is to read text only."""


class ModelSpec(ChatDefaults, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One model: where it comes from, how much of it to run, how to sample when the caller does not say."""

    name: Name
    path: Annotated[str, Meta(min_length=1, description="GGUF file, relative to the catalog file")] | None = None
    hf: (
        Annotated[
            str,
            Meta(pattern=HF_PATTERN, description=HF_TEXT),
        ]
        | None
    ) = None
    projector: Annotated[
        str,
        Meta(
            max_length=4096,
            description="GGUF file (mmproj), relative to the catalog file, with which the model sees or hears; empty: "
            "the one beside a model of the hub, if there is one; none: pictures and sound are refused",
        ),
        as_setting(
            "GGUF file (mmproj) with which the model sees or hears; empty: the one beside a model of the hub, if there "
            "is one; none: pictures and sound are refused"
        ),
    ] = ""
    projector_on_gpu: Annotated[bool, Meta(description="compute the projector on the GPU, if there is one")] = True
    image_min_tokens: Annotated[
        int, Meta(ge=0, le=65536, description="least KV cells of a picture, where these vary; 0: as the projector says")
    ] = 0
    image_max_tokens: Annotated[
        int, Meta(ge=0, le=65536, description="most KV cells of a picture, where these vary; 0: as the projector says")
    ] = 0
    workers: Annotated[int, Meta(ge=0, le=256, description="worker processes on this machine")] = 1
    residency: (
        Annotated[
            Residency,
            Meta(
                description="when its workers load and leave; unset: all of its `workers` are there from the start "
                "until the end"
            ),
        ]
        | None
    ) = None
    slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS, description="conversations at once, per worker")] = 8
    ctx: Annotated[
        int,
        Meta(ge=0, le=MAX_CTX, description="longest single conversation, tokens; 0: what the model was trained for"),
    ] = 0
    kv_tokens: Annotated[
        int,
        Meta(
            ge=0, le=MAX_KV_TOKENS, description="KV cells that all slots share; 0: slots x ctx, reduced to fit memory"
        ),
    ] = 0
    gpus: Annotated[int, Meta(ge=1, le=16, description="GPUs that each worker gets, where `nvidia-smi` finds any")] = 1
    llama: Annotated[
        LlamaSettings, as_setting("JSON object of llama.cpp settings, fields as in the catalog's `llama`")
    ] = LlamaSettings()
    sampling: Annotated[
        DefaultSampling, as_setting("JSON object of default sampling, fields as in the catalog's `sampling`")
    ] = DefaultSampling()
    adapters: Annotated[
        tuple[AdapterSpec, ...],
        Meta(max_length=4096),
        as_setting("JSON list of LoRA adapters, known from the start; fields as in the catalog's `adapters`"),
    ] = ()
    """LoRA adapters, by names that are unique within the model."""
    speculation: Annotated[
        SpeculationSettings,
        as_setting("JSON object: where drafts of answers come from; fields as in the catalog's `speculation`"),
    ] = SpeculationSettings()
    tags: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=64)], ...],
        Meta(max_length=32, description="words that lists of models tell of it, as llama-server's `--tags`"),
    ] = ()
    price: Annotated[Rates, Meta(description="what calls cost where the price list has no price of it")] | None = None
    tool_family: Annotated[
        str,
        Meta(
            pattern=r"^[a-z0-9.-]{0,40}$",
            description="the form of the model's tool calls and thoughts (docs/tool-calls.md); empty: found by its "
            "chat template",
        ),
    ] = ""
    open_objects: Annotated[
        bool,
        Meta(
            description="objects of a schema that does not say which other keys there may be go on after the keys that "
            "it lists; off: they end there, as llama-server's do"
        ),
    ] = False
    chat_template: Annotated[
        str,
        Meta(
            max_length=32768,
            description="Jinja file, relative to the catalog file, the template itself, or a name that llama-server "
            "takes, such as chatml or llama3, in place of the model's; empty: the model's own",
        ),
        as_setting(
            "Jinja file, the template itself, or a name that llama-server takes, such as chatml, in place of the "
            "model's own; empty: the model's own"
        ),
    ] = ""
    shared_prompts: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(max_length=64, description="system prompts whose cached tokens all teams share, word for word"),
        as_setting("JSON list of system prompts that teams share cached, as in the catalog's `shared_prompts`"),
    ] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.residency and (told := "\n".join(own_faults(self.residency, self.workers))):
            raise ValueError(told)

    @property
    def policy(self) -> Residency:
        """Return the model's residency with `max` filled in, also if the catalog does not say one."""
        return resolve(self.residency, self.workers)


def is_template(text: str) -> bool:
    """Return whether a `chat_template` is a Jinja template, rather than a file's path or a built-in template's name."""
    return "{{" in text or "{%" in text


def kwargs_fault(values: Mapping[str, Any]) -> str:
    """Return what is wrong with a model's `chat_template_kwargs`; empty: nothing."""
    if taken := sorted(NOT_FOR_MODELS & values.keys()):
        return f"{taken[0]!r} is a request's to set, or a conversation's; leave it out"
    for name in ("enable_thinking", "thinking", "preserve_reasoning"):
        if not isinstance(values.get(name, True), bool):
            return f"{name!r} must be true or false"
    return ""
