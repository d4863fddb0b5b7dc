"""Forms: what is read from them, however they are cut into slices, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message, Scope

from gateway.api.intake.body import SLICE_BYTES
from gateway.api.intake.decoding import DecodingThread
from gateway.api.intake.form import (
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_PARTS,
    MAX_PREAMBLE_BYTES,
    MAX_TEXT_BYTES,
    MAX_TEXTS_BYTES,
    FormReader,
    boundary_of,
)
from gateway.api.intake.intake import Intake, MediaBounds
from gateway.api.intake.memory_budget import MemoryBudget
from gateway.call import Principal
from gateway.errors import BodyTooLarge, InvalidRequest, MemoryFull, PaddockError, TakesTooMuch
from tests.support.sent_forms import BOUNDARY, CONTENT_TYPE, form, part

MIB = 1 << 20
BOUNDS = MediaBounds()
ME = Principal("key", "team", None, admin=False)
MOST_S = 0.005
"""Longest time of a slice: what holds the event loop longer is for a thread."""


def read(body: bytes, cuts: Sequence[int] = (), max_file_bytes: int = MIB) -> tuple[dict[str, object], bytes | None]:
    """Return the fields of a form, and its file. `cuts`: where the body is cut into slices."""
    reader = FormReader(BOUNDARY, max_file_bytes)
    ends = [*sorted(cut for cut in cuts if cut < len(body)), len(body)]
    for start, end in zip([0, *ends], ends, strict=False):
        reader.feed(body[start:end])
    fields = json.loads(reader.finish())
    assert reader.num_bytes >= sum(len(cut.data) for cut in reader.cuts.values())
    if "file" not in fields:
        assert not reader.cuts
        return fields, None
    cut = reader.cuts[fields["file"]]
    assert cut.sha256 == sha256(cut.data).digest()
    assert b"".join(cut.base64()) == b64encode(cut.data), "what `x-resume-grace` knows a file by"
    return fields, cut.data


def refusal(body: bytes, max_file_bytes: int = MIB) -> str:
    with pytest.raises(InvalidRequest) as caught:
        read(body, (), max_file_bytes)
    return caught.value.message


NASTY = b"\r\n--" + BOUNDARY[:-1] + b"\r\n\r\n--\r\n" + b"\r\n-" * 5
WHOLE = form(("model", "m"), ("file", NASTY), ("tags[]", "a"), ("tags[]", "b"), ("how[type]", "x"), ("prompt", "\r\n"))


@given(st.lists(st.integers(0, len(WHOLE)), max_size=40))
@settings(max_examples=300, deadline=None)
def test_a_form_is_the_same_however_it_is_cut(cuts: list[int]) -> None:
    fields, data = read(WHOLE, cuts)
    assert data == NASTY
    del fields["file"]
    assert fields == {"model": "m", "tags": ["a", "b"], "how": {"type": "x"}, "prompt": "\r\n"}


def test_a_form_that_comes_byte_by_byte() -> None:
    assert read(WHOLE, range(len(WHOLE)))[1] == read(WHOLE)[1] == NASTY


@given(st.binary(max_size=300), st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_any_file_comes_back(data: bytes, junk: bytes) -> None:
    if b"--" + BOUNDARY not in data:
        assert read(form(("file", data)) + junk)[1] == data
    reader = FormReader(BOUNDARY, MIB)
    with contextlib.suppress(InvalidRequest):
        reader.feed(b"--" + BOUNDARY + junk)
        reader.finish()


def test_what_belongs_to_no_part_is_left_out() -> None:
    body = b"This is a form.\r\n" + form(("model", "m")) + b"\r\nand an epilogue" + form(("model", "other"))
    assert read(body) == ({"model": "m"}, None)
    padded = form(("model", "m")).replace(BOUNDARY + b"\r\n", BOUNDARY + b" \t \r\n")
    assert read(padded) == ({"model": "m"}, None)
    fields, data = read(form(("model", ""), ("file", b"")))
    assert (fields["model"], data) == ("", b"")


def test_the_name_of_a_file_and_its_type_mean_nothing() -> None:
    lying = part("prompt", b"a text", 'filename="../../etc/passwd"', b"Content-Type: audio/wav\r\n")
    plain = part("file", b"a sound", "", b"Content-Type: text/plain; charset=latin-1\r\n")
    fields, data = read(lying + plain + b"--" + BOUNDARY + b"--\r\n")
    assert (fields["prompt"], data) == ("a text", b"a sound")
    assert "passwd" not in json.dumps(fields)


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        (b"", "header that is none"),
        (b"Content-Type: text/plain", "without `content-disposition"),
        (b"Content-Disposition: attachment; name=model", "without `content-disposition"),
        (b"Content-Disposition: form-data", "without `content-disposition"),
        (b'Content-Disposition: form-data; name="a"; name="b"', "without `content-disposition"),
        (b'Content-Disposition: form-data; name="a\\"; name="b"', "without `content-disposition"),
        (b'Content-Disposition: form-data; name="a" b', "without `content-disposition"),
        (b"Content-Disposition: form-data; name*=UTF-8''model", "without `content-disposition"),
        (b'Content-Disposition: form-data; name="a"\r\nContent-Disposition: form-data; name="b"', "comes twice"),
        (b'Content-Disposition: form-data;\r\n name="a"', "header that is none"),
        (b'Content-Disposition: form-data; name="a"\nX-Key: b', "header that is none"),
        (b'Content-Disposition: form-data; name="a"\rX: b', "header that is none"),
        (b'Content-Disposition: form-data; name="a\0"', "header that is none"),
        (b'Content-Disposition : form-data; name="a"', "header that is none"),
        (b'Content-Disposition: form-data; name="a\\"b"', "name is no parameter's"),
        (b'Content-Disposition: form-data; name="a[b][c]"', "name is no parameter's"),
        (b'Content-Disposition: form-data; name=""', "name is no parameter's"),
        ('Content-Disposition: form-data; name="modèl"'.encode(), "name is no parameter's"),
        (b'Content-Disposition: form-data; name="a"\r\nContent-Transfer-Encoding: base64', "transfer-encoding"),
    ],
)
def test_headers_that_two_readers_could_understand_differently_are_refused(headers: bytes, told: str) -> None:
    body = b"--" + BOUNDARY + b"\r\n" + headers + b"\r\n\r\nx\r\n--" + BOUNDARY + b"--\r\n"
    assert told in refusal(body)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ((("model", "a"), ("model", "b")), "`model` more than once"),
        ((("model", "a"), ("model[]", "b")), "`model` more than once"),
        ((("model[]", "a"), ("model", "b")), "`model` more than once"),
        ((("model[a]", "a"), ("model[a]", "b")), "`model` more than once"),
        ((("model[]", "a"), ("model[a]", "b")), "`model` more than once"),
        ((("file", b"a"), ("file", b"b")), "`file` more than once"),
        ((("prompt", b"\xff"),), "`prompt` is no text in UTF-8"),
    ],
)
def test_fields_that_come_twice_or_are_no_text_are_refused(fields: Sequence[tuple[str, bytes]], told: str) -> None:
    assert told in refusal(form(*fields))


def test_a_form_that_is_cut_or_has_something_behind_a_boundary_is_refused() -> None:
    whole = form(("model", "m"), ("file", b"x" * 100))
    for end in range(whole.rindex(BOUNDARY) + len(BOUNDARY) + 1):
        assert "ends before its last boundary" in refusal(whole[:end])
    longer = whole.replace(BOUNDARY + b"\r\n", BOUNDARY + b"x\r\n", 1)
    assert "something behind it" in refusal(longer)
    assert "something behind it" in refusal(whole.replace(BOUNDARY + b"\r\n", BOUNDARY + b" " * 100 + b"\r\n", 1))


def test_everything_has_a_bound() -> None:
    assert f"more than {MAX_PARTS} parts" in refusal(form(*((f"a{n}", "x") for n in range(MAX_PARTS + 1))))
    assert f"more than {MAX_PARTS} parts" in refusal(form(*(("a[]", "x") for _ in range(MAX_PARTS + 1))))
    assert f"`a` has more than {MAX_TEXT_BYTES} bytes" in refusal(form(("a", "x" * (MAX_TEXT_BYTES + 1))))
    many = ((f"a{n}", "x" * MAX_TEXT_BYTES) for n in range(MAX_TEXTS_BYTES // MAX_TEXT_BYTES + 1))
    assert f"more than {MAX_TEXTS_BYTES} bytes together" in refusal(form(*many))
    assert "PADDOCK_MAX_MEDIA_MIB" in refusal(form(("file", b"x" * 101)), max_file_bytes=100)
    assert read(form(("file", b"x" * 100)), max_file_bytes=100)[1] == b"x" * 100
    assert "before its first boundary" in refusal(b"x" * (MAX_PREAMBLE_BYTES + 100) + WHOLE)
    endless = b"--" + BOUNDARY + b"\r\nX: " + b" " * MAX_HEADER_BYTES
    assert f"{MAX_HEADER_BYTES} bytes of headers" in refusal(endless)
    headers = b"".join(b"X-%d: y\r\n" % n for n in range(MAX_HEADERS))
    assert f"more than {MAX_HEADERS} headers" in refusal(part("a", b"x", "", headers))


@pytest.mark.parametrize(
    "body",
    [
        (b"\r\n--" + BOUNDARY[:-1]) * 900,
        b"\r\n" * (SLICE_BYTES // 2),
        b"-" * SLICE_BYTES,
        part("a", b"", "", b"X: " + b" " * (MAX_HEADER_BYTES - 200) + b"\0\r\n"),
        part("a", b"", "; ".join(f'b{n}="\\{"a" * 9}"' for n in range(200))),
        b"".join(part(f"a{n}", b"x") for n in range(MAX_PARTS)),
    ],
    ids=["half boundaries", "line ends", "dashes", "blanks in a header", "parameters", "parts"],
)
def test_no_slice_holds_the_loop(body: bytes) -> None:
    best_s = 1.0
    for _ in range(3):
        reader = FormReader(BOUNDARY, MIB)
        reader.feed(part("file", b"x"))
        began = time.thread_time()
        with contextlib.suppress(PaddockError):
            reader.feed(body[:SLICE_BYTES])
        best_s = min(best_s, time.thread_time() - began)
    assert best_s < MOST_S


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [b"application/json"],
        [b"multipart/mixed; boundary=x"],
        [b"multipart/form-data"],
        [b"multipart/form-data; boundary="],
        [b"multipart/form-data; boundary=" + b"x" * 71],
        [b'multipart/form-data; boundary="a\nb"'],
        [b"multipart/form-data; boundary=a; boundary=b"],
        [b"multipart/form-data; boundary=a; =b"],
        [b"multipart/form-data; boundary=a; b"],
        [CONTENT_TYPE, CONTENT_TYPE],
    ],
)
def test_a_body_that_is_no_form_is_refused(headers: list[bytes]) -> None:
    scope: Scope = {"headers": [(b"content-type", value) for value in headers]}
    with pytest.raises(InvalidRequest, match=r"multipart/form-data|boundary"):
        boundary_of(scope)


def test_boundaries() -> None:
    for value in (
        b'Multipart/Form-Data; charset=utf-8; BOUNDARY="a b:c"',
        b"multipart/form-data;boundary=--x--",
        b"multipart/form-data; boundary=--x--;",
        b"multipart/form-data; ; boundary=--x-- ; ",
    ):
        assert boundary_of({"headers": [(b"content-type", value)]}) in (b"a b:c", b"--x--")


class Sender:
    """Sends a form part by part, and says so first."""

    def __init__(self, body: bytes, part_bytes: int = 64 << 10) -> None:
        self.num_sent = 0
        self._body = body
        self._part_bytes = part_bytes

    @property
    def scope(self) -> Scope:
        length = (b"content-length", b"%d" % len(self._body))
        return {"type": "http", "headers": [(b"content-type", CONTENT_TYPE), length]}

    async def receive(self) -> Message:
        await asyncio.sleep(0)
        sent = self._body[self.num_sent : self.num_sent + self._part_bytes]
        self.num_sent += len(sent)
        return {"type": "http.request", "body": sent, "more_body": self.num_sent < len(self._body)}


def intake(budget: MemoryBudget, bounds: MediaBounds = BOUNDS) -> Intake:
    return Intake(MIB, budget, DecodingThread(), lambda: 4096, bounds)


async def test_a_forms_memory_is_counted_until_the_request_is_over() -> None:
    budget, data = MemoryBudget(256 * MIB), b"x" * (8 * MIB)
    sender = Sender(form(("file", data), ("model", "m")))
    async with intake(budget).open_body(ME, sender.scope, sender.receive, is_form=True) as body:
        assert len(data) <= budget.num_bytes < len(data) + MIB
        files = body.attachments
        sound = await body.decode(lambda raw: files.medium(json.loads(raw)["file"], "file", "sound", "file"))
        assert sound.data == data
        assert len(data) <= budget.num_bytes < len(data) + MIB
    assert budget.num_bytes == 0


async def test_a_form_for_which_there_is_no_memory_is_refused_before_it_is_read() -> None:
    budget = MemoryBudget(8 * MIB)
    sender = Sender(form(("file", b"x" * (8 * MIB))))
    with pytest.raises((TakesTooMuch, MemoryFull)):
        async with intake(budget).open_body(ME, sender.scope, sender.receive, is_form=True):
            pass
    assert (sender.num_sent, budget.num_bytes) == (0, 0)


async def test_a_file_beyond_the_bound_is_refused_while_it_comes() -> None:
    budget = MemoryBudget(256 * MIB)
    sender = Sender(form(("file", b"x" * (8 * MIB))))
    with pytest.raises(BodyTooLarge, match="PADDOCK_MAX_MEDIA_MIB"):
        async with intake(budget, MediaBounds(medium=MIB)).open_body(ME, sender.scope, sender.receive, is_form=True):
            pass
    assert sender.num_sent < 2 * MIB
    narrow = intake(budget, MediaBounds(body=MIB))
    with pytest.raises(BodyTooLarge, match="PADDOCK_MAX_MEDIA_BODY_MIB"):
        async with narrow.open_body(ME, sender.scope, sender.receive, is_form=True):
            pass
    assert budget.num_bytes == 0
