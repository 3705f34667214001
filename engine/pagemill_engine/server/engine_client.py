"""The HTTP process's end of the channel to the engine process: sends requests, receives outputs.

`run` is the only reader of the channel; request tasks on the same event loop call `submit` and `abort`. Each output
goes through its request's `OutputProcessor` at once, so that a stop string found in the text reaches the scheduler
before its next step, however slowly the client reads. A large output, such as a report on a long prompt or the answer
of a beam search, is processed in parts, with other work of the event loop between them. A fault while one output is
processed fails that request alone. When unread answers take too much memory, the slowest readers' requests end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from pagemill_engine.failure import StartupError
from pagemill_engine.ipc.channels import EngineChannel, EngineDied
from pagemill_engine.ipc.messages import (
    Abort,
    AdapterRead,
    AdapterUse,
    AddRequest,
    Awake,
    Fatal,
    FromEngine,
    Heartbeat,
    LoadProgress,
    RaiseAllowance,
    Ready,
    Slept,
    StepOutputs,
    ToEngine,
    TokensOut,
)
from pagemill_engine.output.processor import Frame, Processor, is_large, parts_of
from pagemill_engine.scheduler.admission import Admission, wider_than_queue
from pagemill_engine.server.adapter_loads import AdapterLoads
from pagemill_engine.server.answer import Answer, PromptAnswer
from pagemill_engine.server.metrics import RequestTiming, ServerMetrics
from pagemill_engine.server.phases.lifecycle import Lifecycle
from pagemill_engine.server.phases.sleeping import Sleeping
from pagemill_engine.server.phases.state_stream import StatePublisher
from pagemill_engine.server.request_memory import RequestMemory
from pagemill_engine.server.unread import MAX_UNREAD_BYTES_IN_ALL, UnreadAnswers
from pagemill_protocol.errors import (
    PagemillError,
    answer_too_large,
    answers_too_large,
    client_too_slow,
    invalid_field,
    rendering_failed,
    unavailable,
)
from pagemill_protocol.frames import MAX_PAYLOAD_BYTES
from pagemill_protocol.request.generate import GenerateRequest

logger = logging.getLogger(__name__)

COUNTED_BYTES = 1024
"""Growth of a body after which it is counted again."""


@dataclass(slots=True, eq=False)
class _Running:
    request_id: str
    """Id that the HTTP middleware or the gateway assigned."""
    processor: Processor
    answer: Answer
    timing: RequestTiming
    waiting: deque[TokensOut] = field(default_factory=deque)
    """Parts of large outputs, and the outputs behind them."""
    num_held_bytes: int = 0
    """Bytes of `processor` that `answer` counts."""
    tenant: str = ""
    """The tenant for which the prompt's memory counts."""
    num_prompt_bytes: int = 0


class EngineClient:
    """Client of the engine process; it keeps track of the requests inside the engine."""

    def __init__(
        self,
        channel: EngineChannel,
        lifecycle: Lifecycle,
        publisher: StatePublisher,
        metrics: ServerMetrics,
        sleeping: Sleeping,
        max_unread_bytes: int = MAX_UNREAD_BYTES_IN_ALL,
        memory: RequestMemory | None = None,
    ) -> None:
        self.unread = UnreadAnswers(max_unread_bytes)
        self._memory = memory or RequestMemory()
        self.ready_info: Ready | None = None
        """Properties of the loaded engine; None until it is ready."""
        self.last_message_s = time.monotonic()
        """Time at which the engine process last sent a report, which it does at least every second, also when idle.

        Heartbeats do not count: a process whose loop hangs sends them too.
        """
        self.adapters = AdapterLoads(channel.send)
        self.on_ready: Callable[[], Awaitable[None]] | None = None
        """Awaited before the phase `ready` is entered; it may raise `StartupError`."""
        self.on_adapters: Callable[[AdapterUse], None] = lambda use: None
        self._getting_ready: asyncio.Task[None] | None = None
        self._admission: Admission | None = None
        self._channel = channel
        self._lifecycle = lifecycle
        self._publisher = publisher
        self._metrics = metrics
        self._sleeping = sleeping
        self._running: dict[str, _Running] = {}
        """Requests by their id inside the engine.

        That id is never reused: late messages about an aborted request cannot reach another one with the same request
        id.
        """
        self._engine_ids: dict[str, str] = {}
        """Ids inside the engine of the requests in `_running`, by request id."""
        self._num_accepted = 0
        self._num_sequences = 0
        """Number of choices of all requests inside the engine."""
        self._num_sequences_running = 0
        """Number of running sequences in the engine's latest report."""
        self._large: deque[_Running] = deque()
        """Requests with parts of large outputs, in turn."""
        self._large_task: asyncio.Task[None] | None = None
        self._starting: asyncio.Future[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_requests(self) -> int:
        """Number of requests inside the engine, running or waiting."""
        return len(self._running)

    def check_capacity(self, requests: list[GenerateRequest]) -> None:
        """Raise `PagemillError` 400 if all prompts of one HTTP request together exceed the queue's limit."""
        assert self.ready_info is not None
        num_sequences, room = (
            sum(each.sampling.num_sequences for each in requests),
            self.ready_info.limits.max_num_waiting,
        )
        if len(requests) > 1 and num_sequences > room:
            raise wider_than_queue("prompt", num_sequences, room)

    def submit(self, request: GenerateRequest, processor: Processor, answer: Answer, tenant: str = "") -> None:
        """Send a request to the engine, or refuse it. Once accepted, `answer` gets all its frames.

        The engine's own admission rules are applied here too, so that a refusal is known before any status is sent. The
        id that `abort` uses is added to `answer.engine_ids`.

        The memory of its prompt counts for `tenant`. Raises `PagemillError`: 503 when not ready, draining or full, 429
        beyond the tenant's share, 409 for other weights, 400 when the request can never fit.
        """
        self._refuse_unless_serving()
        assert self._admission is not None
        self._refuse_other_weights(request)
        if processor.complete:
            answer.put([processor.last_frame()])
            return
        if request.request_id in self._engine_ids:
            raise invalid_field("request_id", f"A request with id {request.request_id[:80]!r} is already running.")
        num_waiting = max(0, self._num_sequences - self._num_sequences_running)
        self._admission.check(request, num_waiting)
        num_prompt_bytes = self._memory.take_prompt(tenant, request)
        self._num_accepted += 1
        engine_id = f"{request.request_id}#{self._num_accepted}"
        self._channel.send(AddRequest(msgspec.structs.replace(request, request_id=engine_id)))
        timing = self._metrics.request_accepted(request)
        self._running[engine_id] = _Running(
            request.request_id, processor, answer, timing, tenant=tenant, num_prompt_bytes=num_prompt_bytes
        )
        self._engine_ids[request.request_id] = engine_id
        answer.engine_ids.append(engine_id)
        answer.parts.append(PromptAnswer(processor, timing))
        self._num_sequences += request.sampling.num_sequences
        self._publisher.arrived(self._num_accepted, request)
        self._idle.clear()

    def abort(self, answer: Answer) -> None:
        """Abort the requests of an answer whose client has disconnected, so that their blocks are freed at once.

        Finished requests are ignored.
        """
        for engine_id in answer.engine_ids:
            running = self._forget(engine_id)
            if running is not None:
                self._channel.send(Abort(engine_id))
                self._metrics.request_aborted("client_left")
                self._metrics.request_finished(running.timing, running.processor)

    def raise_allowance(self, request_id: str, allowance: int) -> None:
        """Let each sequence of a request generate up to `allowance` tokens, if the request is running."""
        engine_id = self._engine_ids.get(request_id)
        if engine_id is not None:
            self._channel.send(RaiseAllowance(engine_id, allowance))

    def fail_all(self, error: PagemillError) -> None:
        """End every request with `error` in its client's dialect."""
        for engine_id in list(self._running):
            self._fail(engine_id, error)

    async def wait_idle(self) -> None:
        """Wait until no request is inside the engine."""
        await self._idle.wait()

    def send(self, message: ToEngine) -> None:
        """Send a message to the engine process, in order behind all earlier ones."""
        self._channel.send(message)

    async def start(self) -> None:
        """Let the engine process load the model. Its messages are read by `run`."""
        self._starting = asyncio.ensure_future(self._channel.start())
        await asyncio.shield(self._starting)

    async def run(self) -> None:
        """Read the engine process's messages until it ends. Raises `StartupError` with the reason if it died."""
        if self._starting is None:
            await self.start()
        while True:
            try:
                message = await self._channel.recv()
            except EngineDied as error:
                raise StartupError("EngineDied", f"The engine process ended: {error}.") from error
            self._handle(message)
            if self._getting_ready is not None and self._getting_ready.done():
                self._getting_ready.result()
                self._getting_ready = None
            await asyncio.sleep(0)  # messages that wait already are received without a pause: let other tasks run

    def kill(self) -> None:
        """End the engine process at once, even in the middle of a step, so that `close` does not wait for it."""
        self._channel.kill()

    async def close(self) -> None:
        """End the engine process and close the channel."""
        for task in (self._large_task, self._getting_ready):
            if task is not None:
                task.cancel()
        if self._starting is not None:  # a start that was interrupted leaves a process behind unless it is awaited
            await asyncio.wait([self._starting])
        if self.ready_info is None:
            self._channel.terminate()
        await self._channel.close()

    def _handle(self, message: FromEngine) -> None:
        if isinstance(message, Heartbeat):
            self._publisher.heartbeat(message.expected_step_ms)
            return
        self.last_message_s = time.monotonic()
        match message:
            case StepOutputs():
                self._handle_step(message)
            case LoadProgress():
                self._lifecycle.enter(message.phase, message.detail)
            case Ready():
                self._handle_ready(message)
            case Slept():
                self._sleeping.slept(message)
            case Awake():
                self._sleeping.record_wake(message)
            case AdapterRead():
                self.adapters.answered(message)
            case Fatal():
                raise StartupError(message.reason, message.message)

    def _handle_step(self, step: StepOutputs) -> None:
        for output in step.outputs:
            self._handle_output(output)
        self._num_sequences_running = step.load.num_requests_running
        self._metrics.step(step)
        if step.adapters is not None:
            self.on_adapters(step.adapters)
        self._publisher.report(step.load, step.step_time, step.prefixes, step.num_added)
        if step.ranks is not None:
            self._publisher.announce_slow_rank(step.ranks.slow)

    def _handle_output(self, output: TokensOut) -> None:
        running = self._running.get(output.request_id)
        if running is None:
            return
        if running.waiting or is_large(output):
            self._process_later(running, output)
        else:
            self._process(running, output)

    def _process_later(self, running: _Running, output: TokensOut) -> None:
        if not running.waiting:
            self._large.append(running)
        running.waiting += parts_of(output)
        if self._large_task is None:
            self._large_task = asyncio.create_task(self._process_large(), name="large outputs")

    async def _process_large(self) -> None:
        """Process one part in each turn of the event loop, of each request in turn."""
        while self._large:
            running = self._large.popleft()
            output = running.waiting[0]
            if self._running.get(output.request_id) is running:
                self._process(running, output)
                running.waiting.popleft()
                if running.waiting:
                    self._large.append(running)
            await asyncio.sleep(0)
        self._large_task = None

    def _process(self, running: _Running, output: TokensOut) -> None:
        try:
            progress = running.processor.push(output)
        except Exception:
            logger.exception(
                "a request failed while its output was processed", extra={"request_id": running.request_id}
            )
            self._fail(output.request_id, rendering_failed())
            return
        self._metrics.tokens(running.timing, output, len(running.processor.request.prompt_token_ids))
        if progress.error is not None:
            self._fail(output.request_id, progress.error)
            return
        answer = running.answer
        if running.processor.request.stream and answer.exceeds_backlog:
            self._cut(answer)
            return
        for choice in progress.stopped_choices:
            self._channel.send(Abort(output.request_id, choice))
        num_held_bytes = running.processor.num_held_bytes
        if num_held_bytes and self._is_too_large(num_held_bytes, progress.frames):
            for engine_id in answer.engine_ids:
                self._fail(engine_id, answer_too_large(MAX_PAYLOAD_BYTES))
            return
        if progress.done:
            self._forget(output.request_id)
            self._metrics.request_finished(running.timing, running.processor)
        elif num_held_bytes - running.num_held_bytes > COUNTED_BYTES:
            answer.collect(num_held_bytes - running.num_held_bytes)
            running.num_held_bytes = num_held_bytes
        answer.put(progress.frames)
        if self.unread.is_full:
            self._end_excess()

    def _is_too_large(self, num_held_bytes: int, frames: list[Frame]) -> bool:
        """Whether an answer that is not streamed has become too large to be sent."""
        if num_held_bytes > MAX_PAYLOAD_BYTES:
            return True
        return bool(frames) and bool(frames[-1].rest) and frames[-1].num_bytes > MAX_PAYLOAD_BYTES

    def _end_excess(self) -> None:
        for holder in self.unread.excess():
            if isinstance(holder, Answer):
                self._cut(holder)

    def _cut(self, answer: Answer) -> None:
        """End the requests of an answer, and drop what its reader has not taken."""
        if not answer.parts:
            return
        waits_for_reader = answer.parts[0].processor.request.stream or answer.num_unread_bytes > 0
        error = client_too_slow() if waits_for_reader else answers_too_large(self.unread.num_bytes)
        for engine_id in answer.engine_ids:
            if self._forget(engine_id) is not None:
                self._channel.send(Abort(engine_id))
                self._metrics.request_failed()
        answer.cut(error, answer.parts[0].processor.failure(error))

    def _fail(self, engine_id: str, error: PagemillError) -> None:
        running = self._forget(engine_id)
        if running is None:
            return
        self._channel.send(Abort(engine_id))
        self._metrics.request_failed()
        running.answer.fail(error, running.processor.failure(error))

    def _forget(self, engine_id: str) -> _Running | None:
        running = self._running.pop(engine_id, None)
        if running is None:
            return None
        self._engine_ids.pop(running.request_id, None)
        self._num_sequences -= running.processor.request.sampling.num_sequences
        running.answer.collect(-running.num_held_bytes)
        self._memory.release(running.tenant, running.num_prompt_bytes)
        if not self._running:
            self._idle.set()
        return running

    def _handle_ready(self, ready: Ready) -> None:
        self.ready_info = ready
        self._admission = Admission(ready.limits)
        self._metrics.ready(ready)
        self._publisher.describe(ready)
        if self.on_ready is None:
            self._enter_ready(ready)
        else:
            self._getting_ready = asyncio.create_task(self._get_ready(ready, self.on_ready), name="getting ready")

    async def _get_ready(self, ready: Ready, on_ready: Callable[[], Awaitable[None]]) -> None:
        await on_ready()
        self._enter_ready(ready)

    def _enter_ready(self, ready: Ready) -> None:
        self._lifecycle.enter("ready", f"loaded in {ready.load_s:.1f} s")

    def _refuse_other_weights(self, request: GenerateRequest) -> None:
        assert self.ready_info is not None
        mine = self.ready_info.limits.weights_digest
        if request.weights_digest and request.weights_digest != mine:
            raise PagemillError(
                f"This answer was begun with weights {request.weights_digest[:12]}; this engine has {mine[:12]}. "
                "Send it to an engine with the same weights, or start it again.",
                status=409,
                param="weights_digest",
                code="other_weights",
            )

    def _refuse_unless_serving(self) -> None:
        if self._lifecycle.accepts_requests:
            return
        if self._lifecycle.ending:
            raise unavailable("This server is shutting down.", retry_after_s=1, code="draining")
        raise unavailable(f"The model is not ready yet: {self._lifecycle.detail}.", retry_after_s=2, code="not_ready")
