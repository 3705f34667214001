"""Limits the memory of requests in the HTTP process and the engine process: bodies that arrive, and prompts.

A body counts from its first byte until it is prepared, the parts of a gateway's request until they are a request, and a
prompt from its acceptance until its answer ends. All together are limited, and those of each tenant (`shares`), so that
the requests of one leave room for those of others. `answer` and `unread` count what answers take.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Message, Receive, Scope

from pagemill_protocol.errors import invalid_field, unavailable
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.shares import RETRY_S, SharedLimit, share_exceeded
from pagemill_servers.request_middleware import header, read_body

MAX_REQUEST_BYTES = 128 * 1024 * 1024
"""Default of the setting `max_in_flight_body_bytes`."""
TOKEN_BYTES = 72
"""Memory of a token of a prompt: an integer in a list, in each of the two processes."""
SEQUENCE_TOKEN_BYTES = 8
"""Memory of a token of a prompt in the list of each sequence, in the engine process."""

PREDICTED_TOKEN_BYTES = 200
"""Memory of a predicted token in the history of each sequence, in the engine process."""


class RequestMemory:
    def __init__(self, max_bytes: int = MAX_REQUEST_BYTES) -> None:
        self._shared = SharedLimit(max_bytes)

    @property
    def num_bytes(self) -> int:
        return self._shared.used

    def take(self, tenant: str, num_bytes: int) -> None:
        """Count bytes of `tenant`, or of none (`""`). Raises `PagemillError` 429 or 503 if there is no room."""
        if self._shared.take(tenant, num_bytes):
            return
        used, limit, own = self._shared.used, self._shared.limit, self._shared.used_by(tenant)
        if tenant and used + num_bytes <= limit:
            raise share_exceeded(
                f"Your requests hold {own} bytes of the engine's memory, and the rest of {limit} is for others. Wait "
                "until some of them have ended."
            )
        raise unavailable(
            f"The requests here hold {used} bytes with their prompts, and the limit is {limit} (the setting "
            "max_in_flight_body_bytes). Retry later.",
            retry_after_s=RETRY_S,
        )

    def release(self, tenant: str, num_bytes: int) -> None:
        self._shared.release(tenant, num_bytes)

    def take_prompt(self, tenant: str, request: GenerateRequest) -> int:
        """Count a prompt; return its bytes. Raises `PagemillError` like `take`, and 400 if it can never have room."""
        num_tokens, num_sequences = len(request.prompt_token_ids), request.sampling.num_sequences
        num_bytes = num_tokens * (TOKEN_BYTES + SEQUENCE_TOKEN_BYTES * num_sequences)
        num_bytes += len(request.predicted_token_ids) * (TOKEN_BYTES + PREDICTED_TOKEN_BYTES * num_sequences)
        if num_bytes > self._shared.limit:
            raise invalid_field(
                "n",
                f"The prompt's {num_tokens} tokens take {num_bytes} bytes for {num_sequences} choices, and the setting "
                f"max_in_flight_body_bytes is {self._shared.limit}. Ask for fewer choices (n, best_of), or shorten the "
                "prompt.",
            )
        self.take(tenant, num_bytes)
        return num_bytes

    @contextmanager
    def arriving(self, tenant: str) -> Iterator[ArrivingBody]:
        """Count a body for the block, in which it is read and prepared."""
        body = ArrivingBody(self, tenant)
        try:
            yield body
        finally:
            self.release(tenant, body.num_bytes)


class ArrivingBody:
    """One body, and the bytes that were counted for it."""

    def __init__(self, memory: RequestMemory, tenant: str) -> None:
        self.num_bytes = 0
        self._memory = memory
        self._tenant = tenant

    async def read(self, scope: Scope, receive: Receive, max_bytes: int) -> bytes:
        """Return the body. Raises `PagemillError` 429 or 503 without room for it, before it arrives if it says its
        length."""
        declared = int(header(scope, b"content-length") or 0)
        if declared <= max_bytes:  # otherwise it is refused for its own size
            self._hold(declared)
        num_received = 0

        async def counted() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            self._hold(num_received)
            return message

        return await read_body(counted)

    def _hold(self, num_bytes: int) -> None:
        if num_bytes > self.num_bytes:
            self._memory.take(self._tenant, num_bytes - self.num_bytes)
            self.num_bytes = num_bytes
