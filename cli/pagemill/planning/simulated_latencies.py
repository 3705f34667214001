"""Simulates one replica under its share of the load, with the engine's own scheduler and KV cache on a virtual clock.

Steps take the time that the step-time model predicts. Requests arrive independently and have the same length. The
simulation is deterministic.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from pagemill_engine.config import EngineConfig
from pagemill_execution.config import SimulatedKinds
from pagemill_protocol.report.shape import Shape
from pagemill_simulator.engine import EngineSimulation
from pagemill_simulator.workloads.request import SimRequest

REQUESTS = 400
FEWEST_REQUESTS = 60
MOST_TOKENS = 60_000
"""Limit for the tokens of all answers; simulating one takes about 15 us."""
WARM_UP = 0.2
"""Share of the requests, from the start, that is not counted, because the replica is emptier than in steady state."""
SPARE_BLOCKS = 64


class SimulatedLatencies(NamedTuple):
    """The simulated latencies at the SLO's percentile."""

    ttft_ms: float
    tpot_ms: float | None
    """`None` if answers have one token."""
    num_requests: int


def simulate_latencies(
    shape: Shape,
    input_tokens: int,
    output_tokens: int,
    requests_per_s: float,
    share: float,
    *,
    kinds: SimulatedKinds | None = None,
    overlaps: bool = False,
    seed: int = 0,
    most_requests: int = REQUESTS,
) -> SimulatedLatencies:
    """Simulate. `kinds`: the cache of a model with windows or states, in place of the blocks of `shape`."""
    count = max(FEWEST_REQUESTS, min(most_requests, MOST_TOKENS // output_tokens))
    simulation = EngineSimulation(
        _arrivals(count, input_tokens, output_tokens, requests_per_s, seed),
        _engine(shape, kinds, input_tokens + output_tokens, overlaps),
        shape.step_time,
    )
    simulation.run()
    counted = simulation.latencies[int(WARM_UP * count) :]
    tpots = [each.tpot_ms for each in counted if each.tpot_ms is not None]
    return SimulatedLatencies(
        _percentile([each.ttft_ms for each in counted], share),
        _percentile(tpots, share) if tpots else None,
        len(counted),
    )


def _engine(shape: Shape, kinds: SimulatedKinds | None, length: int, overlaps: bool) -> EngineConfig:
    """Return the simulated engine's settings, with no more blocks than all sequence slots can use."""
    most_blocks = shape.max_num_seqs * (math.ceil(length / shape.block_size) + 1) + SPARE_BLOCKS
    return EngineConfig(
        model="plan",
        num_kv_blocks=min(shape.num_blocks, most_blocks),
        simulated_kinds=kinds,
        block_size=shape.block_size,
        max_model_len=length,
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_step_tokens,
        max_num_waiting=REQUESTS,
        overlap=overlaps,
        pipeline_parallel_size=shape.step_time.stages,
    )


def _arrivals(count: int, input_tokens: int, output_tokens: int, rate: float, seed: int) -> list[SimRequest]:
    draw, at_s, requests = random.Random(seed), 0.0, []
    for _ in range(count):
        requests.append(SimRequest(at_s, input_tokens, output_tokens))
        at_s += draw.expovariate(rate)
    return requests


def _percentile(values: list[float], share: float) -> float:
    """Return the percentile by nearest rank."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
