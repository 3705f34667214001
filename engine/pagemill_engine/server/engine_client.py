"""The HTTP process's half of the engine: requests in, answers out, over one channel to the engine process.

`run` is the only reader of the channel; `submit` and `abort` are called by request tasks on the same event loop. Each
output goes through its request's `OutputProcessor` right here, so a stop string found in the text reaches the scheduler
before its next step, however slowly the client reads. A fault while one output is processed fails that request alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import NamedTuple, Protocol

from pagemill_protocol.errors import PagemillError, internal_error, invalid_field, unavailable
from pagemill_protocol.generate import GenerateRequest

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.messages import (
    Abort,
    AddRequest,
    Fatal,
    FromEngine,
    LoadProgress,
    Ready,
    Shutdown,
    StepOutputs,
    ToEngine,
    TokensOut,
)
from pagemill_engine.output.processor import OutputProcessor
from pagemill_engine.server.answer import Answer
from pagemill_engine.server.failure import StartupError
from pagemill_engine.server.lifecycle import Lifecycle
from pagemill_engine.server.metrics import ServerMetrics
from pagemill_engine.server.state_stream import StatePublisher

logger = logging.getLogger(__name__)


class Channel(Protocol):
    """What the client needs of `ipc.channels.EngineChannel`."""

    async def start(self) -> None: ...
    def send(self, message: ToEngine) -> None: ...
    async def recv(self) -> FromEngine: ...
    async def close(self) -> None: ...


class _Running(NamedTuple):
    processor: OutputProcessor
    answer: Answer


class EngineClient:
    """Owns the requests that are inside the engine process."""

    def __init__(
        self,
        config: EngineConfig,
        channel: Channel,
        lifecycle: Lifecycle,
        publisher: StatePublisher,
        metrics: ServerMetrics,
    ) -> None:
        self.ready_info: Ready | None = None
        """What the engine loaded; set once it is ready."""
        self.last_message_s = time.monotonic()
        """When the engine process last said something; it speaks at least every second, also when idle."""
        self._config = config
        self._channel = channel
        self._lifecycle = lifecycle
        self._publisher = publisher
        self._metrics = metrics
        self._running: dict[str, _Running] = {}
        self._num_sequences = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_requests(self) -> int:
        """Requests inside the engine, running or waiting."""
        return len(self._running)

    def submit(self, request: GenerateRequest, processor: OutputProcessor, answer: Answer) -> None:
        """Hand a request to the engine, or refuse it now. Once accepted, `answer` gets everything up to its end.

        Raises `PagemillError`: 503 when not ready, draining or full, 400 when the request can never fit.
        """
        self._refuse_unless_serving()
        if request.request_id in self._running:
            raise invalid_field("request_id", f"A request with id {request.request_id[:80]!r} is already running.")
        limit = self._config.max_num_seqs + self._config.max_num_waiting
        if self._num_sequences + request.sampling.n > limit:
            raise unavailable(f"The engine's queue is full: {limit} sequences are running or waiting.", retry_after_s=1)
        self._channel.send(AddRequest(request))
        self._running[request.request_id] = _Running(processor, answer)
        self._num_sequences += request.sampling.n
        self._idle.clear()
        self._metrics.request_accepted(processor)

    def abort(self, request_id: str) -> None:
        """The client left: free the request's blocks at once. Unknown or finished ids are ignored."""
        if self._forget(request_id) is not None:
            self._channel.send(Abort(request_id))

    def fail_all(self, error: PagemillError) -> None:
        """End every request with `error`, as its client's dialect shows errors."""
        for request_id in list(self._running):
            self._fail(request_id, error)

    async def wait_idle(self) -> None:
        """Return when no request is inside the engine."""
        await self._idle.wait()

    async def run(self) -> None:
        """Read the engine process until it ends. Raises `StartupError` with the reason when it died by itself."""
        await self._channel.start()
        while True:
            try:
                message = await self._channel.recv()
            except ConnectionError as error:
                raise StartupError("EngineDied", f"The engine process ended: {error}.") from error
            self.last_message_s = time.monotonic()
            self._handle(message)

    def stop(self) -> None:
        """Tell the engine process to end."""
        self._channel.send(Shutdown())

    async def close(self) -> None:
        """Wait for the engine process to end, and free what the channel holds."""
        await self._channel.close()

    def _handle(self, message: FromEngine) -> None:
        match message:
            case StepOutputs():
                self._handle_step(message)
            case LoadProgress():
                self._lifecycle.enter(message.phase, message.detail)
            case Ready():
                self._handle_ready(message)
            case Fatal():
                raise StartupError(message.reason, message.message)

    def _handle_step(self, step: StepOutputs) -> None:
        for output in step.outputs:
            self._handle_output(output)
        self._metrics.step(step)
        self._publisher.report(step.load, step.step_time, step.prefixes)

    def _handle_output(self, output: TokensOut) -> None:
        running = self._running.get(output.request_id)
        if running is None:
            return
        try:
            progress = running.processor.push(output)
        except Exception:
            logger.exception("request %s failed while its output was processed", output.request_id)
            self._fail(output.request_id, internal_error())
            return
        self._metrics.tokens(running.processor, output)
        if progress.error is not None:
            self._fail(output.request_id, progress.error)
            return
        for choice in progress.stopped_choices:
            self._channel.send(Abort(output.request_id, choice))
        running.answer.put(progress.frames)
        if progress.done:
            self._forget(output.request_id)
            self._metrics.request_finished(running.processor)

    def _fail(self, request_id: str, error: PagemillError) -> None:
        running = self._forget(request_id)
        if running is None:
            return
        self._channel.send(Abort(request_id))
        self._metrics.request_failed(running.processor, error)
        running.answer.fail(error, running.processor.failure(error))

    def _forget(self, request_id: str) -> _Running | None:
        running = self._running.pop(request_id, None)
        if running is None:
            return None
        self._num_sequences -= running.processor.request.sampling.n
        if not self._running:
            self._idle.set()
        return running

    def _handle_ready(self, ready: Ready) -> None:
        self.ready_info = ready
        self._metrics.ready(ready)
        self._lifecycle.enter("ready", f"loaded in {ready.load_s:.1f} s")

    def _refuse_unless_serving(self) -> None:
        if self._lifecycle.ready:
            return
        if self._lifecycle.ending:
            raise unavailable("This server is shutting down.", retry_after_s=1, code="draining")
        raise unavailable(f"The model is not ready yet: {self._lifecycle.detail}.", retry_after_s=2, code="not_ready")
