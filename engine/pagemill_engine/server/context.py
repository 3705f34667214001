"""The state that all routes share. `main` creates it; routes read it from `request.app.state.context`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from pagemill_api.openai.render import fingerprint
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.ipc.messages import Ready
from pagemill_engine.server.adapters import ServedAdapters
from pagemill_engine.server.engine_client import EngineClient
from pagemill_engine.server.metrics import ServerMetrics
from pagemill_engine.server.phases.draining import Draining
from pagemill_engine.server.phases.lifecycle import Lifecycle
from pagemill_engine.server.phases.sleeping import Sleeping
from pagemill_engine.server.phases.state_stream import StatePublisher
from pagemill_engine.server.request_memory import RequestMemory
from pagemill_engine.server.settings import Settings
from pagemill_protocol.errors import PagemillError, model_not_found, unavailable
from pagemill_protocol.request.answer_format import ParserSettings
from pagemill_servers.guard import ControlTokens
from pagemill_servers.keys.ring import KeyRing
from pagemill_servers.preparation_threads import PreparationThreads
from pagemill_servers.tracing.tracing import Tracing

NUM_THREADS = 2
T = TypeVar("T")


@dataclass(slots=True)
class ServerContext:
    settings: Settings
    names: list[str]
    """Model names that clients may use; the first is the model's own."""
    created_unix_s: int
    lifecycle: Lifecycle
    publisher: StatePublisher
    metrics: ServerMetrics
    tokens: ControlTokens
    """Internal tokens, which authorize `/internal/*` and the control port."""
    keys: KeyRing
    """API keys, which authorize the OpenAI routes."""
    draining: Draining
    sleeping: Sleeping
    tracing: Tracing
    memory: RequestMemory
    adapters: ServedAdapters | None = None
    """None: no adapters are served."""
    client: EngineClient | None = None
    """None until the model's headers were read and the engine process starts."""
    tokenizer: Tokenizer | None = None
    _threads: PreparationThreads = field(default_factory=lambda: PreparationThreads(NUM_THREADS))

    async def off_loop(self, work: Callable[[], T], body_bytes: int = 0) -> T:
        """Run CPU work (parsing, rendering, tokenizing) on a thread, so that other streams continue meanwhile."""
        return await self._threads.run(work, body_bytes)

    def loaded_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise self._not_ready()
        return self.tokenizer

    def ready_engine(self) -> tuple[EngineClient, Ready]:
        """Return the engine client and its ready message. Raises 503 until the engine is ready."""
        if self.client is None or self.client.ready_info is None:
            raise self._not_ready()
        return self.client, self.client.ready_info

    @property
    def parsers(self) -> ParserSettings:
        engine = self.settings.engine
        return ParserSettings(
            engine.tool_call_parser, engine.reasoning_parser, engine.chat_control_tokens, engine.hosted_tools
        )

    def system_fingerprint(self) -> str:
        _, ready = self.ready_engine()
        return fingerprint(ready.limits.weights_digest)

    def check_model(self, name: str) -> None:
        if name not in self.names and self.adapter_digest(name) is None:
            raise model_not_found(name, self.all_names)

    def rename(self, names: list[str]) -> None:
        """Serve the model under other names from now on."""
        if names != self.names:
            self.names[:] = names
            self.publisher.announce_names(names)
            self.metrics.rename(names[0])

    @property
    def all_names(self) -> list[str]:
        """The names of the model and of its adapters."""
        return self.names if self.adapters is None else [*self.names, *self.adapters.names]

    def adapter_digest(self, name: str) -> str | None:
        """Return the digest of the adapter that a name stands for; None: the model itself, or nothing. Raises
        `PagemillError` while it cannot be served."""
        return None if self.adapters is None else self.adapters.digest_of(name)

    @property
    def num_requests(self) -> int:
        return self.client.num_requests if self.client is not None else 0

    def drain(self) -> None:
        """Make the server unready. Running requests continue; `draining` decides when new ones are refused."""
        self.draining.announce(self.num_requests)

    def close(self) -> None:
        self._threads.close()
        if self.tokenizer is not None:
            self.tokenizer.close()

    def _not_ready(self) -> PagemillError:
        return unavailable(f"The model is not ready yet: {self.lifecycle.detail}.", retry_after_s=2, code="not_ready")
