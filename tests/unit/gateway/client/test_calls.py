"""What each call sends, and what it makes of the answer, over a real socket; answers as the servers write them."""

from __future__ import annotations

import inspect
import mimetypes
from pathlib import Path
from typing import Any

import pytest

from gateway.client import (
    AsyncClient,
    Client,
    LoraScale,
    Message,
    StopType,
    file_part,
    picture_part,
    sound_part,
)
from gateway.client.answers import FunctionCall, ToolCall
from tests.support.scripted_server import ScriptedServer
from tests.support.sent_media import MP3, PNG, base64_of, data_url
from tests.unit.gateway.client.conftest import KEY

TIMINGS = {
    "cache_n": 3,
    "prompt_n": 5,
    "prompt_ms": 9.5,
    "predicted_n": 2,
    "predicted_ms": 4,
    "predicted_per_second": 500,
}
CHAT = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1757141666,
    "model": "m",
    "new_in_next_year": {"a": 1},
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "logprobs": {"content": [{"token": "a", "id": 5, "logprob": -0.5, "bytes": [97], "top_logprobs": []}]},
            "message": {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "reasoning_content": "hm",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
                ],
            },
        }
    ],
    "usage": {
        "prompt_tokens": 8,
        "completion_tokens": 2,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 3},
    },
    "timings": TIMINGS,
}
COMPLETION = {
    "index": 0,
    "content": " a time",
    "tokens": [5, 6],
    "id_slot": 1,
    "stop": True,
    "model": "m",
    "tokens_predicted": 2,
    "tokens_evaluated": 3,
    "generation_settings": {"seed": 7, "samplers": ["top_k"]},
    "prompt": "<s>Once upon",
    "has_new_line": False,
    "truncated": False,
    "stop_type": "word",
    "stopping_word": ".",
    "tokens_cached": 4,
    "timings": TIMINGS,
    "completion_probabilities": [{"id": 5, "token": " a", "bytes": [32, 97], "prob": 0.5, "top_probs": [{"id": 6}]}],
}


def test_a_chat(server: ScriptedServer, client: Client) -> None:
    server.says(CHAT)
    answer = client.chat.completions.create(
        [{"role": "user", "content": "hi"}], model="m", temperature=0, top_k=None, extra_body={"odd": 1}
    )
    assert answer.choices[0].message.tool_calls == (ToolCall("c1", "function", FunctionCall("f", '{"a":1}')),)
    assert answer.choices[0].message.reasoning_content == "hm"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert answer.choices[0].logprobs.content[0].logprob == -0.5
    assert answer.usage is not None
    assert (answer.usage.total_tokens, answer.usage.cached_tokens) == (10, 3)
    assert answer.timings is not None
    assert answer.timings.predicted_per_second == 500
    assert answer.text == ""
    (asked,) = server.asked
    assert (asked.method, asked.path) == ("POST", "/v1/chat/completions")
    assert asked.json == {"messages": [{"role": "user", "content": "hi"}], "model": "m", "temperature": 0, "odd": 1}
    assert asked.headers["authorization"] == f"Bearer {KEY}"
    assert asked.headers["content-type"] == "application/json"


def test_an_answer_goes_back_as_a_turn(server: ScriptedServer, client: Client) -> None:
    server.says(CHAT)
    message = client.chat.completions.create([Message("user", "hi")]).choices[0].message
    client.chat.completions.create([message, {"role": "tool", "tool_call_id": "c1", "content": "2"}])
    assert server.asked[0].json["messages"] == [{"role": "user", "content": "hi"}]
    assert server.asked[1].json["messages"][0] == {
        "role": "assistant",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}],
    }


def test_a_completion(server: ScriptedServer, client: Client) -> None:
    server.says({**COMPLETION, "lifted/field": 3, "stop_type": "word"})
    answer = client.complete("Once upon", n_predict=2, stop=["."], lora=[LoraScale(0, 0.5)], samplers="kt")
    assert (answer.content, answer.tokens, answer.stop_type, answer.stopping_word) == (
        " a time",
        (5, 6),
        StopType.WORD,
        ".",
    )
    assert answer.generation_settings["seed"] == 7
    assert answer.completion_probabilities is not None
    assert answer.completion_probabilities[0].prob == 0.5
    assert answer.extra == {"lifted/field": 3}
    assert server.asked[0].path == "/completion"
    assert server.asked[0].json == {
        "prompt": "Once upon",
        "n_predict": 2,
        "stop": ["."],
        "lora": [{"id": 0, "scale": 0.5}],
        "samplers": "kt",
    }
    assert client.simple_completion([1, "two", 3]) == " a time"
    assert server.asked[1].json == {"prompt": [1, "two", 3]}


def test_an_unknown_way_to_stop_is_no_error(server: ScriptedServer, client: Client) -> None:
    server.says({"content": "x", "stop_type": "bored"})
    assert client.complete("x").stop_type is StopType.OTHER


def test_many_completions(server: ScriptedServer, client: Client) -> None:
    server.says([COMPLETION, {**COMPLETION, "index": 1}], COMPLETION)
    assert [one.index for one in client.complete_many(["a", [1, 2]], n_cmpl=1)] == [0, 1]
    assert server.asked[0].json == {"prompt": ["a", [1, 2]], "n_cmpl": 1}
    assert len(client.complete_many(["a"])) == 1


def test_infill(server: ScriptedServer, client: Client) -> None:
    server.says(COMPLETION)
    client.infill("def f(", "return 1", input_extra=[{"filename": "a.py", "text": "x"}], n_predict=4)
    assert server.asked[0].path == "/infill"
    assert server.asked[0].json == {
        "input_prefix": "def f(",
        "input_suffix": "return 1",
        "input_extra": [{"filename": "a.py", "text": "x"}],
        "n_predict": 4,
    }


def test_embeddings(server: ScriptedServer, client: Client) -> None:
    usage = {"prompt_tokens": 4, "total_tokens": 4}
    packed = {"embedding": "AACAPwAAAMA=", "index": 1, "object": "embedding", "encoding_format": "base64"}
    server.says(
        {"object": "list", "model": "e", "usage": usage, "data": [{"embedding": [1, -2.0], "index": 0}, packed]},
        [{"index": 0, "embedding": [[0.5, 1]]}],
        {"object": "list", "model": "e", "usage": usage, "data": []},
    )
    answer = client.embeddings.create(["a", "b"], model="e", encoding_format="float")
    assert [one.vector for one in answer.data] == [(1.0, -2.0), (1.0, -2.0)]
    assert server.asked[0].json == {"input": ["a", "b"], "model": "e", "encoding_format": "float"}
    (own,) = client.embed("a", embd_normalize=-1)
    assert own.vector == (0.5, 1.0)
    assert (server.asked[1].path, server.asked[1].json) == ("/embedding", {"content": "a", "embd_normalize": -1})
    part = picture_part(b"\x89PNG\r\n\x1a\n")
    client.embeddings.create(messages=[{"role": "user", "content": [part]}])
    assert server.asked[2].json == {"messages": [{"role": "user", "content": [part]}]}


def test_ranks(server: ScriptedServer, client: Client) -> None:
    results = [{"index": 1, "relevance_score": 2.5}, {"index": 0, "relevance_score": -3}]
    server.says({"model": "r", "object": "list", "usage": {"prompt_tokens": 9, "total_tokens": 9}, "results": results})
    answer = client.rerank("panda?", ["hi", "a bear"], top_n=2)
    assert [(one.index, one.relevance_score) for one in answer.results] == [(1, 2.5), (0, -3.0)]
    assert server.asked[0].path == "/v1/rerank"
    assert server.asked[0].json == {"query": "panda?", "documents": ["hi", "a bear"], "top_n": 2}


def test_tokens(server: ScriptedServer, client: Client) -> None:
    server.says(
        {"tokens": [1, 2]},
        {"tokens": [{"id": 198, "piece": [195]}, {"id": 9, "piece": "Hi"}]},
        {"tokens": []},
        {"content": "hello"},
    )
    plain = client.tokenize("á", model="m", add_special=True)
    assert (plain.tokens, plain.pieces) == ((1, 2), None)
    assert server.asked[0].json["add_special"] is True
    pieces = client.tokenize("á", with_pieces=True)
    assert (pieces.tokens, pieces.pieces) == ((198, 9), (b"\xc3", "Hi"))
    assert client.tokenize("").tokens == ()
    assert client.detokenize([1, 2]) == "hello"
    assert server.asked[3].json == {"tokens": [1, 2]}


def test_a_rendered_template(server: ScriptedServer, client: Client) -> None:
    server.says({"prompt": "<|user|>hi"})
    assert (
        client.apply_template([Message("user", "hi")], chat_template_kwargs={"enable_thinking": False}) == "<|user|>hi"
    )
    assert server.asked[0].path == "/apply-template"
    assert server.asked[0].json == {
        "messages": [{"role": "user", "content": "hi"}],
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_models(server: ScriptedServer, client: Client) -> None:
    bare = {"id": "../a.gguf", "object": "model", "created": 1, "owned_by": "llamacpp", "meta": None, "tags": []}
    full = {
        "id": "b",
        "meta": {"n_ctx": 512, "n_params": 7},
        "status": {"value": "loading", "args": ["x"]},
        "workers": 2,
    }
    server.says({"object": "list", "data": [bare, full], "models": []}, full, {"success": True}, {"success": True})
    first, second = client.models.list()
    assert (first.id, first.meta, second.workers) == ("../a.gguf", None, 2)
    assert second.status is not None
    assert second.status.value == "loading"
    assert client.models.retrieve("org/b:Q4").id == "b"
    client.models.load("b")
    client.models.unload("b")
    assert [(one.method, one.path) for one in server.asked] == [
        ("GET", "/v1/models"),
        ("GET", "/v1/models/org/b%3AQ4"),
        ("POST", "/models/load"),
        ("POST", "/models/unload"),
    ]
    assert server.asked[2].json == {"model": "b"}


def test_models_are_downloaded_and_removed(server: ScriptedServer, client: Client) -> None:
    server.says({"success": True}, {"success": True}, {"success": True}, {"success": True})
    client.models.download("org/b:Q4")
    client.models.download("org/b:Q4", machine="left")
    client.models.remove("org/b:Q4")
    client.models.remove("org/b:Q4", machine="left")
    assert [(one.method, one.path, one.query) for one in server.asked] == [
        ("POST", "/models", {}),
        ("POST", "/models", {}),
        ("DELETE", "/models", {"model": "org/b:Q4"}),
        ("DELETE", "/models", {"model": "org/b:Q4", "machine": "left"}),
    ]
    assert [one.json for one in server.asked[:2]] == [{"model": "org/b:Q4"}, {"model": "org/b:Q4", "machine": "left"}]


def test_slots(server: ScriptedServer, client: Client) -> None:
    next_token = {"has_next_token": True, "n_remain": -1, "n_decoded": 4}
    busy = {"id": 1, "id_task": 135, "n_ctx": 512, "is_processing": True, "params": {"top_k": 4}, "speculative": False}
    server.says([{**busy, "next_token": [next_token]}, {**busy, "next_token": next_token}, {"id": 2, "n_ctx": 512}])
    found = client.slots.list(model="m", fail_on_no_slot=True)
    assert [slot.is_processing for slot in found] == [True, True, False]
    assert server.asked[0].query == {"model": "m", "fail_on_no_slot": "1"}
    server.says({"id_slot": 1, "filename": "a.bin", "n_saved": 17, "n_written": 99, "timings": {"save_ms": 4.5}})
    assert client.slots.save(1, "a.bin").n_saved == 17
    server.says({"id_slot": 1, "filename": "a.bin", "n_restored": 17, "n_read": 99, "timings": {"restore_ms": 4}})
    assert client.slots.restore(1, "a.bin").n_read == 99
    server.says({"id_slot": 1, "n_erased": 17})
    assert client.slots.erase(1, model="m").n_erased == 17
    assert [(one.path, one.query, one.json) for one in server.asked[1:]] == [
        ("/slots/1", {"action": "save"}, {"filename": "a.bin"}),
        ("/slots/1", {"action": "restore"}, {"filename": "a.bin"}),
        ("/slots/1", {"action": "erase", "model": "m"}, {"model": "m"}),
    ]


def test_adapters(server: ScriptedServer, client: Client) -> None:
    server.says([{"id": 0, "path": "a.gguf", "scale": 1, "task_name": "", "prompt_prefix": ""}])
    (adapter,) = client.lora.list(model="m")
    assert (adapter.id, adapter.path, adapter.scale) == (0, "a.gguf", 1.0)
    server.says({"success": True})
    client.lora.set_scales([LoraScale(0, 0.2), {"id": 1, "scale": 0.8}], model="m")
    assert server.asked[1].json == [{"id": 0, "scale": 0.2}, {"id": 1, "scale": 0.8}]
    assert (server.asked[1].path, server.asked[1].query) == ("/lora-adapters", {"model": "m"})
    client.lora.load("pirate", "pirate.gguf")
    client.lora.unload("pirate")
    assert [(one.path, one.json) for one in server.asked[2:]] == [
        ("/v1/load_lora_adapter", {"lora_name": "pirate", "lora_path": "pirate.gguf"}),
        ("/v1/unload_lora_adapter", {"lora_name": "pirate"}),
    ]


def test_properties_and_metrics(server: ScriptedServer, client: Client) -> None:
    server.says({"total_slots": 4, "default_generation_settings": {"n_ctx": 512}, "modalities": {"vision": False}})
    assert client.props(model="a/b").total_slots == 4
    assert server.asked[0].query == {"model": "a/b"}
    client.set_props({"chat_template": "x"}, model="m")
    assert server.asked[1].json == {"chat_template": "x", "model": "m"}
    assert "total_slots" in client.metrics()
    assert server.asked[2].path == "/metrics"


async def test_tasks_have_the_same_calls(server: ScriptedServer, async_client: AsyncClient) -> None:
    server.says({"tokens": [4]})
    assert (await async_client.tokenize("a", with_pieces=False)).tokens == (4,)
    server.says(CHAT)
    answer = await async_client.chat.completions.create([Message("user", "hi")], max_tokens=3)
    assert answer.choices[0].finish_reason == "tool_calls"
    server.says(COMPLETION)
    assert (await async_client.complete("x")).content == await async_client.simple_completion("x") == " a time"
    server.says({"id_slot": 1, "n_erased": 17})
    assert (await async_client.slots.erase(1)).n_erased == 17


def public(one: object) -> dict[str, Any]:
    return {name: getattr(one, name) for name in dir(one) if not name.startswith("_")}


def test_both_clients_have_the_same_methods_with_the_same_keywords(client: Client) -> None:
    def shape(one: object) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in public(one).items():
            found[name] = [*inspect.signature(value).parameters] if callable(value) else shape(value)
        return found

    assert shape(client) == shape(AsyncClient(client._connection._server.root))
    assert shape(client)["tokenize"] == ["content", "model", "add_special", "parse_special", "with_pieces"]
    assert set(shape(client)["slots"]) == {"list", "save", "restore", "erase"}


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_base_url_may_be_the_one_of_other_clients(server: ScriptedServer, suffix: str) -> None:
    server.says({"status": "ok"})
    with Client(server.url + suffix) as client:
        assert client.health().ok
    assert server.asked[0].path == "/health"
    assert "authorization" not in server.asked[0].headers


def test_a_server_below_a_path(server: ScriptedServer) -> None:
    server.says({"status": "ok"})
    with Client(f"{server.url}/llm/v1", headers={"x-session-id": "s"}) as client:
        client.health()
    assert server.asked[0].path == "/llm/health"
    assert server.asked[0].headers["x-session-id"] == "s"


def test_a_misspelt_parameter_is_not_sent(server: ScriptedServer, client: Client) -> None:
    with pytest.raises(TypeError, match="'temprature'; what this client does not know goes into extra_body"):
        client.complete("x", temprature=1)  # type: ignore[call-overload]
    assert server.asked == []


def test_parts_are_made_of_files(tmp_path: Path) -> None:
    picture, sound, text = tmp_path / "a.PNG", tmp_path / "b.mp3", tmp_path / "c.csv"
    picture.write_bytes(PNG)
    sound.write_bytes(MP3)
    text.write_text("x,y")
    assert file_part(picture) == picture_part(picture) == picture_part(PNG, "image/png")
    assert picture_part(PNG, "image/png") == {"type": "image_url", "image_url": {"url": data_url(PNG)}}
    assert picture_part("https://h/a.png")["image_url"]["url"] == "https://h/a.png"
    assert file_part(sound) == sound_part(sound) == sound_part(MP3, "mp3")
    assert sound_part(MP3, "mp3")["input_audio"] == {"data": base64_of(MP3), "format": "mp3"}
    assert file_part(text) == {"type": "text", "text": "x,y"}


@pytest.mark.parametrize("ending", ["webp", "bmp", "WEBP"])
def test_pictures_are_known_without_the_systems_table(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_table(monkeypatch)
    path = tmp_path / f"a.{ending}"
    path.write_bytes(PNG)
    assert file_part(path) == picture_part(PNG, f"image/{ending.lower()}")


@pytest.mark.parametrize("ending", ["flac", "ogg", "oga", "opus", "wav"])
def test_sounds_are_known_without_the_systems_table(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_table(monkeypatch)
    path = tmp_path / f"a.{ending}"
    path.write_bytes(MP3)
    assert file_part(path) == sound_part(MP3, ending)


def without_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mimetypes, "guess_type", mimetypes.MimeTypes().guess_type)
