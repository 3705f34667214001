"""The comparison of scaling policies: every policy gets the same requests, and none is lost."""

from __future__ import annotations

import scaling

from pagemill_simulator.fleet.figures import figures_of
from pagemill_simulator.fleet.fleet import simulate_fleet
from pagemill_simulator.fleet.settings import FleetSettings
from pagemill_simulator.workloads.shapes import Ramp

SHORT = Ramp(from_rate=1, to_rate=4, before_s=10, over_s=20, after_s=20)
SETTINGS = FleetSettings(engine=scaling.ENGINE, bounds=scaling.BOUNDS, cold_start=scaling.COLD_START, seed=1)


def test_every_policy_gets_the_same_requests_and_its_row_fits_the_table() -> None:
    workload = SHORT.workload(1)
    for name, make in scaling.policies(workload).items():
        outcome = simulate_fleet(workload, SETTINGS, make(), fast=True)
        figures = figures_of(outcome, slo_ttft_ms=scaling.SLO.ttft_ms, slo_tpot_ms=scaling.SLO.tpot_ms)
        assert (figures.policy, figures.num_requests) == (name.partition(",")[0], len(workload.requests))
        assert figures.num_served + figures.num_refused == figures.num_requests
        assert len(scaling.row(figures)) == len(scaling.COLUMNS)


def test_rivals_get_a_replicas_capacity_within_the_slo() -> None:
    held = scaling.held_within_slo(SHORT.workload(1))
    assert 4 < held < (scaling.ENGINE.max_num_seqs or 0)
