"""Compares scaling policies with two bounds, for many kinds of traffic at light, middle and heavy load.

`clairvoyant` knows every request and searches schedules of replicas in the simulation; `informed` learns of each change
of the traffic when it happens. At light load one replica suffices; middle and heavy need about two and four at the
peak. A row has the share of requests within the SLO, pod-seconds, and both against the bounds. Figures are simulated
and do not depend on the machine. `--seed` draws other traffic, other starts and another search.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from report import emit, markdown_table
from scaling import BOUNDS, COLD_START, ENGINE, FAST_STEP_TIME, SLO, policies, shape

from pagemill_engine.config import EngineConfig
from pagemill_operator.autoscaler.settings import Slo
from pagemill_simulator.bounds.capacity import SteadyCapacity, predicted_intensity
from pagemill_simulator.bounds.clairvoyant import search
from pagemill_simulator.bounds.informed import Informed
from pagemill_simulator.bounds.trials import Trials
from pagemill_simulator.fleet.figures import Figures, figures_of
from pagemill_simulator.fleet.fleet import simulate_fleet
from pagemill_simulator.fleet.settings import ColdStart, FleetSettings
from pagemill_simulator.scaling.policy import FleetScaler, ReplicaBounds
from pagemill_simulator.workloads.agentic import Agentic
from pagemill_simulator.workloads.batches import BesideBatch
from pagemill_simulator.workloads.clusters import Clusters
from pagemill_simulator.workloads.generator import Generator
from pagemill_simulator.workloads.patterns import FlashCrowd, Retrieval, SilentNights, Weekly
from pagemill_simulator.workloads.shapes import Burst, Diurnal, Ramp, Steady

LOADS = {"light": 0.6, "middle": 1.8, "heavy": 3.6}
"""Replicas that the peak of the traffic needs."""
MOST_REPLICAS = 8
SLOW, SLOW_SLO = 10.0, Slo(ttft_ms=20_000.0, tpot_ms=1000.0)
COLUMNS = [
    "policy",
    "SLO met %",
    "pod-s",
    "of informed",
    "best for it %",
    "of clairvoyant",
    "ups",
    "flaps",
    "refused",
]


class Kind(NamedTuple):
    make: Callable[[float], Generator]
    """Returns the traffic by its peak rate in requests (agents: sessions) per second."""
    engine: EngineConfig = ENGINE
    slowness: tuple[float, ...] = (1.0,)
    slo: Slo = SLO
    lowest: int = 1


KINDS = {
    "steady": Kind(lambda rate: Steady(rate=rate, duration_s=900)),
    "ramp": Kind(lambda rate: Ramp(from_rate=rate / 5, to_rate=rate, before_s=120, over_s=300, after_s=480)),
    "burst": Kind(lambda rate: Burst(rate=rate / 6, factor=6, at_s=300, for_s=120, duration_s=900)),
    "flash crowd": Kind(lambda rate: FlashCrowd(rate=rate / 6, duration_s=900)),
    "day": Kind(lambda rate: Diurnal(low_rate=rate / 20, high_rate=rate, compress=72)),
    "week with a Monday": Kind(lambda rate: Weekly(low_rate=rate / 40, high_rate=rate, days=2, compress=96)),
    "silent nights": Kind(lambda rate: SilentNights(high_rate=rate, days=2, compress=72), lowest=0),
    "clusters of long prompts": Kind(
        lambda rate: Clusters(rate=rate, cluster_requests=15, duration_s=900),
        engine=msgspec.structs.replace(ENGINE, step_time=FAST_STEP_TIME),
    ),
    "retrieval": Kind(lambda rate: Retrieval(rate=rate, duration_s=900)),
    "agents": Kind(lambda rate: Agentic(sessions_per_s=rate, duration_s=900)),
    "batch beside live": Kind(lambda rate: BesideBatch(rate=rate / 1.6, period_s=450, duration_s=900)),
    "a slow model": Kind(
        lambda rate: Ramp(from_rate=rate / 5, to_rate=rate, before_s=300, over_s=900, after_s=1800),
        engine=FleetSettings(engine=ENGINE, bounds=BOUNDS).engine_of(SLOW),
        slo=SLOW_SLO,
    ),
    "replicas that differ": Kind(
        lambda rate: Ramp(from_rate=rate / 5, to_rate=rate, before_s=120, over_s=300, after_s=480), slowness=(1.0, 1.6)
    ),
}


def compare(
    kind: Kind,
    load: str,
    cold_start: ColdStart,
    seed: int,
    names: list[str],
    changes: int,
    held: dict[int, float] | None = None,
) -> tuple[list[Figures], Trials]:
    """Return the figures, the bounds' first, and the trials of the search.

    `changes` is the number of changes that the search tries; 0: only `informed`, which takes a tenth of the time; -1:
    no bounds. `held` is the known capacity by number of replicas; new values are added to it.
    """
    unit = predicted_intensity(kind.make(1.0), shape(kind.engine), kind.slo)
    traffic = kind.make(unit * LOADS[load])
    workload = traffic.workload(seed)
    bounds = ReplicaBounds(kind.lowest, MOST_REPLICAS)
    settings = FleetSettings(
        engine=kind.engine, slowness=kind.slowness, bounds=bounds, cold_start=cold_start, seed=seed, start_replicas=1
    )
    offered = policies(workload, kind.engine, bounds=bounds, slo=kind.slo)
    scalers: dict[str, FleetScaler] = {name: offered[name]() for name in names or offered}
    if changes >= 0:
        capacity = capacity_of(kind, traffic, unit, held)
        scalers["informed"] = Informed(traffic, capacity, cold_start.total_s, MOST_REPLICAS)
    outcomes = {name: simulate_fleet(workload, settings, each, fast=True) for name, each in scalers.items()}
    found = {
        name: figures_of(each, slo_ttft_ms=kind.slo.ttft_ms, slo_tpot_ms=kind.slo.tpot_ms)
        for name, each in outcomes.items()
    }
    trials = Trials("clairvoyant", workload, settings, kind.slo)
    if changes > 0:
        best = search(trials, others=outcomes.values(), num_changes=changes, seed=seed)
        found["clairvoyant"] = best.figures
    figures = [msgspec.structs.replace(each, policy=name) for name, each in found.items()]
    return sorted(figures, key=lambda each: each.policy not in ("informed", "clairvoyant")), trials


def capacity_of(kind: Kind, traffic: Generator, unit: float, held: dict[int, float] | None) -> SteadyCapacity:
    """Return the capacity, the same for every load, start and seed: what load tests of the engine would find."""
    settings = FleetSettings(
        engine=kind.engine, slowness=kind.slowness, bounds=ReplicaBounds(kind.lowest, MOST_REPLICAS)
    )
    return SteadyCapacity(traffic, settings, kind.slo, guess=unit, known=held)


def cold_start_of(seconds: float) -> ColdStart:
    """Return a cold start of that length, with all phases in proportion."""
    share = seconds / COLD_START.total_s
    phases = ("schedule_s", "pull_s", "load_s", "warm_s")
    return msgspec.structs.replace(COLD_START, **{name: share * getattr(COLD_START, name) for name in phases})


def rows(figures: list[Figures], trials: Trials) -> list[list[str]]:
    cost = {each.policy: each.pod_seconds for each in figures}
    return [
        [
            each.policy,
            f"{100 * (each.slo_attained or 0.0):.1f}",
            f"{each.pod_seconds:.0f}",
            f"{each.pod_seconds / cost['informed']:.2f}" if "informed" in cost else "-",
            f"{100 * trials.best_share(each.pod_seconds):.1f}" if trials.frontier else "-",
            f"{each.pod_seconds / cost['clairvoyant']:.2f}" if "clairvoyant" in cost else "-",
            *map(str, (each.num_scale_ups, each.num_flaps, each.num_refused)),
        ]
        for each in figures
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), metavar="KIND")
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--policies", nargs="+", default=[], help="policies to compare; default: all")
    parser.add_argument(
        "--cold-start", type=float, default=COLD_START.total_s, help="duration of a cold start in seconds"
    )
    parser.add_argument(
        "--changes",
        type=int,
        default=16,
        help="number of changes that the search tries; 0: informed alone; -1: no bounds",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--markdown", action="store_true", help="also print tables for the documentation")
    args = parser.parse_args()
    cold_start = cold_start_of(args.cold_start)
    for name in args.kinds:
        for load in args.loads:
            figures, trials = compare(KINDS[name], load, cold_start, args.seed, args.policies, args.changes)
            case = {"kind": name, "load": load, "cold_start_s": args.cold_start, "seed": args.seed}
            found = rows(figures, trials)
            emit("scaling_bounds", COLUMNS, found, {**case, "figures": msgspec.to_builtins(figures)})
            if args.markdown:
                print(markdown_table(COLUMNS, found))


if __name__ == "__main__":
    main()
