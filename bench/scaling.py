"""Compares scaling policies on simulated fleets: latencies and cost of Pagemill's policies and of every rival.

Each policy gets the same requests and the same cluster: a ramp, a burst, a day, steady load, clusters of long prompts
that one replica of a faster engine absorbs, and an hour of Azure's trace if `--trace` names it. Rivals that scale by
requests per replica get the number that one replica holds within the SLO, which their users would have to find out;
otherwise they have their documented defaults. Figures are simulated and do not depend on the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import msgspec
from report import emit, markdown_table

from pagemill_engine.config import EngineConfig
from pagemill_operator.autoscaler.settings import ScalingSettings, Slo, with_default_targets
from pagemill_protocol.report.prediction import OfferedLoad, Predictor
from pagemill_protocol.report.shape import Shape
from pagemill_protocol.report.state import StepTimeParams
from pagemill_simulator.bounds.clairvoyant import search
from pagemill_simulator.bounds.trials import Trials
from pagemill_simulator.fleet.figures import Figures, Span, figures_of
from pagemill_simulator.fleet.fleet import simulate_fleet
from pagemill_simulator.fleet.settings import ColdStart, FleetSettings
from pagemill_simulator.scaling.policy import FleetScaler, ReplicaBounds
from pagemill_simulator.scaling.rivals import make_rival
from pagemill_simulator.scaling.simulated import own, rival
from pagemill_simulator.workloads.clusters import Clusters
from pagemill_simulator.workloads.request import Workload
from pagemill_simulator.workloads.shapes import Burst, Diurnal, Ramp, Steady
from pagemill_simulator.workloads.traces import read_trace

STEP_TIME = StepTimeParams(
    knots_tokens=[1, 64, 512, 2048], knot_ms=[24.0, 30.0, 90.0, 330.0], decode_context_ms=2e-5, chunk_context_ms=4e-7
)
"""Similar to an 8B model on a small data-centre GPU, or a 70B model on several large ones."""
ENGINE = EngineConfig(model="sim", num_kv_blocks=4096, max_model_len=16384, max_num_seqs=64, step_time=STEP_TIME)
FAST_STEP_TIME = StepTimeParams(
    knots_tokens=[1, 64, 512, 2048], knot_ms=[8.0, 9.0, 18.0, 60.0], decode_context_ms=2e-5, chunk_context_ms=1e-7
)
"""Similar to a 7B model on a large data-centre GPU."""
CLUSTERS = "clusters of long prompts"
SLO = Slo(ttft_ms=2000.0, tpot_ms=100.0)
BOUNDS = ReplicaBounds(1, 16)
COLD_START = ColdStart(schedule_s=1.0, pull_s=4.0, load_s=45.0, warm_s=10.0)
COLUMNS = [
    "policy",
    "TTFT p50 s",
    "p95 s",
    "p99 s",
    "TPOT p95 ms",
    "SLO met %",
    "apart %",
    "pod-s",
    "ups",
    "downs",
    "flaps",
    "refused",
    "lost",
]


def workloads(seed: int, trace: Path | None) -> dict[str, Workload]:
    drawn = {
        "ramp 2 to 10 requests/s": Ramp().workload(seed),
        "burst of ten times": Burst().workload(seed),
        "a day in two hours": Diurnal(compress=12.0).workload(seed),
        "steady": Steady(rate=6.0, duration_s=1800.0).workload(seed),
        CLUSTERS: Clusters(cluster_requests=10.0).workload(seed),
    }
    return drawn if trace is None else {**drawn, "an hour of Azure's conversations": read_trace(trace)}


def steps_of(name: str) -> list[Span]:
    """Return the spans of cold starts after the traffic begins and after it jumps, in which no new pod can be ready."""
    jumps_s = [0.0, Burst().at_s] if name.startswith("burst") else [0.0]
    return [(at_s, at_s + COLD_START.total_s) for at_s in jumps_s]


def engine_of(name: str) -> EngineConfig:
    """Return the engine that serves the workload of that name."""
    return msgspec.structs.replace(ENGINE, step_time=FAST_STEP_TIME) if name == CLUSTERS else ENGINE


def shape(engine: EngineConfig) -> Shape:
    return Shape(
        num_bytes=engine.num_kv_blocks or 0,
        block_size=engine.block_size,
        max_num_seqs=engine.step.max_num_seqs,
        max_step_tokens=engine.step.max_num_batched_tokens,
        step_time=engine.step_time or STEP_TIME,
    )


def held_within_slo(workload: Workload, engine: EngineConfig = ENGINE, slo: Slo = SLO) -> float:
    """Return the requests that one replica holds at the highest rate that meets the SLO, by Little's law."""
    requests = workload.requests
    prompts = sorted(each.num_prompt_tokens for each in requests)
    mean_prompt, mean_output = (
        sum(prompts) / len(requests),
        sum(each.num_output_tokens for each in requests) / len(requests),
    )
    high = prompts[int(slo.share * (len(prompts) - 1))]
    predictor, held, rate = Predictor(shape(engine), slo.share), 1.0, 0.1
    while True:
        found = predictor.predict(OfferedLoad(rate, mean_prompt, mean_prompt, high, mean_output), 1)
        if found.ttft_ms > (slo.ttft_ms or 0) or found.tpot_ms > (slo.tpot_ms or 0):
            return held
        held = max(held, rate * mean_output * found.tpot_ms / 1000)
        rate += 0.1


def policies(
    workload: Workload, engine: EngineConfig = ENGINE, *, bounds: ReplicaBounds = BOUNDS, slo: Slo = SLO
) -> dict[str, Callable[[], FleetScaler]]:
    held = f"{held_within_slo(workload, engine, slo):.0f}"
    reported = {
        "kubeai": {"target_requests": held},
        "hpa": {},
        "keda-epp": {"target_running": held},
        "wva": {},
        "wva-hpa": {},
        "knative": {"target_concurrency": held},
        "dynamo": {"ttft_ms": str(slo.ttft_ms), "itl_ms": str(slo.tpot_ms)},
    }
    settings = ScalingSettings("Active", *bounds, slo=slo, learns_idle_s=True)
    targets = with_default_targets(ScalingSettings("Active", *bounds, learns_idle_s=True))
    rivals = {name: _rival(name, parameters, bounds) for name, parameters in reported.items()}
    return {"pagemill": lambda: own(settings), "pagemill, targets": lambda: own(targets), **rivals}


def _rival(name: str, parameters: dict[str, str], bounds: ReplicaBounds) -> Callable[[], FleetScaler]:
    return lambda: rival(make_rival(name, parameters), bounds)


def row(figures: Figures) -> list[str]:
    ttft, tpot = figures.ttft_ms, figures.tpot_ms
    return [
        figures.policy,
        *(f"{(value or 0.0) / 1000:.2f}" for value in (ttft.p50, ttft.p95, ttft.p99)),
        f"{tpot.p95 or 0.0:.0f}",
        f"{100 * (figures.slo_attained or 0.0):.1f}",
        f"{100 * (figures.slo_attained_apart or 0.0):.1f}",
        f"{figures.pod_seconds:.0f}",
        *map(str, (figures.num_scale_ups, figures.num_scale_downs, figures.num_flaps)),
        *map(str, (figures.num_refused, figures.num_lost)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="CSV file of Azure's LLM inference traces")
    parser.add_argument(
        "--exact", action="store_true", help="simulate every step with the real scheduler, instead of fast-forward"
    )
    parser.add_argument("--markdown", action="store_true", help="also print tables for the documentation")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for name, workload in workloads(args.seed, args.trace).items():
        engine = engine_of(name)
        settings = FleetSettings(engine=engine, bounds=BOUNDS, cold_start=COLD_START, seed=args.seed)
        outcomes = {
            policy: simulate_fleet(workload, settings, make(), fast=not args.exact)
            for policy, make in policies(workload, engine).items()
        }
        trials = Trials("clairvoyant", workload, settings, SLO)
        outcomes["clairvoyant"] = trials.simulate(search(trials).schedule)
        slo = {"slo_ttft_ms": SLO.ttft_ms, "slo_tpot_ms": SLO.tpot_ms}
        found = [figures_of(each, **slo, apart_s=steps_of(name)) for each in outcomes.values()]
        rows = [[policy, *row(each)[1:]] for policy, each in zip(outcomes, found, strict=True)]
        emit("scaling", COLUMNS, rows, {"workload": name, "figures": msgspec.to_builtins(found)})
        if args.markdown:
            print(markdown_table(COLUMNS, rows))


if __name__ == "__main__":
    main()
