"""The outermost ASGI middleware of engine and gateway: bounds every request and answers every failure.

Headers above a limit get 431, bodies 413, bodies that take too long 408; each request has an id in `x-request-id`; an
exception that the app did not turn into a response becomes a 500; all errors have the shape of their path's dialect. A
plain ASGI middleware: it sees messages, never buffers a body, and adds nothing to a streamed chunk. `auth`
authenticates, `guard` protects control ports, `errors` renders errors of apps, `connection` bounds slow or endless
headers.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Container, Iterable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagemill_protocol.errors import (
    ErrorBody,
    PagemillError,
    body_too_large,
    client_closed_request,
    headers_too_large,
    internal_error,
    invalid_field,
    request_timeout,
)
from pagemill_protocol.ids import new_id
from pagemill_servers.auth import bearer_token, hash_key, header, is_loopback, same_secret
from pagemill_servers.coding import Deflater, Inflater, accepts_gzip, compressed, inflater_of, is_compressible
from pagemill_servers.direct import DirectResponse, direct_response
from pagemill_servers.errors import error_response, install_error_handlers, note_error, openai_shape
from pagemill_servers.origin import check_same_origin

__all__ = [
    "RequestMiddleware",
    "bearer_token",
    "check_json_content_type",
    "error_response",
    "hash_key",
    "header",
    "install_error_handlers",
    "is_loopback",
    "read_body",
    "request_id",
    "same_secret",
]

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = b"x-request-id"
TIMEOUT_HEADER = b"x-request-timeout-s"
"""Header with the seconds after which the client gives up; gateways enforce it."""
PROCESSING_HEADER = b"openai-processing-ms"
"""Header with the milliseconds from the request's first byte to the answer's."""
CREDENTIAL_HEADERS = frozenset({b"authorization", b"x-api-key"})

_SAFE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def request_id(scope: Scope) -> str:
    """Return the id that `RequestMiddleware` assigned: the client's `x-request-id` if it is valid, else a new one."""
    value: str = scope["state"]["request_id"]
    return value


class RequestMiddleware:
    """ASGI middleware; wrap the app in it last, so that it is outermost."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int = 8 * 1024 * 1024,
        max_header_bytes: int = 64 * 1024,
        body_timeout_s: float = 30.0,
        uploads: Mapping[str, tuple[int, float]] | None = None,
        error_body_at: Callable[[str], ErrorBody] = openai_shape,
    ) -> None:
        """Wrap an app.

        `uploads`: maximum bytes and seconds of the bodies of some paths, in place of the general ones.
        `error_body_at`: returns the function that renders errors at a path.
        """
        self.app = app
        self.error_body_at = error_body_at
        self.uploads = uploads or {}
        self.max_body_bytes = max_body_bytes
        self.max_header_bytes = max_header_bytes
        self.body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if len(scope["path"]) > 1 and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"][:-1]}
        given = header(scope, REQUEST_ID_HEADER)
        identity = given if given is not None and _SAFE_REQUEST_ID.fullmatch(given) else new_id()
        scope.setdefault("state", {})["request_id"] = identity
        max_bytes, timeout_s = self.uploads.get(scope["path"], (self.max_body_bytes, self.body_timeout_s))
        body = _BoundedBody(receive, max_bytes, timeout_s, direct_response(scope))
        answer = _Answer(send, body, identity.encode("latin-1"), accepts_gzip(scope))
        try:
            self._check_headers(scope, body)
            answer.is_head_accepted = True
            body.inflater = inflater_of(scope, max_bytes)
            await self.app(scope, body.receive, answer.send)
        except PagemillError as error:
            note_error(scope, error)
            await answer.fail(error, self.error_body_at(scope["path"]))
        except Exception:
            logger.exception("Request %s to %s failed", identity, scope["path"][:200])
            note_error(scope, internal_error())
            if answer.started and not answer.complete:
                raise  # the server closes the connection, so that a partial answer does not look complete
            await answer.fail(internal_error(), self.error_body_at(scope["path"]))

    def _check_headers(self, scope: Scope, body: _BoundedBody) -> None:
        headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
        num_bytes = 0
        credentials: set[bytes] = set()
        for name, value in headers:
            num_bytes += len(name) + len(value) + 4
            if name in CREDENTIAL_HEADERS:
                if name in credentials:  # programs on the way may have read the other one
                    text = name.decode()
                    raise invalid_field(text, f"The request has more than one header {text}. Send it once.")
                credentials.add(name)
        if num_bytes > self.max_header_bytes:
            raise headers_too_large(self.max_header_bytes)
        declared = header(scope, b"content-length")
        if declared is None:
            body.complete = header(scope, b"transfer-encoding") is None
            return
        if not (declared.isascii() and declared.isdigit() and len(declared) < 20):
            raise invalid_field("content-length", "The header Content-Length must be a number of bytes.")
        body.complete = int(declared) == 0
        body.declared_bytes = int(declared)


class _BoundedBody:
    """Wraps `receive`: counts bytes and enforces the deadline until the body is complete."""

    def __init__(
        self, receive: Receive, max_bytes: int, timeout_s: float, direct: DirectResponse | None = None
    ) -> None:
        """Wrap `receive`. `direct`: shows whether the body has arrived already; then there is no deadline."""
        self._receive = receive
        self._direct = direct
        self._max_bytes = max_bytes
        self._deadline_s = asyncio.get_running_loop().time() + timeout_s
        self._num_bytes = 0
        self.declared_bytes = 0
        self.complete = False
        self.inflater: Inflater | None = None

    @property
    def is_arriving(self) -> bool:
        """Whether the client may still be sending the body."""
        return not self.complete and (self._direct is None or not self._direct.has_body)

    async def receive(self) -> Message:
        if self.complete:
            return await self._receive()
        if self.declared_bytes > self._max_bytes:
            raise body_too_large(self._max_bytes)
        message = await self._next()
        if self._num_bytes > self._max_bytes:
            raise body_too_large(self._max_bytes)
        if self.inflater is not None and message["type"] == "http.request":
            return {**message, "body": self.inflater.push(message.get("body", b""), last=self.complete)}
        return message

    async def _next(self) -> Message:
        if self._direct is not None and self._direct.has_body:
            message = await self._receive()
        else:
            try:
                async with asyncio.timeout_at(self._deadline_s):
                    message = await self._receive()
            except TimeoutError:
                raise request_timeout() from None
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        else:
            self.complete = True
        return message


class _Answer:
    """Wraps `send`: adds the request id and the time, compresses large complete answers for clients that accept it, and
    closes the connection if part of the body has not arrived, which `connection` drops meanwhile."""

    def __init__(self, send: Send, body: _BoundedBody, identity: bytes, accepts_gzip: bool) -> None:
        self._send = send
        self._accepts_gzip = accepts_gzip
        self._began_s = time.monotonic()
        self._held: Message | None = None
        """Start message of an answer that may be compressed."""
        self._deflater: Deflater | None = None
        """Compresses an answer that is sent in parts."""
        self._body = body
        self._identity = identity
        self.is_head_accepted = False
        self.started = False
        self.complete = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            took_ms = (time.monotonic() - self._began_s) * 1000
            headers = [*message.get("headers", ()), (REQUEST_ID_HEADER, self._identity)]
            headers.append((PROCESSING_HEADER, b"%d" % took_ms))
            if self._body.is_arriving or not self.is_head_accepted:
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
            if self._accepts_gzip and is_compressible(message):
                self._held = message
                return
        elif message["type"] == "http.response.body":
            self.complete = not message.get("more_body", False)
            if self._held is not None:
                start, self._held = self._held, None
                if self.complete:
                    start, message = await compressed(start, message)
                else:
                    self._deflater = Deflater()
                    start = self._deflater.start(start)
                await self._send(start)
            if self._deflater is not None:
                message = self._deflater.part(message)
        await self._send(message)

    async def fail(self, error: PagemillError, error_body: ErrorBody) -> None:
        if self.started:
            return
        response = error_response(error, error_body=error_body)
        await self.send(
            {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        )
        await self.send({"type": "http.response.body", "body": bytes(response.body), "more_body": False})


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
