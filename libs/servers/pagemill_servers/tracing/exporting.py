"""Export spans to an OTLP/HTTP receiver, in batches, from a separate thread. `messages` encodes them.

When a request ends, the caller's thread only decides whether it is sampled; the exporting thread makes its spans.
Nothing waits for the receiver: while it is unreachable, traces beyond a fixed number are dropped. A gateway sends its
engines' spans as well, under their own service name, so engines behind it need neither settings nor network access.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import threading
import urllib.error
import urllib.request
from collections import deque
from http import HTTPStatus

from starlette.types import Scope

from pagemill_servers.tracing.config import TracingConfig
from pagemill_servers.tracing.context import TraceContext, trace_context
from pagemill_servers.tracing.messages import SpanBatch, WriteSpans

logger = logging.getLogger(__name__)

EXPORT_TIMEOUT_S = 5.0
MAX_WAITING_TRACES = 2048
MAX_BATCH_TRACES = 256
BATCH_DELAY_S = 1.0
END_CHECK_S = 0.02
RETRIED = {
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
}
"""Statuses after which OTLP retries; with any other error the receiver will not accept that batch."""


class ExportedTraces:
    def __init__(self, config: TracingConfig) -> None:
        """Start the thread. Raises `SettingsError` when the file of headers cannot be used."""
        self._ratio = config.sample_ratio
        self._endpoint = config.endpoint
        self._headers = {"Content-Type": "application/x-protobuf", **config.headers()}
        self._waiting: deque[tuple[TraceContext, WriteSpans]] = deque()
        self._closing = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def finished(self, scope: Scope, write: WriteSpans) -> str:
        context = trace_context(scope, self._ratio)
        if not context.sampled:
            return ""
        if len(self._waiting) < MAX_WAITING_TRACES:
            self._waiting.append((context, write))
        return context.trace_id.hex()

    async def close(self) -> None:
        self._closing.set()
        # Cancelling this ends the wait at once; a join in the executor's thread could not be cancelled.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXPORT_TIMEOUT_S):
                while self._thread.is_alive():  # noqa: ASYNC110 (a thread has no event of a loop)
                    await asyncio.sleep(END_CHECK_S)

    def _run(self) -> None:
        unsent, is_closing = b"", False
        while not is_closing:
            is_closing = self._closing.wait(BATCH_DELAY_S)
            while unsent or self._waiting:
                unsent = self._sent(unsent or self._next_batch())
                if unsent:
                    break

    def _next_batch(self) -> bytes:
        batch = SpanBatch()
        for _ in range(min(len(self._waiting), MAX_BATCH_TRACES)):
            context, write = self._waiting.popleft()
            try:
                write(batch.trace(context))
            except Exception:
                logger.exception("the spans of a request could not be made: they are missing from its trace")
        return batch.encoded()

    def _sent(self, body: bytes) -> bytes:
        """Send one batch. Returns the part to send again, which is all or nothing."""
        request = urllib.request.Request(self._endpoint, body, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=EXPORT_TIMEOUT_S) as response:
                response.read()
        except urllib.error.HTTPError as error:
            error.close()
            self._report(f"status {error.code}")
            return body if error.code in RETRIED else b""
        except (OSError, http.client.HTTPException) as error:
            self._report(str(error) or type(error).__name__)
            return body
        self._failing = False
        return b""

    def _report(self, reason: str) -> None:
        """Log a failure once, until the receiver accepts spans again."""
        if not self._failing:
            logger.warning("traces are not exported: %s. Check tracing.endpoint and its receiver.", reason)
        self._failing = True
