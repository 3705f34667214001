"""One engine of a simulated cluster: the real scheduler and KV manager, and the frames that tell its gateway of them.

Frames say what the real server's do (`pagemill_engine.server.state_stream`): the load after the latest step and the
prefix changes since the frame before, at most 20 a second.
"""

from __future__ import annotations

import msgspec

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.messages import StepOutputs
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.runner.null import NullRunner
from pagemill_protocol.hashes import granule_blocks
from pagemill_protocol.state import Digests, EngineLoad, StateFrame
from pagemill_simulator.clock import VirtualClock

FRAME_INTERVAL_S = 0.05


class SimulatedPod:
    def __init__(self, name: str, config: EngineConfig) -> None:
        self.name = name
        self.clock = VirtualClock()
        """Ahead of the cluster's while a step runs."""
        settings = msgspec.structs.replace(config, null_runner=True, seed=config.seed or 0)
        runner = NullRunner.from_config(settings, clock=self.clock.now, sleep=self.clock.advance)
        self.core = EngineCore(settings, runner, clock=self.clock.now)
        self.stepping = False
        self.next_frame_s = 0.0
        """Earliest time of the next frame."""
        self.frame_due = False
        info, self._sequence = runner.info, 0
        self._prefixes: dict[bytes, bool] = {}
        self._frame = StateFrame(
            sequence=0,
            digests=Digests(weights=info.weights_digest, tokenizer_bundle="sim", kv_dtype=info.kv_dtype),
            step_time=settings.step_time or self.core.step_time.params(),
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            granule_blocks=granule_blocks(info.block_size, info.num_blocks),
            load=EngineLoad(num_blocks_total=info.num_blocks, num_blocks_free=info.num_blocks),
        )

    def step(self, now_s: float) -> tuple[StepOutputs, float]:
        """Run one step from `now_s` on; what came of it, and when."""
        self.clock.advance_to(now_s)
        return self.core.step(), self.clock.now()

    def note(self, outputs: StepOutputs) -> None:
        """Keep for the next frame what a step said."""
        changes = outputs.prefixes
        if changes is not None:
            self._prefixes.update(dict.fromkeys(changes.removed, False))
            self._prefixes.update(dict.fromkeys(changes.added, True))
        step_time = self._frame.step_time if outputs.step_time is None else outputs.step_time
        self._frame = msgspec.structs.replace(self._frame, load=outputs.load, step_time=step_time)

    def frame(self, *, snapshot: bool = False) -> StateFrame:
        self._sequence += 1
        changes, self._prefixes = self._prefixes, {}
        return msgspec.structs.replace(
            self._frame,
            sequence=self._sequence,
            snapshot=snapshot,
            prefixes_added=[granule for granule, there in changes.items() if there],
            prefixes_removed=[granule for granule, there in changes.items() if not there],
        )
