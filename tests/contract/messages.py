"""One example of every message on the worker wire, by the name of its golden file."""

from __future__ import annotations

import struct

import msgspec

from tests.support.tools import tool_of
from workers.planner.messages import (
    MachineCatalog,
    MachineOrders,
    MachineReport,
    StartOrder,
    ToldFailure,
    ToldMemory,
    ToldModel,
    ToldWait,
    ToldWorker,
)
from workers.protocol.control import Leaving
from workers.protocol.events import (
    Failed,
    Failure,
    FailureCode,
    Finished,
    FinishReason,
    Logprobs,
    Progress,
    Reasoning,
    Started,
    Text,
    Timings,
    TimingsSoFar,
    TokenLogprob,
    Tokens,
    ToolCallDelta,
    Usage,
)
from workers.protocol.heartbeat import Heartbeat, Load, ModelFacts, News, encode_news, pack_heads
from workers.protocol.pooled import PoolPrompt, PoolRequest, PoolResult
from workers.protocol.prefixes import prefix_of
from workers.protocol.queries import (
    AdapterInfo,
    AdapterState,
    Detokenize,
    Detokenized,
    LoadAdapter,
    Props,
    Render,
    Rendered,
    RestoreTimings,
    SaveTimings,
    SlotAction,
    SlotErased,
    SlotInfo,
    SlotRestored,
    SlotSaved,
    Tokenize,
    Tokenized,
    packed,
)
from workers.protocol.requests import (
    Accepted,
    AdapterUse,
    Cancel,
    GenerateRequest,
    Medium,
    Message,
    Sampling,
    Submit,
    Thinking,
    ToolCall,
)
from workers.protocol.residency import GatewayDemand, MachineModels, ModelDemand, ModelState, Why
from workers.residency.picture import Device, Need, Share
from workers.residency.policy import Group, Residency

FAILURE = Failure(
    FailureCode.CONTEXT_OVERFLOW, "the prompt has 600 tokens, the context 512", "messages", 600, 512, "shorten it"
)
STARTED = Started(7, 3, 42, 16)
TEXT = Text(7, 'Grüße, "Welt"\n', 2)
LOGPROBS = Logprobs(
    7, TokenLogprob(313, b"\xc3", -0.25), (TokenLogprob(313, b"\xc3", -0.25), TokenLogprob(2, b"<|im_end|>", -2.5))
)
REASONING = Reasoning(7, "Let me see.\n", 4)
RAN_WITH = Sampling(temperature=0.5, samplers=("top_k", "temperature"), seed=4294967294)
PROGRESS = Progress(7, 42, 16, 32, 250)
TOKENS = Tokens(7, (313, 2))
TIMINGS_SO_FAR = TimingsSoFar(7, Timings(cache_n=16, prompt_n=26, prompt_ms=3.5, predicted_n=1, predicted_ms=0.0))
TOOL_CALL_BEGUN = ToolCallDelta(8, 0, "call_1f", "get_weather", "", 9)
TOOL_CALL_DELTA = ToolCallDelta(8, 0, "", "", '{"city":', 3)
FINISHED = Finished(
    7,
    FinishReason.STOP,
    Usage(prompt_tokens=42, completion_tokens=2, cached_tokens=16),
    Timings(cache_n=16, prompt_n=26, prompt_ms=3.5, predicted_n=2, predicted_ms=2.75),
    "\n\n",
)
FINISHED_FORETOLD = Finished(
    7,
    FinishReason.STOP,
    Usage(42, 30, 16, accepted_prediction_tokens=21, rejected_prediction_tokens=4),
    Timings(cache_n=16, prompt_n=26, prompt_ms=3.5, predicted_n=30, predicted_ms=8.5, draft_n=25, draft_n_accepted=21),
)
FAILED = Failed(9, FAILURE)

SUBMIT = Submit(
    gateway="gw-1",
    call=7,
    request=GenerateRequest(
        messages=(
            Message("system", "Be brief."),
            Message("user", "Weather in Köln?", name="ada"),
            Message("assistant", tool_calls=(ToolCall("call_1f", "get_weather", '{"city":"Köln"}'),)),
            Message("tool", "12 °C", tool_call_id="call_1f"),
        ),
        tools=(tool_of("get_weather", "Look it up", {"type": "object", "properties": {"city": {"type": "string"}}}),),
        sampling=Sampling(temperature=0.0, top_k=20, seed=4294967295),
        max_tokens=64,
        stop=("\n\n",),
        stop_tokens=(2, 7),
        min_tokens=3,
        ignore_eos=True,
    ),
    tenant="team-a",
    request_id="req-1",
)
SAMPLED_SUBMIT = Submit(
    gateway="gw-1",
    call=9,
    request=GenerateRequest(
        prompt=[1, 277, 15],
        sampling=Sampling(
            dynatemp_range=0.5,
            dry_multiplier=0.8,
            dry_sequence_breakers=("\n", "---"),
            mirostat=2,
            samplers=("top_k", "temperature"),
            logit_bias=((15, -1.5), (" cat", None)),
        ),
        n_probs=-1,
        cache_salt="mine",
        cache_prompt=False,
        priority=-3,
        context_shift=True,
        n_keep=-1,
        thinking=Thinking(enabled=True, effort="low", budget=256, split=False),
        max_predict_ms=2500,
        slot=3,
        tell=("progress", "timings", "tokens", "settings"),
    ),
    tenant="team-a",
    deadline=1700000000.5,
)
SMALLEST_SUBMIT = Submit(gateway="gw-1", call=1, request=GenerateRequest(messages=(Message("user", "hi"),)), tenant="t")

SEEING_SUBMIT = Submit(
    gateway="gw-1",
    call=10,
    request=GenerateRequest(
        messages=(Message("user", "What is this?", media=(0, 13)),),
        media=(
            Medium("picture", b"\x89PNG", "messages.0.content.0", b"\x01\x02"),
            Medium("sound", b"RIFF", "messages.0.content.2", b"\x03\x04"),
        ),
    ),
    tenant="team-a",
)

SUBMIT_ADAPTERS = msgspec.structs.replace(
    SMALLEST_SUBMIT,
    request=GenerateRequest(
        messages=(Message("user", "hi"),), adapters=(AdapterUse("team/pirate"), AdapterUse("calm", -0.5))
    ),
)
ADAPTER_INFO = AdapterInfo(
    name="team/pirate",
    sha256="ab" * 32,
    size=151072,
    rank=8,
    state=AdapterState.KNOWN,
    pinned=False,
    calls=0,
    path="team/pirate.gguf",
)

LOAD = Load(
    slots_busy=2,
    waiting=1,
    kv_tokens_used=130,
    backlog_tokens=900,
    free_in_ms=412.0,
    prefill_ms=0.21,
    decode_ms=12.5,
    hold_ms=2300.0,
    answer_tokens=180.0,
    bytes_per_token=3.9,
    preempted=3,
)
HEARTBEAT = Heartbeat(
    worker="w-1",
    boot="0badcafe",
    model="demo",
    address="http://127.0.0.1:9001",
    slots=8,
    slots_busy=2,
    n_ctx=512,
    kv_tokens=4096,
    kv_tokens_used=130,
    facts=ModelFacts(n_ctx_train=512, n_params=2400000, size=4800000, n_vocab=768),
    draining=True,
    reserved=True,
    started_at=1700000000.5,
    infill=True,
    adapters=("team/pirate",),
    adapter_hashes={"team/pirate": "ab" * 32},
    adapters_resident=("team/pirate",),
    adapter_load_ms=19.5,
    adapter_room=7,
    overdraft=8,
    cache_ram_bytes=5 << 20,
    cache_disk_bytes=7 << 20,
    fingerprint="fp_0123456789abcdef",
    load=LOAD,
    version=17,
)
NEWS = News(
    model="demo",
    worker="w-1",
    boot="0badcafe",
    version=17,
    load=LOAD,
    draining=True,
    added={0xFEDCBA9876543210: 512, 3: 40},
    dropped=(0x0123456789ABCDEF,),
)
HEADS = {0xFEDCBA9876543210: 512, 3: 40}
BINARIES = {"news.msgpack": encode_news(NEWS), "heads.bin": pack_heads(17, HEADS)}
"""What lies in Redis and is no JSON."""
CHAT = (
    Message("system", "Answer with what you know of fields, fences and the weather. " * 3),
    Message("user", "What is a paddock? Tell me in one sentence, please, and name two things in it."),
    Message("assistant", "A fenced field: grass and a gate.", tool_calls=(ToolCall("c", "look", '{"at": "gate"}'),)),
)
PREFIXES = {
    "prompt": prefix_of(GenerateRequest(prompt="once upon a time " * 100), "team-a", {}),
    "chat": prefix_of(GenerateRequest(messages=CHAT), "team-a", {}),
    "pictures": prefix_of(SEEING_SUBMIT.request, "team-a", {}),
    "salted_with_adapter": prefix_of(
        GenerateRequest(messages=CHAT, cache_salt="mine", adapters=(AdapterUse("team/pirate", 0.5),)),
        "team-a",
        {"team/pirate": "ab" * 32},
    ),
}
"""What gateways and workers of all versions that talk to each other make of these requests."""

POOL_REQUEST = PoolRequest(
    kind="rank",
    query="what is a paddock?",
    inputs=("a field", "Köln"),
    normalize=-1,
    tenant="team-a",
    request_id="req-2",
)
SMALLEST_POOL_REQUEST = PoolRequest(inputs=("hi", [101, 7592, 102]))
SEEING_POOL_REQUEST = PoolRequest(
    inputs=(
        "hi",
        PoolPrompt(text="see , hear ", media=(4, 11)),
        PoolPrompt(messages=(Message("user", "What is this?", media=(0,)),), template_values='{"a":1}'),
    ),
    media=(
        Medium("picture", b"\x89PNG", "input.1.multimodal_data.0", b"\x01\x02"),
        Medium("sound", b"RIFF", "input.1.multimodal_data.1", b"\x03\x04"),
        Medium("picture", b"\x89PNG", "messages.0.content.0", b"\x01\x02"),
    ),
    cache_salt="mine",
    tenant="team-a",
)
POOL_RESULT = PoolResult(
    pooling="mean", width=2, rows=(1, 1), num_tokens=(4, 3), vectors=struct.pack("<4f", 0.6, -0.8, 1.0, 0.0)
)

MESSAGES = {
    "submit.json": SUBMIT,
    "submit_smallest.json": SMALLEST_SUBMIT,
    "submit_sampled.json": SAMPLED_SUBMIT,
    "submit_seeing.json": SEEING_SUBMIT,
    "accepted.json": Accepted("0badcafe", 42),
    "accepted_told.json": Accepted("0badcafe", 42, "<s>Grüße", RAN_WITH),
    "cancel.json": Cancel("gw-1", (7, 8)),
    "leaving.json": Leaving(boot="0badcafe", num_calls=3),
    "failure.json": FAILURE,
    "failure_smallest.json": Failure(FailureCode.BUSY, "all slots are taken"),
    "event_started.json": STARTED,
    "event_text.json": TEXT,
    "event_logprobs.json": LOGPROBS,
    "event_reasoning.json": REASONING,
    "event_progress.json": PROGRESS,
    "event_tokens.json": TOKENS,
    "event_timings_so_far.json": TIMINGS_SO_FAR,
    "event_tool_call_begun.json": TOOL_CALL_BEGUN,
    "event_tool_call_delta.json": TOOL_CALL_DELTA,
    "event_finished.json": FINISHED,
    "event_finished_foretold.json": FINISHED_FORETOLD,
    "event_finished_truncated.json": msgspec.structs.replace(FINISHED, stop=None, truncated=True),
    "event_failed.json": FAILED,
    "heartbeat.json": HEARTBEAT,
    "heartbeat_embed.json": msgspec.structs.replace(HEARTBEAT, kind="embed", width=768),
    "pool_request.json": POOL_REQUEST,
    "pool_request_smallest.json": SMALLEST_POOL_REQUEST,
    "gateway_demand.json": GatewayDemand(
        at=1700000000.5,
        models={
            "wanted": ModelDemand(num_waiting=2, oldest_at=1700000000.25, predicted_wait_s=1.5),
            "elsewhere": ModelDemand(num_elsewhere=2, oldest_at=1700000000.25),
            "used": ModelDemand(num_running=3, used_at=1699999999.75),
        },
    ),
    "machine_models.json": MachineModels(
        at=1700000000.5,
        models={
            "loaded": ModelState(status="loaded"),
            "coming": ModelState(status="loading", progress=0.25, why=Why.of("2 calls wait for coming")),
            "broken": ModelState(status="failed", why=Why.of("out of memory"), retry_at=1700000005.5),
            "large": ModelState(
                status="unloaded", why=Why.of("no machine has the memory"), is_hopeless=True, is_closed=True
            ),
        },
        wanted={"loaded": 2, "coming": 1, "large": 1},
    ),
    "machine_report.json": MachineReport(
        at=1700000000.5,
        boot="0badcafe",
        fence=7,
        done=2,
        catalog="0123456789abcdef",
        devices=(Device("cpu", 1 << 36, 1 << 35, 1 << 30),),
        workers=(
            ToldWorker(
                id="host1/7.2",
                model="coder",
                shares=(Share("cpu", 1 << 32),),
                status="ready",
                since=1699999990.5,
                last_used=1699999999.5,
                num_running=1,
            ),
        ),
        failures={"broken": ToldFailure(not_before=1700000005.5, why=Why.of("out of memory"))},
        loaded=("coder",),
        left={"small": 1699999980.5},
    ),
    "machine_catalog.json": MachineCatalog(
        models={
            "coder": ToldModel(
                policy=Residency(max=2, group="large"),
                need=Need(cpu_bytes=1 << 32),
                memory=ToldMemory(weights=4000, cells=300, compute=20, other=100, host=4420, growth=9, taken_host=4321),
            ),
            "new": ToldModel(policy=Residency(max=1)),
        },
        groups={"large": Group(at_once=1)},
        models_max=2,
    ),
    "machine_orders.json": MachineOrders(
        at=1700000000.5,
        fence=7,
        planner="host2",
        boot="0badcafe",
        starts=(
            StartOrder(
                number=3,
                worker="host1/7.3",
                model="small",
                shares=(Share("cpu", 1 << 30),),
                why=Why.of("1 call waits for ", ("small",), ", the oldest for 0.1 s"),
            ),
        ),
        leaving={"host1/7.2": Why.of("idle for 9 s, it leaves for ", ("small",))},
        waits={"large": ToldWait(reason="too_large", why=Why.of("no machine has the memory"))},
    ),
    "pool_request_seeing.json": SEEING_POOL_REQUEST,
    "pool_result.json": POOL_RESULT,
    "submit_adapters.json": SUBMIT_ADAPTERS,
    "load_adapter.json": LoadAdapter(name="team/pirate", path="pirate.gguf", pinned=True, sha256="ab" * 32, check=True),
    "load_adapter_smallest.json": LoadAdapter(name="pirate", path="pirate.gguf"),
    "adapter_info.json": ADAPTER_INFO,
    "slot_info.json": SlotInfo(
        id=1,
        n_ctx=512,
        is_processing=True,
        n_prompt_tokens=42,
        n_decoded=7,
        n_remain=5,
        request_id="req-1",
        tenant="team-a",
    ),
    "slot_action.json": SlotAction(
        action="restore", tenant="team-a", filename="chat.bin", salt="mine", adapters=(AdapterUse("team/pirate", 0.5),)
    ),
    "slot_action_limited.json": SlotAction(
        action="save", tenant="team-a", filename="chat.bin", max_files=3, max_bytes=1 << 30
    ),
    "slot_action_smallest.json": SlotAction(action="erase", tenant="team-a"),
    "slot_saved.json": SlotSaved(
        id_slot=1, filename="chat.bin", n_saved=1745, n_written=14309796, n_left=3, timings=SaveTimings(49.875)
    ),
    "slot_restored.json": SlotRestored(
        id_slot=1, filename="chat.bin", n_restored=1745, n_read=14309796, timings=RestoreTimings(42.5)
    ),
    "slot_erased.json": SlotErased(id_slot=1, n_erased=1745),
    "tokenize.json": Tokenize(content=["Köln", 15], add_special=True, parse_special=False, with_pieces=True),
    "tokenize_smallest.json": Tokenize(content="hi"),
    "tokenized.json": Tokenized(ids=packed((1, 313)), pieces=(b"<s>", b"\xc3")),
    "tokenized_bare.json": Tokenized(ids=packed((1, 313))),
    "detokenize.json": Detokenize(tokens=(1, 313)),
    "detokenized.json": Detokenized(content="Köln"),
    "render.json": Render(request=SMALLEST_SUBMIT.request, text=False),
    "render_smallest.json": Render(request=SMALLEST_SUBMIT.request),
    "rendered.json": Rendered(prompt="<|user|>hi", num_tokens=4),
    "props.json": Props(
        kind="generate",
        model="demo",
        slots=8,
        n_ctx=512,
        facts=HEARTBEAT.facts,
        model_file="demo.gguf",
        architecture="llama",
        ftype="Q8_0",
        n_embd=128,
        vocab_type=2,
        bos_token="<s>",
        eos_token="</s>",
        chat_templates={"default": "{{ messages }}"},
        chat_template_caps={"supports_tools": True},
        has_infill=False,
        input_modalities=("text",),
        build_info="llama-cpp-python 0.3.36",
        sampling=Sampling(temperature=0.8, samplers=("top_k", "temperature")),
    ),
}
