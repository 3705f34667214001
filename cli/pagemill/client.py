"""The streaming client for OpenAI-compatible servers that `pagemill chat` and `pagemill bench` use.

It talks to a gateway or an engine and turns every failure into a `ClientError` whose message has a remedy. `chat` keeps
the conversation and `bench` the statistics. Server-sent events: WHATWG HTML, section 9.2.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import closing
from types import TracebackType
from typing import Any, NamedTuple, Self

import aiohttp

CONNECT_TIMEOUT_S = 5.0
MAX_EVENT_BYTES = 4 * 1024 * 1024


class ClientError(Exception):
    """A request that failed. `status` is the HTTP status, or 0 if the server sent no HTTP response."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ChatPiece(NamedTuple):
    """One event of a streamed chat answer."""

    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    """`None`, like `completion_tokens`, except on the event with the usage."""
    completion_tokens: int | None
    at_s: float
    """The event's arrival, by `time.perf_counter`."""
    reasoning: str = ""
    """Text of the model's reasoning, which is not part of its answer."""


class ChatClient:
    """An async context manager with one connection pool."""

    def __init__(self, url: str, *, api_key: str | None = None, read_timeout_s: float = 300.0) -> None:
        """`url` may end in `/v1`. `read_timeout_s` is the longest accepted pause inside an answer."""
        self._root = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=read_timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers, timeout=self._timeout, connector=aiohttp.TCPConnector(limit=0)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def models(self) -> list[str]:
        """Return the names of the served models. Raises `ClientError`."""
        async with self._request("GET", "/v1/models") as response:
            body = await _json(response)
        return [str(entry["id"]) for entry in body.get("data", [])]

    async def stream_chat(self, model: str, messages: list[dict[str, str]], **params: Any) -> AsyncIterator[ChatPiece]:
        """Yield the pieces of one chat answer. `params` are added to the request's body. Raises `ClientError`."""
        body = {"model": model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        async with self._request("POST", "/v1/chat/completions", {**body, **params}) as response:
            async for event in _events(response):
                yield _piece(event)

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> _Answer:
        assert self._session is not None, "use the client as an async context manager"
        check_url(self._root)
        return _Answer(self._session, method, self._root + path, body, self._root)


def check_url(url: str) -> None:
    """Raise `ClientError` for a URL that does not begin with http:// or https://."""
    if url.startswith(("http://", "https://")):
        return
    host = url.rpartition("://")[2]
    raise ClientError(f"`{url}` does not begin with http:// or https://. Write http://{host or '127.0.0.1:8080'}")


class _Answer:
    """An HTTP exchange that raises `ClientError` for every failure, including those while the body is read."""

    def __init__(
        self, session: aiohttp.ClientSession, method: str, url: str, body: dict[str, Any] | None, root: str
    ) -> None:
        self._session, self._method, self._url, self._body, self._root = session, method, url, body, root
        self._response: aiohttp.ClientResponse | None = None

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            self._response = await self._session.request(self._method, self._url, json=self._body)
            if self._response.status == 200:
                return self._response
            with closing(self._response) as refused:
                text = (await refused.content.read(64 * 1024)).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise self._explain(error) from error
        raise ClientError(_refusal(refused.status, text), refused.status)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._response is not None
        # After an error the connection is closed, so that the server stops generating the rest of the answer.
        self._response.close() if error is not None else self._response.release()
        if isinstance(error, aiohttp.ClientError | TimeoutError):
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> ClientError:
        if isinstance(error, aiohttp.InvalidURL):
            return ClientError(f"`{self._root}` is not a URL. Use one such as http://127.0.0.1:8080")
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            return ClientError(
                f"No server answers at {self._root}. Start one with `pagemill up -f examples/llmdeployment.yaml` "
                "(port 8080) or `pagemill serve MODEL` (port 8000), or give its address with --url."
            )
        if isinstance(error, TimeoutError):
            return ClientError(f"{self._root} stopped sending in the middle of an answer.")
        return ClientError(f"The connection to {self._root} broke: {str(error) or type(error).__name__}")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of each `data:` event until `[DONE]`. Raises `ClientError` if the stream ends without it."""
    buffer = b""
    async for chunk in response.content.iter_any():
        *lines, buffer = (buffer + chunk).split(b"\n")
        if len(buffer) > MAX_EVENT_BYTES:
            raise ClientError(f"The server sent an event larger than {MAX_EVENT_BYTES} bytes.")
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # comments keep the connection alive; blank lines end events
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield _event(data)
    raise ClientError("The server ended the stream before the answer was complete.")


def _event(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise ClientError(f"The server sent an event that is not JSON: {data[:80]!r}") from error
    if not isinstance(event, dict):
        raise ClientError(f"The server sent an event that is not a JSON object: {data[:80]!r}")
    if event.get("error"):
        raise ClientError(_refusal(0, json.dumps(event)))
    return event


def _piece(event: dict[str, Any]) -> ChatPiece:
    usage = event.get("usage") or {}
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return ChatPiece(
        text=delta.get("content") or "",
        finish_reason=choices[0].get("finish_reason"),
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        at_s=time.perf_counter(),
        reasoning=delta.get("reasoning_content") or delta.get("reasoning") or "",
    )


async def _json(response: aiohttp.ClientResponse) -> dict[str, Any]:
    try:
        body = await response.json(content_type=None)
    except ValueError as error:
        raise ClientError(f"{response.url} did not answer with JSON; is it an OpenAI-compatible server?") from error
    if not isinstance(body, dict):
        raise ClientError(f"{response.url} did not answer with a JSON object; is it an OpenAI-compatible server?")
    return body


def _refusal(status: int, text: str) -> str:
    """Return an error message with the text of the server: OpenAI's `error.message`, or the start of the body."""
    try:
        message = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = text.strip()[:300] or "no explanation"
    if status == 401:
        message += " Pass the API key with --api-key or in PAGEMILL_API_KEY."
    return f"The server refused ({status}): {message}" if status else f"The server failed: {message}"


async def first_model(client: ChatClient, wanted: str | None) -> tuple[str, list[str]]:
    """Return the model to use and the models to choose from: `wanted` alone, or all served models, first one first.

    Raises `ClientError` if the server serves none.
    """
    if wanted is not None:
        return wanted, [wanted]
    names = await client.models()
    if not names:
        raise ClientError("The server serves no model yet. Wait until it is ready, or name one with --model.")
    return names[0], names
