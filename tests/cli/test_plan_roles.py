"""Separate roles in a plan: prefill and decode replicas, sized by the autoscaler's prediction, never served."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from outlines import QWEN_7B, write_outline
from scaling_world import BLOCK_SIZE, STEP_TIME
from typer.testing import CliRunner

from examples import num_examples
from pagemill.main import app
from pagemill.planning.forecast import PlannedWorkload
from pagemill.planning.replica import PlannedReplica
from pagemill.planning.roles.pools import Loads, RolePair, RolePools
from pagemill.planning.roles.roles import Prices, cheapest, forecast_roles
from pagemill.planning.users import MEAN, Users
from pagemill_operator.autoscaler.settings import Slo
from pagemill_operator.autoscaler.slo import meets
from pagemill_protocol.report.prediction import Predictor
from pagemill_protocol.report.shape import Shape
from pagemill_protocol.report.state import StepTimeParams

REPLICA = PlannedReplica(Shape(4000, BLOCK_SIZE, 64, 512, STEP_TIME), 4096, 10**8, 100_000, None, "cpu", "given")
SLO = Slo(ttft_ms=500.0, tpot_ms=40.0)
ONE_PRICE = Prices(1.0, 1.0, is_money=True)
NO_COST = math.inf
"""The speed of a link that takes no time."""


@st.composite
def replicas(draw: st.DrawFn) -> PlannedReplica:
    knots = [1, 64, 512, 2048]
    rises = [draw(st.floats(2, 30)), draw(st.floats(0, 20)), draw(st.floats(5, 100)), draw(st.floats(20, 300))]
    step_time = StepTimeParams(
        knots_tokens=knots,
        knot_ms=[sum(rises[: at + 1]) for at in range(len(knots))],
        decode_context_ms=draw(st.floats(0, 2e-4)),
        chunk_context_ms=draw(st.floats(0, 2e-6)),
        num_steps_observed=1000,
    )
    shape = Shape(draw(st.integers(300, 8000)), BLOCK_SIZE, draw(st.integers(4, 256)), 2048, step_time)
    return REPLICA._replace(shape=shape, kv_bytes_per_token=draw(st.integers(1000, 400_000)))


lengths = st.builds(PlannedWorkload, st.floats(0.05, 200), st.integers(1, 3000), st.integers(2, 800))
objectives = st.builds(Slo, st.none() | st.floats(100, 5000), st.none() | st.floats(15, 200))


# What holds of every forecast


@settings(max_examples=num_examples(100), deadline=None)
@given(replicas(), replicas(), lengths, objectives, st.floats(1.1, 8), st.floats(0.5, 400), st.floats(0.1, 10))
def test_more_load_never_needs_fewer_replicas(
    prefill: PlannedReplica,
    decode: PlannedReplica,
    load: PlannedWorkload,
    slo: Slo,
    factor: float,
    gbit_per_s: float,
    price: float,
) -> None:
    """At one price for all this is a statement about the replicas, otherwise about what they cost together."""
    for prices in (ONE_PRICE, Prices(price, 1.0, is_money=True)):
        less, more = (
            forecast_roles((prefill, decode), load.at(rate), None, slo, 60, prices, gbit_per_s).chosen
            for rate in (load.requests_per_s, load.requests_per_s * factor)
        )
        assert less is not None or more is None
        if less is not None and more is not None:
            assert prices.of(less.replicas) <= prices.of(more.replicas) * (1 + 1e-9)


@settings(max_examples=num_examples(200), deadline=None)
@given(
    replicas(),
    st.builds(PlannedWorkload, st.floats(0.05, 20), st.integers(1, 2000), st.integers(2, 400)),
    st.integers(5, 20),
    st.sampled_from([0.5, 0.9, 0.95, 0.99]),
)
def test_over_a_link_without_cost_equal_devices_decode_no_slower_than_mixed_ones(
    replica: PlannedReplica, load: PlannedWorkload, number: int, share: float
) -> None:
    """At the same decodes for each replica: their steps differ only in the prompts."""
    mixed = Predictor(replica.shape, share).predict(load.offered, number)
    assume(math.isfinite(mixed.tpot_ms))
    pools = RolePools(replica, replica, Slo(share=share), NO_COST)
    found = pools.predict_decode(load.offered, RolePair(number, number))
    assert found.tpot_ms <= mixed.tpot_ms * 1.001
    assert pools.predict_prefill(load.offered, RolePair(number, number)).ttft_ms <= mixed.ttft_ms * 1.001


@settings(max_examples=num_examples(60), deadline=None)
@given(replicas(), replicas(), lengths, objectives, st.floats(0.1, 9), st.floats(0.5, 100))
def test_the_chosen_pair_is_the_cheapest_that_meets_the_slo(
    prefill: PlannedReplica, decode: PlannedReplica, load: PlannedWorkload, slo: Slo, price: float, gbit_per_s: float
) -> None:
    most, prices = 12, Prices(price, 1.0, is_money=True)
    pools = RolePools(prefill, decode, slo, gbit_per_s)
    pairs = [RolePair(*each) for each in product(range(1, most + 1), repeat=2)]
    enough = [pair for pair in pairs if meets(pools.predict(load.offered, pair), slo)]
    chosen = forecast_roles((prefill, decode), load, None, slo, most, prices, gbit_per_s).chosen
    assert (chosen is None) == (not enough)
    if chosen is not None:
        assert prices.of(chosen.replicas) == pytest.approx(min(map(prices.of, enough)))
        assert chosen.replicas in enough


@settings(max_examples=num_examples(60), deadline=None)
@given(replicas(), lengths, st.floats(0.1, 9), st.floats(0.1, 9))
def test_costs_are_those_of_both_roles_over_the_tokens_that_come(
    replica: PlannedReplica, load: PlannedWorkload, prefill_price: float, decode_price: float
) -> None:
    prices = Prices(prefill_price, decode_price, is_money=True)
    chosen = forecast_roles((replica, replica), load, None, Slo(), 1000, prices).chosen
    assume(chosen is not None)
    assert chosen is not None
    assert chosen.cost is not None
    assert chosen.cost.per_hour == pytest.approx(
        chosen.prefill.replicas * prefill_price + chosen.decode.replicas * decode_price
    )
    per_hour = load.requests_per_s * 3600 * load.tokens / 1e6 * chosen.cost.per_million_tokens
    assert per_hour == pytest.approx(chosen.cost.per_hour)
    assert 0 < chosen.prefill.utilization <= 1.002
    assert 0 < chosen.decode.utilization <= 1.002


@settings(max_examples=num_examples(60), deadline=None)
@given(replicas(), lengths, st.integers(1, 9), st.integers(1, 9), st.floats(0.5, 400), st.floats(1, 50))
def test_a_slower_link_delays_first_tokens_by_the_transfer_at_least_and_no_others(
    replica: PlannedReplica, load: PlannedWorkload, prefill: int, decode: int, gbit_per_s: float, slower: float
) -> None:
    pair = RolePair(prefill, decode)
    free, fast, slow = (RolePools(replica, replica, SLO, speed) for speed in (NO_COST, gbit_per_s, gbit_per_s / slower))
    predictions = [each.predict(load.offered, pair) for each in (free, fast, slow)]
    assert predictions[0].ttft_ms <= predictions[1].ttft_ms <= predictions[2].ttft_ms
    assert len({each.tpot_ms for each in predictions}) == 1
    bits = load.input_tokens * replica.kv_bytes_per_token * 8
    for pools, prediction, speed in ((fast, predictions[1], gbit_per_s), (slow, predictions[2], gbit_per_s / slower)):
        transfer_s = bits / (speed * 1e9)
        assert pools.transfer_s(load.offered) == pytest.approx(transfer_s)
        assert prediction.ttft_ms >= predictions[0].ttft_ms + transfer_s * 1000 * 0.999


# One by one


def test_a_prompt_alone_takes_its_own_steps_and_its_transfer() -> None:
    """512 tokens are one full step of 60 ms, and 51.2 MB take 409.6 ms at 1 Gbit/s; a decode step takes 10 ms."""
    found = forecast_roles((REPLICA, REPLICA), PlannedWorkload(1e-6, 512, 100), None, Slo(), 5, ONE_PRICE, 1.0)
    assert found.transfer_bytes == 512 * 100_000
    assert found.transfer_ms == pytest.approx(409.6)
    assert found.idle.ttft_ms == pytest.approx(60.0 + 409.6, rel=0.01)
    assert found.idle.tpot_ms == pytest.approx(10.0, rel=0.01)


@pytest.mark.parametrize(
    ("shape", "workload", "gbit_per_s", "role", "limit"),
    [
        ({}, PlannedWorkload(10.0, 500, 50), 100.0, "prefill", "TTFT"),
        ({}, PlannedWorkload(10.0, 50, 500), 100.0, "decode", "TPOT"),
        ({"max_num_seqs": 8}, PlannedWorkload(10.0, 50, 500), 100.0, "decode", "maxNumSeqs"),
        ({"num_bytes": 200}, PlannedWorkload(10.0, 500, 500), 100.0, "decode", "blocks"),
    ],
)
def test_what_limits_each_role_is_named(
    shape: dict[str, int], workload: PlannedWorkload, gbit_per_s: float, role: str, limit: str
) -> None:
    replica = REPLICA._replace(shape=msgspec.structs.replace(REPLICA.shape, **shape))
    slo = Slo(ttft_ms=1500.0, tpot_ms=13.0)
    chosen = forecast_roles((replica, replica), workload, None, slo, 500, ONE_PRICE, gbit_per_s).chosen
    assert chosen is not None
    assert getattr(chosen, role).limit == limit


def test_decodes_do_not_wait_for_prompts_nor_prompts_for_decodes() -> None:
    load = PlannedWorkload(10.0, 500, 200).offered
    mixed = Predictor(REPLICA.shape, 0.95).predict(load, 2)
    alone = RolePools(REPLICA, REPLICA, SLO, NO_COST).predict(load, RolePair(2, 2))
    assert alone.tpot_ms < 0.7 * mixed.tpot_ms
    assert alone.ttft_ms < 0.9 * mixed.ttft_ms


@pytest.mark.parametrize(("gbit_per_s", "limit"), [(100.0, "steps"), (2.0, "link")])
def test_without_an_slo_throughput_limits_prefill(gbit_per_s: float, limit: str) -> None:
    load = PlannedWorkload(10.0, 500, 50)
    chosen = forecast_roles((REPLICA, REPLICA), load, None, Slo(), 500, ONE_PRICE, gbit_per_s).chosen
    assert chosen is not None
    assert chosen.prefill.limit == limit
    assert chosen.link_utilization == pytest.approx(10.0 / min(chosen.replicas) * 0.4 / gbit_per_s)


def test_prefill_replicas_need_blocks_for_prompts_that_are_transferred() -> None:
    few = REPLICA._replace(shape=msgspec.structs.replace(REPLICA.shape, num_bytes=70))
    load = PlannedWorkload(2.0, 500, 50).offered
    held_s = 1.0
    assert Predictor(few.shape, 0.95).predict_prefill(load, 1).limit == ""
    assert Predictor(few.shape, 0.95).predict_prefill(load, 1, held_s).limit == "blocks"


def test_no_price_counts_devices() -> None:
    free = Prices(2.0, 1.0, is_money=False)
    chosen = forecast_roles((REPLICA, REPLICA), PlannedWorkload(20.0, 300, 100), None, SLO, 50, free).chosen
    assert chosen is not None
    assert chosen.cost is None


def test_a_pair_that_only_more_links_make_possible_is_found() -> None:
    """Two decode replicas would do, but their links delay prompts so much that 9 prefill replicas are needed."""

    def feasible(pair: RolePair) -> bool:
        return pair.prefill * min(pair) >= 18 and pair.decode >= 2

    assert cheapest(feasible, 20, sum) == RolePair(6, 3)
    assert cheapest(feasible, 20, lambda pair: pair.prefill + 9 * pair.decode) == RolePair(9, 2)
    assert cheapest(feasible, 8, lambda pair: pair.prefill + 9 * pair.decode) == RolePair(6, 3)
    assert cheapest(feasible, 4, sum) is None


@pytest.mark.parametrize(("num_users", "think_s"), [(1, 30.0), (40, 5.0), (400, 2.0)])
def test_littles_law_holds_for_users_of_both_roles(num_users: int, think_s: float) -> None:
    users = Users(num_users, think_s)
    found = forecast_roles((REPLICA, REPLICA), PlannedWorkload(0.0, 256, 100), users, SLO, 50, ONE_PRICE)
    assert found.chosen is not None
    assert found.workload.users == users
    means = RolePools(REPLICA, REPLICA, Slo(share=MEAN), 25.0).predict(found.workload.offered, found.chosen.replicas)
    answer_s = (means.ttft_ms + 99 * means.tpot_ms) / 1000
    assert found.workload.requests_per_s * (think_s + answer_s) == pytest.approx(num_users, rel=0.01)


def test_the_pair_of_users_is_the_cheapest_at_their_own_rate() -> None:
    users, most = Users(400, 2.0), 12
    lengths = PlannedWorkload(0.0, 256, 100)
    pools, means = (RolePools(REPLICA, REPLICA, each, 25.0) for each in (SLO, Slo(share=MEAN)))
    loads = Loads(means, lengths, users)

    def serves(pair: RolePair) -> bool:
        load = loads.at(pair)
        return load is not None and meets(pools.predict(load.offered, pair), SLO)

    chosen = forecast_roles((REPLICA, REPLICA), lengths, users, SLO, most, ONE_PRICE).chosen
    assert chosen is not None
    enough = [RolePair(*each) for each in product(range(1, most + 1), repeat=2) if serves(RolePair(*each))]
    assert sum(chosen.replicas) == min(map(sum, enough))


# The command


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_outline(tmp_path_factory.mktemp("models") / "seven", QWEN_7B)


def plan(seven: Path, *arguments: Any, rps: float | None = 2, output: int = 300) -> Result:
    rate = [] if rps is None else ["--rps", rps]
    words = ["plan", "--model", seven, "--accelerator", "l4", "--input", 1000, "--output", output, *rate, *arguments]
    return CliRunner().invoke(app, [str(word) for word in words])


def plan_as_json(seven: Path, *arguments: Any, **load: Any) -> dict[str, Any]:
    result = plan(seven, *arguments, "--roles", "-o", "json", **load)
    assert result.exit_code == 0, result.output
    body: dict[str, Any] = json.loads(result.stdout)
    return body


def test_every_pair_of_devices_is_compared_with_mixed_replicas(seven: Path) -> None:
    prices = ("--price-per-hour", "l4=0.8", "--price-per-hour", "h100-80gb=4")
    body = plan_as_json(seven, "--accelerator", "h100-80gb", *prices, "--ttft", "2s", "--tpot", "100ms")
    devices = [(each["prefill"]["accelerator"], each["decode"]["accelerator"]) for each in body["roles"]]
    assert devices == list(product(("l4", "h100-80gb"), repeat=2))
    assert [each["accelerator"] for each in body["plans"]] == ["l4", "h100-80gb"]
    per_hour = {"l4": 0.8, "h100-80gb": 4.0}
    for each in body["roles"]:
        assert each["served"] is False
        assert "stepTime" not in each
        expected = sum(per_hour[each[role]["accelerator"]] * each[role]["replicas"] for role in ("prefill", "decode"))
        assert each["cost"]["per_hour"] == pytest.approx(expected)
        assert each["ttft_ms"] <= 2000
        assert each["tpot_ms"] <= 100
    costs = [
        (each["cost"]["per_hour"], [each["prefill"]["accelerator"], each["decode"]["accelerator"]])
        for each in body["roles"]
    ]
    for each in body["plans"]:
        row = next(row for row in each["candidates"] if row["replicas"] == each["replicas"])
        costs.append((row["cost"]["per_hour"], [each["accelerator"]]))
    assert body["cheapest"]["accelerators"] == min(costs)[1]


def test_the_plans_beside_roles_are_those_without(seven: Path) -> None:
    alone = json.loads(plan(seven, "-o", "json").stdout)
    (beside,) = plan_as_json(seven)["plans"]
    assert {**beside, "simulated": None} == {**alone, "simulated": None, "model": str(seven), "accelerator": "l4"}


def test_the_table_says_which_is_cheapest_and_that_roles_are_not_served(seven: Path) -> None:
    result = plan(seven, "--roles", "--price-per-hour", 0.8, "--tpot", "100ms")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[2].split()[:3] == ["ACCELERATOR", "ROLES", "REPLICAS"]
    assert lines[3].startswith("l4           mixed ")
    assert lines[4].startswith("l4 + l4      prefill + decode  ")
    served = "of what Pagemill serves: l4, mixed (2.4 per hour)."
    assert f"Cheapest within TPOT 100 ms: l4 + l4, prefill + decode (1.6 per hour); {served}" in result.stdout
    assert "does not serve separate roles yet, so no LLMDeployment describes them" in lines[-1]
    assert "takes 18.4 ms at 25 Gbit/s" in result.stdout
    assert "kind: LLMDeployment" not in result.stdout


@pytest.mark.parametrize(
    ("prices", "line"),
    [
        (["l4=0.8"], ""),
        (["l4=0.8", "a100-80gb=9", "mi300x=9"], "Cheapest: l4 (1.6 per hour)."),
        (["l4=5", "a100-80gb=3", "mi300x=2"], "Cheapest: mi300x (2 per hour); of what Pagemill serves: a100-80gb (3"),
    ],
)
def test_the_cheapest_is_named_only_if_all_prices_are_known(seven: Path, prices: list[str], line: str) -> None:
    options = [word for price in prices for word in ("--price-per-hour", price)]
    result = plan(seven, "--accelerator", "a100-80gb", "--accelerator", "mi300x", *options)
    assert result.exit_code == 0, result.output
    assert ("Cheapest" in result.stdout) == bool(line)
    assert line in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ttft", "100ms"], "even a request alone has TTFT"),
        (["--ttft", "2s", "--link-gbit-per-s", "0.1"], "of which 4588 ms are the transfer of its KV cache"),
    ],
)
def test_roles_that_cannot_serve_say_why(seven: Path, arguments: list[str], words: str) -> None:
    result = plan(seven, "--roles", *arguments)
    line = next(line for line in result.stdout.splitlines() if line.startswith("l4 + l4: "))
    assert words in line
    assert "Raise the SLO or --link-gbit-per-s" in line
    (role,) = json.loads(plan(seven, "--roles", *arguments, "-o", "json").stdout)["roles"]
    assert words in role["error"]
    assert role["prefill"]["replicas"] is role["decode"]["replicas"] is role["cost"] is None


def test_more_than_the_most_replicas_is_said_as_such(seven: Path, write: Any, simulated: Any) -> None:
    document = simulated(
        engine={"extraArgs": [], "maxModelLen": 4096},
        resources={"gpus": 1, "gpuProduct": "NVIDIA-L4"},
        autoscaling={"maxReplicas": 2, "slo": {"ttft": "2s", "tpot": "100ms"}},
    )
    result = plan(seven, "--roles", "-f", write("f.yaml", document), rps=9)
    assert result.exit_code == 1
    assert "Up to 2 replicas of each role cannot serve this load within TTFT 2000 ms and TPOT 100 ms" in result.stdout
    assert "> 2 + > 2" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "output", "words"),
    [
        (["--link-gbit-per-s", "10"], 300, "--link-gbit-per-s 10: needs --roles"),
        (["--roles", "--link-gbit-per-s", "0"], 300, "--link-gbit-per-s 0: must be a number above 0"),
        (["--roles", "--link-gbit-per-s", "inf"], 300, "--link-gbit-per-s inf: must be a number above 0"),
        (["--roles", "--link-gbit-per-s", "nan"], 300, "--link-gbit-per-s nan: must be a number above 0"),
        (["--roles"], 1, "--output 1: an answer of one token needs no decode; leave out --roles"),
    ],
)
def test_options_of_roles_that_cannot_be_are_named(seven: Path, arguments: list[str], output: int, words: str) -> None:
    result = plan(seven, *arguments, output=output)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert result.stdout == ""
