"""Reads `multipart/form-data` bodies with one file, and forwards the file while it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.types import Receive, Scope

from pagemill_protocol.errors import PagemillError, client_closed_request, invalid_field
from pagemill_servers.request_middleware import header

MAX_FIELD_BYTES = 4096
MAX_FIELDS = 16
OVERHEAD_BYTES = 64 * 1024
"""Limit for the bytes of a body besides its file."""


class Form(NamedTuple):
    fields: dict[str, str]
    filename: str | None
    """The name of the file; `None` if there is no file."""


async def read_form(
    scope: Scope, receive: Receive, write: Callable[[bytes], Awaitable[None]], turns: asyncio.Semaphore
) -> Form:
    """Read a form; `write` is called with the content of the field `file`. Raises `PagemillError`.

    A piece is parsed and written in one of the `turns` that all uploads share, so that many of them leave time for
    other requests.
    """
    kind, options = parse_options_header(header(scope, b"content-type") or "")
    if kind != b"multipart/form-data" or b"boundary" not in options:
        raise PagemillError(
            "Send the file as multipart/form-data, with the fields `file` and `purpose`.",
            status=415,
            param="content-type",
            code="unsupported_media_type",
        )
    parts = _Parts()
    try:
        parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": parts.begin,
                "on_header_field": parts.header_name,
                "on_header_value": parts.header_value,
                "on_header_end": parts.header_end,
                "on_headers_finished": parts.headers_end,
                "on_part_data": parts.data,
                "on_end": parts.end,
            },
        )
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise client_closed_request()
            more = message.get("more_body", False)
            async with turns:
                parser.write(message.get("body", b""))
                if data := parts.take():
                    await write(data)
    except FormParserError as error:
        raise invalid_field("body", f"The body is not valid multipart/form-data: {error}.") from None
    if not parts.ended:
        raise invalid_field("body", "The multipart/form-data ends before its last boundary.")
    fields = {name: value.decode("utf-8", "replace") for name, value in parts.fields.items()}
    return Form(fields, parts.filename)


class _Parts:
    """Collects the parser's output until `take`."""

    def __init__(self) -> None:
        self.fields: dict[str, bytearray] = {}
        self.filename: str | None = None
        self.ended = False
        self._content = bytearray()
        self._field: bytearray | None = None
        """The value of the current field; `None` while the part is the file."""
        self._name = b""
        self._value = b""
        self._disposition = b""

    def take(self) -> bytes:
        content, self._content = self._content, bytearray()
        return bytes(content)

    def begin(self) -> None:
        self._disposition = self._name = self._value = b""

    def header_name(self, data: bytes, start: int, end: int) -> None:
        self._name = (self._name + data[start:end])[:MAX_FIELD_BYTES]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value = (self._value + data[start:end])[:MAX_FIELD_BYTES]

    def header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = self._value
        self._name = self._value = b""

    def headers_end(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        self._field = None
        if name != "file":
            if len(self.fields) == MAX_FIELDS:
                raise invalid_field("body", f"The form has more than {MAX_FIELDS} fields.")
            self._field = self.fields[name] = bytearray()
        elif self.filename is not None:
            raise invalid_field("file", "The form has more than one file. Send one.")
        else:
            self.filename = options.get(b"filename", b"file").decode("utf-8", "replace")

    def data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._content += data[start:end]
        elif len(self._field) + end - start > MAX_FIELD_BYTES:
            raise invalid_field("body", f"A field of the form is longer than {MAX_FIELD_BYTES} bytes.")
        else:
            self._field += data[start:end]

    def end(self) -> None:
        self.ended = True
