"""One engine of a simulated cluster: the real scheduler and KV manager, and the frames that it sends to its gateway.

Frames have the content of the real server's (`server.phases.state_stream`): the load after the latest step and
the prefix changes since the previous frame, at most 20 per second and at least one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.messages import StepOutputs
from pagemill_execution.runners.base import RunnerInfo
from pagemill_execution.runners.null import DEFAULT_STEP_TIME
from pagemill_execution.sizing.kv_sizes import CacheBlocks
from pagemill_protocol.hashes import HASH_VERSION, NO_HASHES
from pagemill_protocol.report.adapters import AdapterSlots
from pagemill_protocol.report.cache_kinds import ONE_KIND, chunk_blocks, further_chunk_blocks
from pagemill_protocol.report.state import Digests, EngineLoad, StateFrame
from pagemill_protocol.report.step_time import StepTimeModel
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_simulator.adapters import AdapterBay, AdapterSettings
from pagemill_simulator.clock import VirtualClock
from pagemill_simulator.events import Events
from pagemill_simulator.speculation import simulated_core

NETWORK_S = 0.001
"""Seconds in each direction between gateway and engine."""
FRAME_INTERVAL_S = 0.05
HEARTBEAT_S = 1.0


class FixedStepTime(StepTimeModel):
    """The step times of a calibrated engine whose steps take exactly what they were found to take: it learns
    nothing.
    """

    def observe(self, num_tokens: int, decode_context_tokens: int, chunk_context_products: int, ms: float) -> None:
        self._num_observed += 1


def digests_of(info: RunnerInfo, *, hashes: bool) -> Digests:
    """Return the digests that an engine with this runner reports, in the exact and in the fast simulation."""
    return Digests(
        weights=info.weights_digest,
        tokenizer_bundle="sim",
        kv_dtype=info.kv_dtype,
        hash_version=HASH_VERSION if hashes else NO_HASHES,
    )


class SimulatedPod:
    def __init__(
        self,
        name: str,
        config: EngineConfig,
        *,
        serves_adapters: bool = False,
        start_s: dict[str, float] | None = None,
    ) -> None:
        """`start_s`: the seconds of each phase of its start, which it reports."""
        self.name = name
        self.clock = VirtualClock()
        """Ahead of the cluster's clock while a step runs."""
        self.core = simulated_core(config, self.clock.now, self.clock.advance, serves_adapters=serves_adapters)
        settings = self.core.config
        self.core.step_time = FixedStepTime.from_params(settings.step_time or DEFAULT_STEP_TIME)
        info, self._sequence = self.core.runner.info, 0
        chunk = chunk_blocks(info.kinds, info.num_blocks, info.block_size)
        self._prefixes: dict[bytes, bool] = {}
        self._num_held = self._num_held_tokens = 0
        self._frame = StateFrame(
            sequence=0,
            digests=digests_of(info, hashes=settings.enable_prefix_caching),
            step_time=settings.step_time or self.core.step_time.params(),
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            max_num_batched_tokens=settings.step.max_num_batched_tokens,
            max_num_seqs=settings.step.max_num_seqs,
            prefix_chunk_blocks=chunk,
            further_chunk_blocks=further_chunk_blocks(info.kinds, chunk),
            kinds=[] if info.kinds == ONE_KIND else list(info.kinds),
            load=EngineLoad(num_kv_bytes_total=CacheBlocks(info.kinds, info.blocks_of_kinds).num_bytes),
            start_s=start_s or {},
        )

    @property
    def load(self) -> EngineLoad:
        """The load after the latest step."""
        return self._frame.load

    @property
    def weights_digest(self) -> str:
        return self._frame.digests.weights

    def step(self, now_s: float) -> tuple[StepOutputs, float]:
        """Run one step from `now_s` on; return its outputs and its end."""
        self.clock.advance_to(now_s)
        return self.core.step(), self.clock.now()

    def note(self, outputs: StepOutputs) -> None:
        """Keep a step's outputs for the next frame."""
        changes = outputs.prefixes
        if changes is not None:
            self._prefixes.update(dict.fromkeys(changes.removed, False))
            self._prefixes.update(dict.fromkeys(changes.added, True))
        step_time = self._frame.step_time if outputs.step_time is None else outputs.step_time
        self._frame = msgspec.structs.replace(self._frame, load=outputs.load, step_time=step_time)

    def note_adapters(self, slots: AdapterSlots, held: Sequence[GenerateRequest]) -> None:
        """Note the adapter slots; `held` are requests that wait for their adapter and that the scheduler does not
        know.
        """
        self._frame = msgspec.structs.replace(self._frame, adapters=slots)
        self._num_held, self._num_held_tokens = len(held), sum(len(each.prompt_token_ids) for each in held)

    def drain(self) -> None:
        """Report draining from the next frame on."""
        self._frame = msgspec.structs.replace(self._frame, draining=True)

    def frame(self, *, snapshot: bool = False) -> StateFrame:
        self._sequence += 1
        changes, self._prefixes = self._prefixes, {}
        return msgspec.structs.replace(
            self._frame,
            load=self._load_with_held(),
            sequence=self._sequence,
            snapshot=snapshot,
            prefixes_added=[chunk for chunk, there in changes.items() if there],
            prefixes_removed=[chunk for chunk, there in changes.items() if not there],
        )

    def _load_with_held(self) -> EngineLoad:
        load = self._frame.load
        if not self._num_held:
            return load
        return msgspec.structs.replace(
            load,
            num_requests_waiting=load.num_requests_waiting + self._num_held,
            num_tokens_waiting=load.num_tokens_waiting + self._num_held_tokens,
        )


class RunningPod:
    """A running pod in a simulation: it runs step after step while there is work, and sends its frames."""

    def __init__(
        self,
        pod: SimulatedPod,
        events: Events,
        *,
        observe: Callable[[StateFrame], None],
        deliver: Callable[[StepOutputs], None],
        adapters: AdapterSettings | None = None,
    ) -> None:
        """`observe` and `deliver` are called when a frame, or a step's outputs, reach the gateway.

        `adapters` are the pod's adapter settings; the pod must have been created with `serves_adapters`.
        """
        self.pod = pod
        self._events = events
        self._observe = observe
        self._deliver = deliver
        self._is_stepping = False
        self._is_up = True
        self._is_frame_due = False
        self._next_frame_s = 0.0
        """Earliest time of the next frame."""
        self._bay: AdapterBay | None = None
        if adapters is not None:
            self._bay = AdapterBay(adapters, events, start=self._start, changed=self._adapters_changed)
            pod.note_adapters(self._bay.slots(), ())
        events.after(HEARTBEAT_S, self._heartbeat)

    @property
    def is_up(self) -> bool:
        return self._is_up

    def enter(self, request: GenerateRequest) -> None:
        """Add a request. Raise `PagemillError` if the engine refuses it."""
        if self._bay is not None and request.adapter_digest:
            self._bay.enter(request)
        else:
            self._start(request)

    def request_frame(self) -> None:
        """Send a frame as soon as allowed, because the state has changed."""
        if not self._is_frame_due:
            self._is_frame_due = True
            self._events.at(self._next_frame_s, self._publish)

    def stop(self) -> None:
        """Produce nothing more; what is on its way still arrives."""
        self._is_up = False

    @property
    def num_adapter_loads(self) -> int:
        return self._bay.num_loads if self._bay is not None else 0

    def _start(self, request: GenerateRequest) -> None:
        self.pod.core.add(request)
        if not self._is_stepping:
            self._step()

    def _adapters_changed(self) -> None:
        assert self._bay is not None
        self.pod.note_adapters(self._bay.slots(), self._bay.held)
        self.request_frame()

    def _step(self) -> None:
        self._is_stepping = True
        outputs, done_s = self.pod.step(self._events.now_s)
        self._events.at(done_s, partial(self._stepped, outputs))

    def _stepped(self, outputs: StepOutputs) -> None:
        if not self._is_up:
            return
        self.pod.note(outputs)
        self.request_frame()
        if self._bay is not None:
            for output in outputs.outputs:
                if output.finish_reason is not None:
                    self._bay.ended(output.request_id)
        if outputs.outputs:
            self._events.after(NETWORK_S, partial(self._deliver, outputs))
        self._is_stepping = False
        if self.pod.core.has_work:
            self._step()

    def _publish(self) -> None:
        if not self._is_up:
            return
        self._is_frame_due = False
        self._next_frame_s = self._events.now_s + FRAME_INTERVAL_S
        self._events.after(NETWORK_S, partial(self._observe, self.pod.frame()))

    def _heartbeat(self) -> None:
        if not self._is_up:
            return
        self.request_frame()
        self._events.after(HEARTBEAT_S, self._heartbeat)
