"""Declares which options of llama-server have a counterpart in a catalog, and what stands for the others.

Source: `llama-server --help` of the llama.cpp that the bindings carry, and names that its older versions had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Kind = Literal["int", "float", "text", "on", "off"]
"""How an option's value is read; `on` and `off` are switches that set a field to true or false."""

LLAMA: Mapping[str, tuple[str, Kind]] = {
    "-b": ("n_batch", "int"), "--batch-size": ("n_batch", "int"),
    "-ub": ("n_ubatch", "int"), "--ubatch-size": ("n_ubatch", "int"),
    "-mg": ("main_gpu", "int"), "--main-gpu": ("main_gpu", "int"),
    "-ncmoe": ("n_cpu_moe", "int"), "--n-cpu-moe": ("n_cpu_moe", "int"),
    "-sm": ("split_mode", "text"), "--split-mode": ("split_mode", "text"),
    "-ctk": ("cache_type_k", "text"), "--cache-type-k": ("cache_type_k", "text"),
    "-ctv": ("cache_type_v", "text"), "--cache-type-v": ("cache_type_v", "text"),
    "-cmoe": ("cpu_moe", "on"), "--cpu-moe": ("cpu_moe", "on"),
    "-nkvo": ("offload_kqv", "off"), "--no-kv-offload": ("offload_kqv", "off"),
    "--no-op-offload": ("op_offload", "off"),
    "-nr": ("use_extra_bufts", "off"), "--no-repack": ("use_extra_bufts", "off"),
    "--no-host": ("no_host", "on"),
    "--no-mmap": ("use_mmap", "off"), "--mlock": ("use_mlock", "on"),
    "--swa-full": ("swa_full", "on"), "--spm-infill": ("spm_infill", "on"),
    "--check-tensors": ("check_tensors", "on"),
    "--rope-scaling": ("rope_scaling", "text"), "--numa": ("numa", "text"), "--pooling": ("pooling", "text"),
    "--rope-freq-base": ("rope_freq_base", "float"), "--rope-freq-scale": ("rope_freq_scale", "float"),
    "--yarn-orig-ctx": ("yarn_orig_ctx", "int"), "--yarn-ext-factor": ("yarn_ext_factor", "float"),
    "--yarn-attn-factor": ("yarn_attn_factor", "float"), "--yarn-beta-slow": ("yarn_beta_slow", "float"),
    "--yarn-beta-fast": ("yarn_beta_fast", "float"),
    "--embedding": ("embeddings", "on"), "--embeddings": ("embeddings", "on"),
    "-Cr": ("cpus", "text"), "--cpu-range": ("cpus", "text"),
}  # fmt: skip
"""Option -> field of the catalog's `llama`."""

SAMPLING: Mapping[str, tuple[str, Kind]] = {
    "--temp": ("temperature", "float"), "--temperature": ("temperature", "float"),
    "--top-k": ("top_k", "int"), "--top-p": ("top_p", "float"), "--min-p": ("min_p", "float"),
    "--top-nsigma": ("top_n_sigma", "float"), "--top-n-sigma": ("top_n_sigma", "float"),
    "--xtc-probability": ("xtc_probability", "float"), "--xtc-threshold": ("xtc_threshold", "float"),
    "--typical": ("typical_p", "float"), "--typical-p": ("typical_p", "float"),
    "--repeat-last-n": ("repeat_last_n", "int"), "--repeat-penalty": ("repeat_penalty", "float"),
    "--presence-penalty": ("presence_penalty", "float"), "--frequency-penalty": ("frequency_penalty", "float"),
    "--dry-multiplier": ("dry_multiplier", "float"), "--dry-base": ("dry_base", "float"),
    "--dry-allowed-length": ("dry_allowed_length", "int"), "--dry-penalty-last-n": ("dry_penalty_last_n", "int"),
    "--dynatemp-range": ("dynatemp_range", "float"), "--dynatemp-exp": ("dynatemp_exponent", "float"),
    "--mirostat": ("mirostat", "int"), "--mirostat-lr": ("mirostat_eta", "float"),
    "--mirostat-ent": ("mirostat_tau", "float"),
    "--adaptive-target": ("adaptive_target", "float"), "--adaptive-decay": ("adaptive_decay", "float"),
    "-s": ("seed", "int"), "--seed": ("seed", "int"),
}  # fmt: skip
"""Option -> field of the catalog's `sampling`."""

MODEL: Mapping[str, tuple[str, Kind]] = {
    "-m": ("path", "text"), "--model": ("path", "text"),
    "-np": ("slots", "int"), "--parallel": ("slots", "int"),
    "-mm": ("projector", "text"), "--mmproj": ("projector", "text"),
    "--no-mmproj-offload": ("projector_on_gpu", "off"),
    "--image-min-tokens": ("image_min_tokens", "int"), "--image-max-tokens": ("image_max_tokens", "int"),
    "--chat-template": ("chat_template", "text"), "--chat-template-file": ("chat_template", "text"),
    "-rea": ("thinking", "text"), "--reasoning": ("thinking", "text"),
    "--reasoning-budget": ("thinking_budget", "int"),
    "--reasoning-budget-message": ("thinking_budget_message", "text"),
}  # fmt: skip
"""Option -> field of the model."""

UNNEEDED = frozenset(
    {
        *("--host", "--port", "--reuse-port", "-a", "--alias", "--jinja", "--metrics", "--props", "--slots"),
        *("--no-slots", "--webui", "--no-webui", "--ui", "--no-ui", "-cb", "--cont-batching", "--warmup"),
        *("--no-warmup", "-to", "--timeout", "--threads-http", "--cache-prompt", "--cache-reuse", "--log-disable"),
        *("--log-file", "--log-colors", "--log-prefix", "--log-timestamps", "-v", "--verbose", "--log-verbose"),
        *("-lv", "--verbosity", "--no-perf", "-kvu", "--kv-unified", "-fit", "--fit", "-fitt", "--fit-target"),
        *("-fitc", "--fit-ctx", "--mmproj-auto", "--mmproj-offload", "--kv-offload", "--repack", "--op-offload"),
        *("--mmap", "-sps", "--slot-prompt-similarity", "--no-context-shift", "-ctxcp", "--ctx-checkpoints"),
        *("--swa-checkpoints", "-cms", "--checkpoint-min-step", "--sse-ping-interval", "--prio", "--poll"),
        *("--cache-idle-slots", "--no-cache-idle-slots", "-dt", "--defrag-thold", "--list-devices"),
    }
)
"""Options that a catalog needs no field for: gateways and workers do that by themselves, or always."""

WITH_VALUE = frozenset(
    {
        *("--host", "--port", "-a", "--alias", "-to", "--timeout", "--threads-http", "--cache-reuse", "--log-file"),
        *("--log-colors", "-lv", "--verbosity", "-fit", "--fit", "-fitt", "--fit-target", "-fitc", "--fit-ctx"),
        *("-sps", "--slot-prompt-similarity", "-ctxcp", "--ctx-checkpoints", "--swa-checkpoints", "-cms"),
        *("--checkpoint-min-step", "--sse-ping-interval", "--prio", "--poll", "-dt", "--defrag-thold"),
    }
)
"""Those of `UNNEEDED` that take a value."""

INSTEAD: Mapping[str, str] = {
    "--api-key": "callers' keys are made by `paddock keys create`",
    "--api-key-file": "callers' keys are made by `paddock keys create`",
    "--ssl-key-file": "the gateway has the setting tls_key",
    "--ssl-cert-file": "the gateway has the setting tls_cert",
    "--slot-save-path": "set slot_save_dir for the machine",
    "-cram": "set cache_ram_mib for the machine's workers",
    "--cache-ram": "set cache_ram_mib for the machine's workers",
    "-n": "bound answers by `max_tokens` of a team's or key's limits",
    "--predict": "bound answers by `max_tokens` of a team's or key's limits",
    "--n-predict": "bound answers by `max_tokens` of a team's or key's limits",
    "--context-shift": "callers ask for it with `context_shift`",
    "-mu": "fetch the file and name it with `path`",
    "--model-url": "fetch the file and name it with `path`",
    "-hft": "set HF_TOKEN in the environment of `paddock up`",
    "--hf-token": "set HF_TOKEN in the environment of `paddock up`",
    "--grammar": "callers send a grammar with the call",
    "--grammar-file": "callers send a grammar with the call",
    "-j": "callers send a schema with the call",
    "--json-schema": "callers send a schema with the call",
    "-C": "name the cores with `llama.cpus`",
    "--cpu-mask": "name the cores with `llama.cpus`",
    "--rpc": "other machines run workers of their own: `paddock supervisor` there",
    "--sleep-idle-seconds": "set `residency.ttl_s`",
    "--api-prefix": "set it in the proxy before the gateway",
    "--reasoning-format": "callers say it with `reasoning_format`",
    "--offline": "set `offline`, or HF_HUB_OFFLINE, for the machine",
}
"""Option without a field of its own -> what does that in Paddock."""

VARIABLES: Mapping[str, str] = {
    "LLAMA_ARG_MODEL": "-m", "LLAMA_ARG_HF_REPO": "-hf", "LLAMA_ARG_HF_FILE": "-hff", "LLAMA_ARG_CTX_SIZE": "-c",
    "LLAMA_ARG_N_PARALLEL": "-np", "LLAMA_ARG_N_GPU_LAYERS": "-ngl", "LLAMA_ARG_THREADS": "-t",
    "LLAMA_ARG_BATCH": "-b", "LLAMA_ARG_UBATCH": "-ub", "LLAMA_ARG_FLASH_ATTN": "-fa", "LLAMA_ARG_MMPROJ": "-mm",
    "LLAMA_ARG_CACHE_TYPE_K": "-ctk", "LLAMA_ARG_CACHE_TYPE_V": "-ctv", "LLAMA_ARG_SPLIT_MODE": "-sm",
    "LLAMA_ARG_TENSOR_SPLIT": "-ts", "LLAMA_ARG_MAIN_GPU": "-mg", "LLAMA_ARG_N_CPU_MOE": "-ncmoe",
    "LLAMA_ARG_THINK_BUDGET": "--reasoning-budget", "LLAMA_ARG_CHAT_TEMPLATE": "--chat-template",
}  # fmt: skip
"""Variable that llama-server reads -> the option that it stands for."""
