"""Request bodies: read as a whole, checked for their content type, parsed into a schema.

`request_middleware` wraps `receive` and bounds size and time.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TypeVar

from pydantic import BaseModel
from starlette.types import Receive, Scope

from pagemill_protocol.errors import PagemillError, client_closed_request
from pagemill_protocol.http.auth import header
from pagemill_protocol.http.origin import check_same_origin
from pagemill_protocol.openai.parse import parse_body

Model = TypeVar("Model", bound=BaseModel)


async def read_body(receive: Receive) -> bytes:
    """Return the whole body. Raises `PagemillError` 499 when the client disconnects first."""
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise client_closed_request()
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def read_json(scope: Scope, receive: Receive, schema: type[Model]) -> Model:
    """Return the body as `schema`. Raises `PagemillError` 415, 400, and the errors of `request_middleware`."""
    check_json_content_type(scope)
    return parse_body(await read_body(receive), schema)


def check_json_content_type(scope: Scope, also: Container[str] = ()) -> None:
    """Refuse bodies with another declared type than JSON with 415; a body without a declaration is taken as JSON.

    `also`: further accepted media types. A body without a declaration from a web page of another origin is refused with
    403: browsers send it without asking first whether the server allows it (Fetch standard, CORS-safelisted requests).
    """
    media_type = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
    if media_type == "application/json" or media_type.endswith("+json") or media_type in also:
        return
    if not media_type:
        return check_same_origin(scope, "send it with the header `Content-Type: application/json`")
    raise PagemillError(
        f"The body is declared as `{media_type[:60]}`. Send JSON with the header `Content-Type: application/json`.",
        status=415,
        code="unsupported_media_type",
    )
