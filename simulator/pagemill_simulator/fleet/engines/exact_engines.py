"""Engines whose every step is scheduled by the real scheduler on the real KV manager. Implements `engines`.

Time and forward passes are simulated (`pagemill_simulator.pod`); prompts are hashed as the gateway hashes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.messages import StepOutputs
from pagemill_protocol.report.state import EngineLoad
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_routing.brain.interface import HashScheme
from pagemill_routing.config import RoutingConfig
from pagemill_routing.prompt_hashes import PromptHashes
from pagemill_simulator.adapters import AdapterSettings
from pagemill_simulator.events import Events
from pagemill_simulator.fleet.engines.engines import Deliver, Observe, TokenDelivery
from pagemill_simulator.pod import RunningPod, SimulatedPod

VOCAB_SIZE = 32000


class ExactEngines:
    """Implements `engines.EngineKind`."""

    is_exact = True

    def __init__(self, config: EngineConfig, events: Events, *, adapters: AdapterSettings | None = None) -> None:
        """`adapters` are each pod's adapter settings; None: pods serve no adapters."""
        self.vocab_size = config.vocab_size or VOCAB_SIZE
        self._config = msgspec.structs.replace(config, vocab_size=self.vocab_size)
        self._events = events
        self._adapters = adapters
        self._hashes = PromptHashes(RoutingConfig().remembered_prefix_chunks)

    def start(self, pod_name: str, observe: Observe, deliver: Deliver, start_s: dict[str, float]) -> ExactEngine:
        pod = SimulatedPod(pod_name, self._config, serves_adapters=self._adapters is not None, start_s=start_s)
        return ExactEngine(pod, self._events, observe, deliver, self._adapters)

    def prefix_chunks(
        self, prompt: Sequence[int], session: int | None, scheme: HashScheme, adapter_digest: str
    ) -> tuple[bytes, ...]:
        return self._hashes.hashes(scheme, "", prompt, adapter_digest=adapter_digest)


class ExactEngine:
    """Implements `engines.SimulatedEngine`."""

    def __init__(
        self,
        pod: SimulatedPod,
        events: Events,
        observe: Observe,
        deliver: Deliver,
        adapters: AdapterSettings | None,
    ) -> None:
        self._pod = pod
        self._deliver = deliver
        self._running = RunningPod(pod, events, observe=observe, deliver=self._delivered, adapters=adapters)
        self.snapshot = partial(pod.frame, snapshot=True)
        self.check = pod.core.check_integrity
        self.stop = self._running.stop
        self.num_output_tokens = 0
        """Tokens that have reached the gateway."""

    @property
    def is_up(self) -> bool:
        return self._running.is_up

    @property
    def weights_digest(self) -> str:
        return self._pod.weights_digest

    @property
    def load(self) -> EngineLoad:
        return self._pod.load

    @property
    def num_adapter_loads(self) -> int:
        return self._running.num_adapter_loads

    def enter(self, request: GenerateRequest, session: int | None) -> None:
        self._running.enter(request)

    def drain(self) -> None:
        self._pod.drain()
        self._running.request_frame()

    def _delivered(self, outputs: StepOutputs) -> None:
        self.num_output_tokens += sum(len(each.token_ids) for each in outputs.outputs)
        self._deliver(
            [
                TokenDelivery(
                    each.request_id,
                    each.token_ids,
                    each.num_cached_tokens,
                    each.finish_reason is not None,
                    str(each.error or ""),
                )
                for each in outputs.outputs
            ]
        )
