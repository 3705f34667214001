"""The bench of scaling on real engines: its traffic, its counts, and replayed decisions."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
from local_scaling import COLUMNS, Outcome, Served, Watch, deployment, row, run, simulated, simulated_row, workloads

from pagemill.why.replaying import decide_again
from pagemill_operator.autoscaler.records import decode_record, encode_record
from pagemill_protocol.report.load import QueueLoad

SLOW = ("maxNumSeqs: 8", "maxNumSeqs: 1")
"""A simulated device that serves one request at a time, about five per second."""


def test_light_traffic_has_one_rate_and_a_burst_a_higher_one_for_a_sixth_of_the_time() -> None:
    drawn = workloads(2.0, 6.0, 240.0, seed=3)
    assert drawn == workloads(2.0, 6.0, 240.0, seed=3)
    light, burst = drawn["light"].requests, drawn["burst"].requests
    assert len(light) == pytest.approx(2 * 240, rel=0.15)
    inside = [each for each in burst if 60 <= each.arrival_s < 100]
    assert len(inside) / 40 == pytest.approx(12, rel=0.15)
    assert (len(burst) - len(inside)) / 200 == pytest.approx(2, rel=0.2)
    assert {(each.num_prompt_tokens, each.num_output_tokens) for each in (*light, *burst)} == {(128, 32)}


def test_a_failed_request_has_no_latency_and_misses_the_slo() -> None:
    served = [Served(100.0, 20.0), Served(300.0, 40.0), Served(5000.0, 20.0), Served(None, None)]
    watch = Watch(cast(Any, None))
    found = dict(zip(COLUMNS, row("light", Outcome(served, watch, 12.3)), strict=True))
    assert (found["requests"], found["failed"], found["SLO met %"], found["pod-s"]) == ("4", "1", "50.0", "12")
    assert found["TTFT p50 ms"] == "300"


@pytest.mark.slow
def test_the_autoscalers_decisions_on_this_machine_are_recorded_and_can_be_replayed() -> None:
    """`pagemill up` runs real processes with a simulated device, and a burst adds a replica."""
    traffic = workloads(2.0, 8.0, 12.0, seed=1)["burst"]
    content = deployment(2, ["--null-runner", "--num-kv-blocks=256"]).replace(*SLOW)
    outcome = run(traffic, content, settle_s=0.0)
    records = outcome.watch.records
    assert all(each.ttft_ms is not None for each in outcome.served)
    assert any(each.decision.replicas > each.signals.fleet.wanted for each in records)
    assert all(each.is_same for each in outcome.replays)
    again = [decode_record(encode_record(each)) for each in records]
    assert [decide_again(each).decision for each in again] == [each.decision for each in records]

    ordered = next(each for each in records if each.decision.replicas > each.signals.fleet.wanted)
    calm = {"arrivals": msgspec.structs.replace(ordered.signals.arrivals, requests_per_s=0.01), "queue": QueueLoad()}
    other = msgspec.structs.replace(ordered, signals=msgspec.structs.replace(ordered.signals, **calm))
    assert not decide_again(other).is_same, "other signals must give another decision"

    figures = simulated(traffic, records)
    assert figures is not None
    assert figures.num_requests == len(traffic.requests)
    assert len(simulated_row("burst", figures)) == len(COLUMNS)
