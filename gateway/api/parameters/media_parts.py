"""Reads parts of messages that are pictures, sounds or files, and puts a message's text and media together.

Sources: OpenAI's API reference, content parts of "Create chat completion" and input content of "Create a model
response"; for plain strings, `input_audio.url` and line breaks tools/server/README.md and common/chat.cpp of llama.cpp.
"""

from __future__ import annotations

from typing import Any, Protocol

from gateway.api.media.attachments import MAX_MEDIA, Attachments, LinkedMedium, check_length, check_url, is_link
from gateway.api.media.kinds import type_of_name
from gateway.api.parameters.base import quote
from gateway.errors import InvalidRequest, NotSupported
from workers.protocol.requests import Medium

MEDIA = frozenset({"image_url", "input_image", "input_audio", "file", "input_file"})
"""The types of parts that hold a picture, a sound or a file."""
UNSEEN = frozenset({"image", "audio", "audio_url", "video_url", "input_video", "video"})
"""Types of parts of other dialects or kinds, which are refused."""

PART_END = "\n"
"""Separator that joins the text parts of a message. llama-server uses it too if a template takes only plain text."""


class PartFields(Protocol):
    """The fields of a part that can hold media; which of them are read depends on the part's type."""

    @property
    def type(self) -> str: ...
    @property
    def image_url(self) -> Any: ...
    @property
    def input_audio(self) -> Any: ...
    @property
    def file(self) -> Any: ...
    @property
    def file_data(self) -> Any: ...
    @property
    def file_url(self) -> Any: ...
    @property
    def file_id(self) -> Any: ...
    @property
    def filename(self) -> Any: ...


class Gallery:
    """The media of one request, in the order in which its messages are read."""

    def __init__(self, max_text_chars: int) -> None:
        """`max_text_chars`: maximum characters of all documents that become texts."""
        self._media: list[Medium] = []
        self._max_text_chars = max_text_chars
        self._num_text_chars = 0

    def add(self, medium: Medium) -> None:
        """Add the next medium. Raises InvalidRequest if there are too many."""
        if len(self._media) == MAX_MEDIA:
            message = (
                f"The request has more than {MAX_MEDIA} pictures and sounds. Send fewer, or drop those of old turns."
            )
            raise InvalidRequest(message, param=medium.param)
        self._media.append(medium)

    def counted(self, part: str | Medium, path: str) -> str | Medium:
        """Count the text of a document, and return it. Raises InvalidRequest if all of them are too long."""
        if isinstance(part, str):
            self._num_text_chars += len(part)
            check_length(self._num_text_chars, self._max_text_chars, path)
        return part

    @property
    def media(self) -> tuple[Medium, ...]:
        return tuple(self._media)


class ContentWriter:
    """Puts one message's texts and media together: the text, and the places of the media in it.

    As in llama-server, line breaks stand between two texts, and none beside a medium."""

    def __init__(self, gallery: Gallery, joint: str = PART_END) -> None:
        self._gallery = gallery
        self._joint = joint
        self._texts: list[str] = []
        self._num_chars = 0
        self._is_after_text = False
        self._places: list[int] = []

    def add(self, part: str | Medium) -> None:
        """Add the next text or medium. Raises InvalidRequest if the request has too many media."""
        is_text = isinstance(part, str) or (isinstance(part, LinkedMedium) and part.is_document)
        if is_text and self._is_after_text:
            self._write(self._joint)
        self._is_after_text = is_text
        if isinstance(part, str):
            self._write(part)
        else:
            self._gallery.add(part)
            self._places.append(self._num_chars)

    def _write(self, text: str) -> None:
        self._texts.append(text)
        self._num_chars += len(text)

    @property
    def content(self) -> str:
        return "".join(self._texts)

    @property
    def places(self) -> tuple[int, ...]:
        """The places of the media, as `Message.media` has them."""
        return tuple(self._places)


def read_media_part(part: PartFields, path: str, attachments: Attachments) -> str | Medium:
    """Return the medium of a part of a type in MEDIA, or the text of a document.

    Raises InvalidRequest, NotSupported, each naming the field by its path."""
    match part.type:
        case "image_url" | "input_image":
            _refuse_file_id(part.file_id, path)
            given, name = part.image_url, f"{path}.image_url"
            if isinstance(given, dict):
                given, name = given.get("url"), f"{name}.url"
            return attachments.medium(_text(given, name), name, "picture", path)
        case "input_audio":
            given, name = part.input_audio, f"{path}.input_audio"
            if isinstance(given, dict):
                field = "data" if given.get("data") is not None or given.get("url") is None else "url"
                given, name = given.get(field), f"{name}.{field}"
            return attachments.medium(_text(given, name), name, "sound", path)
        case "file":
            given, name = part.file, f"{path}.file"
            if not isinstance(given, dict):
                raise InvalidRequest(f"`{name}` is {quote(given)}. Send `file_data` and `filename`.", param=name)
            return _file(given, name, path, attachments)
    given = {one: getattr(part, one) for one in ("file_data", "file_url", "file_id", "filename")}
    return _file(given, path, path, attachments)


def refuse_unseen(kind: str, path: str) -> None:
    """Raise NotSupported for a type of part that no model here reads."""
    if kind in UNSEEN:
        message = f"`{path}` is of type {quote(kind)}. Send text, or pictures and sounds as {', '.join(sorted(MEDIA))}."
        raise NotSupported(message, param=path)


def read_link(url: str, path: str, param: str) -> LinkedMedium:
    """Return a file that a link names: a picture, a sound or a text. Raises InvalidRequest."""
    if not is_link(url):
        raise InvalidRequest(f"`{path}` is {quote(url)}. Send a URL of http or https.", param=path)
    check_url(url, path)
    return LinkedMedium("picture", b"", param, url=url, is_document=True)


def _file(given: dict[str, Any], name: str, path: str, attachments: Attachments) -> str | Medium:
    _refuse_file_id(given.get("file_id"), name)
    url = given.get("file_url")
    if given.get("file_data") is None and url is not None:
        return read_link(_text(url, f"{name}.file_url"), f"{name}.file_url", path)
    filename = given.get("filename")
    content_type = type_of_name(filename) if isinstance(filename, str) else ""
    data = _text(given.get("file_data"), f"{name}.file_data")
    if is_link(data):
        return read_link(data, f"{name}.file_data", path)
    return attachments.document(data, content_type, f"{name}.file_data", path)


def _refuse_file_id(file_id: Any, path: str) -> None:
    if file_id is not None:
        message = f"`{path}.file_id` names an uploaded file, and Paddock keeps none. Send the file itself."
        raise NotSupported(message, param=f"{path}.file_id")


def _text(given: Any, path: str) -> str:
    if not isinstance(given, str):
        problem = "is missing" if given is None else f"is {quote(given)}"
        raise InvalidRequest(f"`{path}` {problem}. Send a string.", param=path)
    return given
