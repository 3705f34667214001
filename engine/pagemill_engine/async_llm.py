"""`AsyncLLM`: a model for programs with an event loop, like vLLM's class of that name.

Requests may start and end at any time. The engine runs in a process of its own, behind the client that the server uses
too (`server.engine_client`); outputs are those of `LLM`. There is no HTTP server. `offline_prompts` reads prompts.
"""

from __future__ import annotations

import asyncio
import os
import uuid
import weakref
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any

from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.ipc.channels import EngineChannel
from pagemill_engine.ipc.messages import TokensOut
from pagemill_engine.ipc.process import EngineProcess
from pagemill_engine.offline import Prompt, config_of, priorities_of
from pagemill_engine.offline_adapters import LoRARequest, requests_of, serves_none
from pagemill_engine.offline_prompts import EncodedPrompt, PromptEncoder
from pagemill_engine.output.collecting import CollectedRequest
from pagemill_engine.output.processor import Frame, Progress, engine_error
from pagemill_engine.output.results import RequestOutput
from pagemill_engine.server.answer import Answer
from pagemill_engine.server.engine_client import EngineClient
from pagemill_engine.server.metrics import ServerMetrics
from pagemill_engine.server.phases.lifecycle import Lifecycle
from pagemill_engine.server.phases.sleeping import Sleeping
from pagemill_engine.server.phases.state_stream import StatePublisher
from pagemill_models.adapters.errors import AdapterError, refused
from pagemill_models.sources import SourceError, default_name, resolve_adapter
from pagemill_protocol.errors import PagemillError, invalid_field
from pagemill_protocol.request.generate import FrameMeta, GenerateRequest, Usage
from pagemill_protocol.request.sampling import SamplingParams


class EngineArgs:
    """Arguments from which an `AsyncLLM` is created later."""

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        self.model = model
        self.settings = settings


class AsyncLLM:
    """One model in a process of its own. All methods but the constructor must be called on one event loop.

    Arguments are those of `LLM`. The model loads from the construction on; the first `generate` waits for it.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        self._encoder = PromptEncoder(config_of(model, settings))
        config = self._encoder.config
        self._process = EngineProcess.launch(config)
        self._end_process = weakref.finalize(self, self._process.discard)
        self._streams: dict[str, _Stream] = {}
        self._digests: dict[LoRARequest, str] = {}
        self._starting: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ready = asyncio.Event()
        self._failure: BaseException | None = None
        self._channel = EngineChannel(config, self._process)
        names = [default_name(config.model)]
        lifecycle = Lifecycle(self._on_phase)
        self._publisher = StatePublisher(names)
        metrics = ServerMetrics(names[0], config)
        sleeping = Sleeping(lifecycle, self._publisher, metrics)
        self._client = EngineClient(self._channel, lifecycle, self._publisher, metrics, sleeping)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLM:
        return cls(engine_args.model, **engine_args.settings)

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, like `LLM.get_tokenizer`."""
        return self._encoder.hugging_face()

    def get_default_sampling_params(self) -> SamplingParams:
        return self._encoder.default_sampling()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: Any = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs of one prompt as they arrive, in `sampling_params.output_kind`.

        A slow caller gets fewer, larger outputs. The request ends when its caller leaves the loop. Raises like
        `LLM.generate`.
        """
        (adapter,) = requests_of(lora_request, 1)
        await self._serving()
        digest = "" if adapter is None else await self._digest(adapter)
        encoded: list[EncodedPrompt] = await asyncio.to_thread(self._encoder.prompts, prompt, sampling_params)
        if len(encoded) != 1:
            raise invalid_field("prompt", f"prompt has {len(encoded)} prompts. Call generate once for each.")
        name = request_id or f"request-{uuid.uuid4().hex}"
        if name in self._streams:
            raise invalid_field("request_id", f"A request with id {name[:80]!r} is already running.")
        request = self._encoder.request(encoded[0], name, priorities_of([priority], 1)[0], digest)
        stream = _Stream(request, encoded[0].text, self._encoder.tokenizer)
        self._client.submit(request, stream, stream.answer)
        self._streams[name] = stream
        try:
            while not stream.ended:
                output = await stream.next()
                if output is not None:
                    yield output
        finally:
            del self._streams[name]
            self._client.abort(stream.answer)

    async def _digest(self, adapter: LoRARequest) -> str:
        """Return the digest of an adapter, which is read at its first use. Raises `PagemillError`."""
        if not self._encoder.config.enable_lora:
            raise serves_none("AsyncLLM")
        if adapter not in self._digests:
            try:
                path = await asyncio.to_thread(resolve_adapter, adapter.lora_path, "lora_path")
                self._digests[adapter] = (await self._client.adapters.load(path)).digest
            except (AdapterError, SourceError) as error:
                raise refused(error.message, "lora_request") from error
        return self._digests[adapter]

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests; their last output has `finish_reason` "abort". Ids of ended requests are ignored."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            stream = self._streams.get(name)
            if stream is not None:
                self._client.abort(stream.answer)
                stream.abort()

    async def check_health(self) -> None:
        """Return once the model is loaded. Raises the reason if the engine cannot start or has ended."""
        await self._serving()

    def shutdown(self) -> None:
        """End the engine process now; running requests fail."""
        if not self._end_process.alive:
            return
        self._client.fail_all(PagemillError("This AsyncLLM was shut down.", status=503, code="shut_down"))
        for task in self._tasks:
            task.cancel()
        if self._starting is not None:
            self._channel.discard()
        self._end_process()
        self._encoder.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    async def _serving(self) -> None:
        if not self._end_process.alive:
            raise RuntimeError("This AsyncLLM was shut down. Make a new one.")
        if self._starting is None:
            self._starting = asyncio.create_task(self._client.run(), name="engine client")
            self._starting.add_done_callback(self._on_end)
            self._tasks = [self._starting, asyncio.create_task(self._publisher.run(), name="publisher")]
        await self._ready.wait()
        if self._failure is not None:
            raise self._failure
        if self._encoder.max_model_len == 0 and self._client.ready_info is not None:
            self._encoder.max_model_len = self._client.ready_info.limits.max_model_len

    def _on_phase(self, phase: str, detail: str) -> None:
        if phase == "ready":
            self._encoder.opened.forget_links()
            self._ready.set()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """Fail all requests, including later ones, after the engine process ended by itself."""
        if task.cancelled():
            return
        self._failure = task.exception()
        try:
            self._encoder.opened.check()
        except SourceError as error:  # the fetch's fault explains what the engine process missed
            self._failure = error
        self._encoder.opened.forget_links()
        self._ready.set()
        self._client.fail_all(PagemillError(str(self._failure), status=503, type="server_error", code="engine_failed"))


class _Stream:
    """One request: a `Processor` for the engine client and a source of outputs for the caller."""

    def __init__(self, request: GenerateRequest, text: str | None, tokenizer: Tokenizer) -> None:
        self.request = request
        self.complete = False
        """No answer is complete at the start, because there is no resume."""
        self.num_held_bytes = 0
        """The caller's memory is not the server's."""
        self.answer = Answer()
        self.ended = False
        self._collected = CollectedRequest(request, text, tokenizer)
        self._error: PagemillError | None = None
        self._has_news = asyncio.Event()

    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=len(self.request.prompt_token_ids), completion_tokens=self.num_new_tokens)

    @property
    def num_new_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self._collected.output.outputs)

    @property
    def finish_reasons(self) -> list[str]:
        return [output.finish_reason or "abort" for output in self._collected.output.outputs]

    def push(self, out: TokensOut) -> Progress:
        if out.error is not None:
            return Progress(error=engine_error(out))
        stopped = [out.choice] if self._collected.push(out) else []
        self._has_news.set()
        return Progress(stopped_choices=stopped, done=self._collected.finished)

    def failure(self, error: PagemillError) -> Frame:
        self._error = error
        self._has_news.set()
        return self.last_frame()

    def last_frame(self) -> Frame:
        return Frame(FrameMeta(last=True), b"")

    def abort(self) -> None:
        self._collected.abort()
        self._has_news.set()

    async def next(self) -> RequestOutput | None:
        """Wait for new output.

        Returns None if there is nothing to show yet. Raises `PagemillError` if the request failed.
        """
        await self._has_news.wait()
        self._has_news.clear()
        if self._error is not None:
            raise self._error
        self.ended = self._collected.finished
        return self._collected.take()
