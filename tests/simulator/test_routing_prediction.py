"""The predicted TTFT compared with the actual one, on pods with the real scheduler and loop."""

from __future__ import annotations

import random
import statistics
from functools import partial

import pytest

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.messages import StepOutputs
from pagemill_gateway.brain.endpoints.dispatches import Dispatch
from pagemill_gateway.brain.endpoints.ttft_estimator import TtftEstimator
from pagemill_protocol.generate import GenerateRequest
from pagemill_protocol.sampling import SamplingParams
from pagemill_protocol.state import StateFrame, StepTimeParams
from pagemill_protocol.step_time import StepTimeModel
from pagemill_simulator.cluster import simulate_routing
from pagemill_simulator.conversations import TRAFFIC, at_rate
from pagemill_simulator.events import Events
from pagemill_simulator.pod import NETWORK_S, RunningPod, SimulatedPod

STEP_TIME = StepTimeParams(
    knots_tokens=[1, 64, 512], knot_ms=[6.0, 8.0, 22.0], decode_context_ms=1e-5, chunk_context_ms=1e-7
)
LIMIT = 0.10
MAX_BIAS = 0.05


def engine(**settings: object) -> EngineConfig:
    config = {
        "model": "sim",
        "num_kv_blocks": 2500,
        "max_model_len": 16384,
        "max_num_seqs": 48,
        "max_num_batched_tokens": 512,
        "max_num_waiting": 100_000,
        "vocab_size": 32000,
        "step_time": STEP_TIME,
    }
    return EngineConfig(**{**config, **settings})


@pytest.mark.sample("*-middle", "hot prefix-*")
@pytest.mark.parametrize("rate", [0.5, 1.0, 1.7], ids=["low", "middle", "high"])
@pytest.mark.parametrize("kind", TRAFFIC)
def test_the_median_error_is_at_most_a_tenth_under_any_load(kind: str, rate: float) -> None:
    """`python bench/routing.py` runs all seeds."""
    traffic = TRAFFIC[kind](11)
    traffic = at_rate(traffic[: len(traffic) * 3 // 5], rate)
    report = simulate_routing(traffic, [engine()] * 4, "Cost", seed=11)
    assert len(report.ttft_errors) == len(report.ttft_ms)
    assert statistics.median(map(abs, report.ttft_errors)) <= LIMIT
    assert abs(statistics.mean(report.ttft_errors)) <= MAX_BIAS


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
@pytest.mark.parametrize("seed", range(6))
def test_without_later_requests_the_prediction_is_exact(seed: int, overlap: bool) -> None:
    """A pod has some running requests; after any of its reports one more arrives, and nothing else."""
    draw = random.Random(seed)
    events = Events()
    frames: list[StateFrame] = []
    firsts_s: dict[str, float] = {}

    def deliver(outputs: StepOutputs) -> None:
        for output in outputs.outputs:
            firsts_s.setdefault(output.request_id, events.now_s)

    pod = SimulatedPod("pod", engine(overlap=overlap), is_calibrated=True)
    running = RunningPod(pod, events, observe=frames.append, deliver=deliver)
    for number in range(10):
        events.at(draw.uniform(0, 0.05), partial(running.enter, _request(draw, number)))
    while len(frames) < 4 + seed or events.now_s < 0.06:
        events.step()
    frame = frames[-1]
    asked_s, request = events.now_s, _request(draw, 10)
    ttft_estimator = TtftEstimator()
    ttft_estimator.ttft_ms(-1, Dispatch(1), 0.0)
    ttft_estimator.accepted(-1, 2 * NETWORK_S)
    model = StepTimeModel.from_params(STEP_TIME)
    # The report has just arrived: what it does not contain has not happened.
    ttft_estimator.received(frame.load, frame.load_age_ms, model, 512, None, [], asked_s)
    predicted_ms = ttft_estimator.ttft_ms(0, Dispatch(len(request.prompt_token_ids)), asked_s)
    events.after(NETWORK_S, partial(running.enter, request))
    while request.request_id not in firsts_s:
        events.step()
    assert predicted_ms is not None
    assert predicted_ms == pytest.approx((firsts_s[request.request_id] - asked_s) * 1000, rel=0.002)


def _request(draw: random.Random, number: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=str(number),
        model="sim",
        prompt_token_ids=[draw.randrange(32000) for _ in range(draw.randint(20, 1200))],
        sampling=SamplingParams(max_tokens=100, ignore_eos=True, seed=number),
    )
