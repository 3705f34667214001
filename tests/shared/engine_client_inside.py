"""An engine client whose engine is ready, with a channel that only records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine_ready import LIMITS, engine_ready

from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.messages import StepOutputs, TokensOut
from pagemill_engine.output.processor import OutputProcessor
from pagemill_engine.server.answer import Answer
from pagemill_engine.server.engine_client import EngineClient
from pagemill_engine.server.metrics import ServerMetrics
from pagemill_engine.server.phases.lifecycle import Lifecycle
from pagemill_engine.server.phases.sleeping import Sleeping
from pagemill_engine.server.phases.state_stream import StatePublisher
from pagemill_engine.server.unread import MAX_UNREAD_BYTES_IN_ALL
from pagemill_protocol.request.generate import GenerateRequest


class Inside:
    """A client whose engine is ready; `sent` contains the messages to the engine process."""

    def __init__(
        self, tokenizer: Tokenizer, config: EngineConfig, max_unread_bytes: int = MAX_UNREAD_BYTES_IN_ALL
    ) -> None:
        self.sent: list[Any] = []
        self._tokenizer = tokenizer
        lifecycle, metrics = Lifecycle(), ServerMetrics("m", config)
        publisher = StatePublisher(["m"])
        sleeping = Sleeping(lifecycle, publisher, metrics)
        channel: Any = self
        self.client = EngineClient(channel, lifecycle, publisher, metrics, sleeping, max_unread_bytes)
        self.client._handle(engine_ready(limits=replace(LIMITS, max_num_waiting=config.max_num_waiting)))

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def submit(self, request: GenerateRequest) -> Answer:
        answer = Answer(1, self.client.unread)
        self.client.submit(request, OutputProcessor(request, self._tokenizer), answer)
        return answer

    def engine_says(self, *outputs: TokensOut) -> None:
        self.client._handle(StepOutputs(outputs=list(outputs)))
