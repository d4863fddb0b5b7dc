"""Pictures, sounds and files in each dialect's shape: what becomes of them in the canonical request."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from typing import Any

import pytest

from gateway.api.anthropic.request import read_messages_request, read_prompt
from gateway.api.media.attachments import MAX_MEDIA, Attachments, LinkedMedium
from gateway.api.native.request import read_completion
from gateway.api.openai.dialects import read_chat_prompt
from gateway.api.openai.requests import read_chat
from gateway.api.parameters.prompts import MARKER
from gateway.api.responses.request import read_draft
from gateway.errors import InvalidRequest, NotSupported, PaddockError
from gateway.telemetry.request_log import Ignored
from tests.support.sent_media import JPEG, MP3, PNG, WAV, base64_of, data_url
from workers.protocol.requests import GenerateRequest, Medium

Part = dict[str, Any]
TEXT = {"type": "text", "text": "look"}
PICTURE = {"type": "image_url", "image_url": {"url": data_url(PNG), "detail": "low"}}
SOUND = {"type": "input_audio", "input_audio": {"data": base64_of(WAV), "format": "wav"}}
LINK = "https://files.example.com/a.png?key=1"


def chat(*parts: Part, role: str = "user", **more: object) -> GenerateRequest:
    message = {"role": role, "content": list(parts), **more}
    return read_chat(json.dumps({"model": "m", "messages": [message]}).encode()).requests[0]


def responses(*parts: Part, **more: object) -> GenerateRequest:
    items = [{"role": "user", "content": list(parts)}]
    return read_draft(json.dumps({"model": "m", "input": items, **more}).encode()).resolved({}).complete().requests[0]


def anthropic(*blocks: Part, **more: object) -> GenerateRequest:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": list(blocks)}], **more}
    return read_messages_request(json.dumps(body).encode()).requests[0]


def native(prompt: object, **more: object) -> tuple[GenerateRequest, ...]:
    scope = {"type": "http", "query_string": b""}
    return read_completion(json.dumps({"model": "m", "prompt": prompt, **more}).encode(), scope).requests


def medium(kind: Any, data: bytes, param: str) -> Medium:
    return Medium(kind, data, param, sha256(data).digest())


def file(data: bytes, filename: str = "a.bin", *, as_url: str = "") -> Part:
    sent = data_url(data, as_url) if as_url else base64_of(data)
    return {"type": "file", "file": {"file_data": sent, "filename": filename}}


def test_a_chat_keeps_its_media_in_their_places() -> None:
    request = chat(TEXT, PICTURE, TEXT, TEXT, SOUND)
    assert request.messages[0].content == "looklook\nlook"
    assert request.messages[0].media == (4, 13)
    assert request.media == (
        medium("picture", PNG, "messages.0.content.1"),
        medium("sound", WAV, "messages.0.content.4"),
    )


def test_line_breaks_are_those_of_llama_server() -> None:
    """Between two texts, and none beside a medium (`to_json_oaicompat` in common/chat.cpp)."""
    for parts, content, places in (
        ((PICTURE, TEXT), "look", (0,)),
        ((TEXT, PICTURE), "look", (4,)),
        ((TEXT, TEXT, PICTURE, PICTURE, TEXT, TEXT), "look\nlooklook\nlook", (9, 9)),
        ((PICTURE,), "", (0,)),
    ):
        [message] = chat(*parts).messages
        assert (message.content, message.media) == (content, places)


def test_a_plain_string_is_a_picture_too() -> None:
    for url in (data_url(PNG), base64_of(PNG), data_url(PNG, "application/octet-stream")):
        assert chat({"type": "image_url", "image_url": url}).media[0].data == PNG


def test_media_of_several_messages_follow_each_other() -> None:
    messages = [
        {"role": "user", "content": [PICTURE, TEXT]},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": [SOUND]},
        {"role": "user", "content": "and now?"},
    ]
    request = read_chat(json.dumps({"model": "m", "messages": messages, "n": 2}).encode()).requests[1]
    assert [message.media for message in request.messages] == [(0,), (), (0,), ()]
    assert [one.param for one in request.media] == ["messages.0.content.0", "messages.2.content.0"]


def test_places_count_characters() -> None:
    [message] = chat({"type": "text", "text": "\U0001f600\u4f60"}, PICTURE).messages
    assert message.media == (2,)


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        (file(PNG), "picture"),
        (file(JPEG, "x.txt"), "picture"),
        (file(WAV, "x.wav"), "sound"),
        (file(MP3, as_url="audio/mpeg"), "sound"),
        (file(b"something", as_url="audio/aac"), "sound"),
    ],
)
def test_files_are_media_by_what_they_are(part: Part, kind: str) -> None:
    assert [one.kind for one in chat(part).media] == [kind]


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (file(b"a,b\n", "t.csv"), "a,b\n"),
        (file(b"\xef\xbb\xbf{}", "t.json"), "{}"),
        (file("\u00fc".encode(), as_url="text/markdown;charset=utf-8"), "\u00fc"),
        (file(b"{}", as_url="application/ld+json"), "{}"),
        (file(b"a: b", "settings.YAML"), "a: b"),
        (file(b"let a", "a.ts"), "let a"),
        (file(b"# a", "README.md"), "# a"),
        (file(b"BMW and others, in alphabetical order", "cars.txt"), "BMW and others, in alphabetical order"),
        (file(b"ID3,name,size,kind,colour", "table.csv"), "ID3,name,size,kind,colour"),
    ],
)
def test_documents_become_texts(part: Part, text: str) -> None:
    request = chat(TEXT, part, TEXT)
    assert (request.messages[0].content, request.media) == (f"look\n{text}\nlook", ())


@pytest.mark.parametrize(
    ("part", "param", "said"),
    [
        (file(b"%PDF-1.7", "a.pdf"), "messages.0.content.0.file.file_data", "application/pdf"),
        (file(b"%PDF-1.7", as_url="application/pdf"), "messages.0.content.0.file.file_data", "as pictures"),
        (file(b"\0\1", "a"), "messages.0.content.0.file.file_data", "not known"),
        ({"type": "file", "file": {"file_id": "f"}}, "messages.0.content.0.file.file_id", "keeps none"),
        ({"type": "input_image", "file_id": "f"}, "messages.0.content.0.file_id", "keeps none"),
        ({"type": "video_url", "video_url": {}}, "messages.0.content.0", "video_url"),
    ],
)
def test_what_is_not_read_is_refused(part: Part, param: str, said: str) -> None:
    assert_refused(NotSupported, param, said, lambda: chat(part))


@pytest.mark.parametrize(
    ("part", "param", "said"),
    [
        ({"type": "image_url"}, "image_url", "missing"),
        ({"type": "image_url", "image_url": {}}, "image_url.url", "missing"),
        ({"type": "image_url", "image_url": {"url": 1}}, "image_url.url", "is 1"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "image_url.url", "`file`"),
        ({"type": "image_url", "image_url": {"url": "ftp://h/a.png"}}, "image_url.url", "`ftp`"),
        ({"type": "image_url", "image_url": {"url": "gopher://h"}}, "image_url.url", "`gopher`"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "image_url.url", "without base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,a!b"}}, "image_url.url", "no base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, "image_url.url", "empty"),
        ({"type": "image_url", "image_url": {"url": data_url(WAV)}}, "image_url.url", "a sound"),
        ({"type": "image_url", "image_url": {"url": data_url(b"x", "text/plain")}}, "image_url.url", "recognised"),
        ({"type": "image_url", "image_url": {"url": "https://" + "x" * 9000}}, "image_url.url", "shorter"),
        ({"type": "input_file", "file_url": "https://" + "x" * 9000}, "file_url", "shorter"),
        ({"type": "file", "file": {"file_data": "https://" + "x" * 9000}}, "file.file_data", "shorter"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "input_audio.data", "missing"),
        ({"type": "input_audio", "input_audio": {"data": base64_of(PNG)}}, "input_audio.data", "a picture"),
        ({"type": "file", "file": "x"}, "file", "file_data"),
        ({"type": "file", "file": {"filename": "x"}}, "file.file_data", "missing"),
        (file(b"\xff", "t.txt"), "file.file_data", "UTF-8"),
    ],
)
def test_what_is_wrong_is_named(part: Part, param: str, said: str) -> None:
    assert_refused(InvalidRequest, f"messages.0.content.0.{param}", said, lambda: chat(part))


def assert_refused(kind: type[PaddockError], param: str, said: str, read: Callable[[], object]) -> None:
    with pytest.raises(PaddockError) as caught:
        read()
    assert type(caught.value) is kind
    assert caught.value.param == param
    assert said in caught.value.message


def test_one_medium_has_a_bound() -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": [PICTURE]}]}).encode()
    read_chat(body, attachments=Attachments(max_bytes=len(PNG)))
    with pytest.raises(InvalidRequest, match="PADDOCK_MAX_MEDIA_MIB"):
        read_chat(body, attachments=Attachments(max_bytes=len(PNG) - 1))


def test_a_request_has_so_many_media_and_no_more() -> None:
    assert len(chat(*[PICTURE] * MAX_MEDIA).media) == MAX_MEDIA
    for read in (chat, lambda *parts: responses(*[{"type": "input_image", "image_url": data_url(PNG)}] * len(parts))):
        with pytest.raises(InvalidRequest, match=str(MAX_MEDIA)):
            read(*[PICTURE] * (MAX_MEDIA + 1))
    prompt = {"prompt_string": MARKER * 17, "multimodal_data": [base64_of(PNG)] * 17}
    with pytest.raises(InvalidRequest, match=str(MAX_MEDIA)):
        native([prompt, prompt])


def test_a_link_is_kept_for_later() -> None:
    [linked] = chat({"type": "image_url", "image_url": {"url": LINK}}).media
    assert linked == LinkedMedium("picture", b"", "messages.0.content.0", url=LINK)


def test_responses_have_pictures_sounds_and_files() -> None:
    request = responses(
        {"type": "input_text", "text": "a"},
        {"type": "input_image", "image_url": data_url(PNG), "detail": "auto"},
        {"type": "input_audio", "input_audio": {"data": base64_of(MP3), "format": "mp3"}},
        {"type": "input_file", "filename": "t.txt", "file_data": base64_of(b"note")},
        {"type": "input_file", "file_url": "https://h.example.com/t.txt"},
    )
    [message] = request.messages
    assert (message.content, message.media) == ("anote\n", (1, 1, 6))
    assert request.media[:2] == (
        medium("picture", PNG, "input.0.content.1"),
        medium("sound", MP3, "input.0.content.2"),
    )
    linked = request.media[2]
    assert isinstance(linked, LinkedMedium)
    assert (linked.is_document, linked.param) == (True, "input.0.content.4")


def test_results_of_functions_may_be_pictures() -> None:
    output = [{"type": "input_text", "text": "here"}, {"type": "input_image", "image_url": data_url(PNG)}]
    items = [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": output},
    ]
    asked = read_draft(json.dumps({"model": "m", "input": items}).encode()).resolved({}).complete()
    assert asked.requests[0].messages[1].content == "here"
    assert asked.requests[0].messages[1].media == (4,)
    assert asked.requests[0].media == (medium("picture", PNG, "input.1.output.1"),)
    assert asked.to_keep[1]["output"] == output  # type: ignore[index]


def test_items_are_kept_as_they_were_sent() -> None:
    parts = [
        {"type": "input_image", "image_url": data_url(PNG), "detail": "high"},
        {"type": "input_file", "filename": "t.txt", "file_data": base64_of(b"note")},
    ]
    items = [{"role": "user", "content": parts}]
    asked = read_draft(json.dumps({"model": "m", "input": items}).encode()).resolved({}).complete()
    assert asked.to_keep[0]["content"] == parts  # type: ignore[index]


def test_uploaded_files_are_refused_in_responses() -> None:
    for kind in ("input_image", "input_file"):
        read = partial(responses, {"type": kind, "file_id": "file_1"})
        assert_refused(NotSupported, "input.0.content.0.file_id", "keeps none", read)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(PNG)}}


def test_anthropic_blocks_have_pictures_and_documents() -> None:
    request = anthropic(
        {"type": "text", "text": "a"},
        IMAGE,
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "b"}},
        {
            "type": "document",
            "source": {"type": "base64", "media_type": "text/csv", "data": base64_of(b"c")},
        },
        {"type": "image", "source": {"type": "url", "url": LINK}},
        {"type": "document", "source": {"type": "url", "url": LINK}},
    )
    [message] = request.messages
    assert (message.content, message.media) == ("ab\nc", (1, 4, 4))
    assert request.media[0] == medium("picture", PNG, "messages.0.content.1")
    assert [one.is_document for one in request.media if isinstance(one, LinkedMedium)] == [False, True]


def test_results_of_anthropic_tools_have_pictures() -> None:
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "is_error": True,
        "content": [{"type": "text", "text": "x"}, IMAGE],
    }
    request = anthropic(IMAGE, result, {"type": "text", "text": "go on"})
    assert [(one.role, one.content, one.media) for one in request.messages] == [
        ("user", "", (0,)),
        ("tool", "Error: x", (8,)),
        ("user", "go on", ()),
    ]
    assert [one.param for one in request.media] == ["messages.0.content.0", "messages.0.content.1.content.1"]


def test_pdf_is_refused_in_anthropic_documents() -> None:
    pdf = base64.b64encode(b"%PDF-1.7").decode()
    block = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": pdf}}
    assert_refused(NotSupported, "messages.0.content.0.source.data", "application/pdf", lambda: anthropic(block))
    kept = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    assert_refused(NotSupported, "messages.0.content.0.source", "base64", lambda: anthropic(kept))


def test_instructions_have_no_pictures() -> None:
    assert_refused(
        NotSupported, "system.0", "only texts", lambda: anthropic({"type": "text", "text": "a"}, system=[IMAGE])
    )


def test_native_prompts_have_media_at_their_markers() -> None:
    text = {
        "prompt_string": f"a{MARKER}bc{MARKER}{MARKER}",
        "multimodal_data": [base64_of(PNG), base64_of(WAV), base64_of(PNG)],
    }
    [request] = native(text)
    assert (request.prompt, request.prompt_media) == ("abc", (1, 3, 3))
    assert [one.kind for one in request.media] == ["picture", "sound", "picture"]
    assert request.media[1].param == "prompt.multimodal_data.1"


def test_several_native_prompts_have_their_own_media() -> None:
    text = {"prompt_string": MARKER, "multimodal_data": [base64_of(PNG)]}
    requests = native([text, "plain", {"prompt_string": "c"}, text], n_cmpl=2)
    assert [one.prompt for one in requests] == ["", "", "plain", "plain", "c", "c", "", ""]
    assert [len(one.media) for one in requests] == [1, 1, 0, 0, 0, 0, 1, 1]
    assert requests[-1].media[0].param == "prompt.3.multimodal_data.0"


@pytest.mark.parametrize(
    ("prompt", "param", "said"),
    [
        ({"prompt_string": "a", "multimodal_data": ["eA=="]}, "prompt.multimodal_data", "0 markers"),
        ({"prompt_string": MARKER * 2, "multimodal_data": ["eA=="]}, "prompt.multimodal_data", "2 markers"),
        ({"prompt_string": MARKER, "multimodal_data": ["eA=="]}, "prompt.multimodal_data.0", "recognised"),
        ({"prompt_string": MARKER, "multimodal_data": "eA=="}, "prompt.multimodal_data", "array"),
        ({"prompt_string": MARKER, "multimodal_data": [1]}, "prompt.multimodal_data", "array"),
    ],
)
def test_native_media_that_do_not_fit_are_named(prompt: object, param: str, said: str) -> None:
    assert_refused(InvalidRequest, param, said, lambda: native(prompt))


def test_a_marker_without_media_is_text() -> None:
    [request] = native(f"see {MARKER}")
    assert (request.prompt, request.media) == (f"see {MARKER}", ())


def test_counting_reads_media_as_well() -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": [PICTURE, TEXT]}]}).encode()
    assert len(read_chat_prompt(body, Ignored(), Attachments())[1].media) == 1
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": [IMAGE]}]}).encode()
    assert len(read_prompt(body, Ignored())[1].media) == 1


def test_documents_are_no_longer_than_other_texts() -> None:
    """A body may be long because of pictures; a text in base64 is a text all the same."""
    document = file(b"x" * 600, "t.txt")
    for parts, fits in (([document], True), ([document, document], False)):
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": parts}]}).encode()
        items = [{"type": "input_file", "filename": "t.txt", "file_data": base64_of(b"x" * 600)} for _ in parts]
        given = json.dumps({"model": "m", "input": [{"role": "user", "content": items}]}).encode()
        reads: tuple[Callable[[], object], ...] = (
            partial(read_chat, body, None, Attachments(max_text_chars=1000)),
            read_draft(given, None, Attachments(max_text_chars=1000)).resolved({}).complete,
        )
        for read in reads:
            if fits:
                read()
            else:
                with pytest.raises(InvalidRequest, match="PADDOCK_MAX_BODY_BYTES"):
                    read()


def test_schemes_are_read_in_any_case() -> None:
    url = data_url(PNG)
    assert chat({"type": "image_url", "image_url": url.replace("data:", "DATA:", 1)}).media[0].data == PNG
    assert isinstance(chat({"type": "image_url", "image_url": "HTTPS://h/a.png"}).media[0], LinkedMedium)
