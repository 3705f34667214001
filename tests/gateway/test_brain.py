"""The brain's state: which endpoints may get a request, how reports count, and how failures expire."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hand_clock import Clock

from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.report.state import Digests, EngineLoad, StateFrame
from pagemill_routing.brain.brain import LocalBrain
from pagemill_routing.brain.endpoints.reports import EXTERNAL_WINDOW, StateGap
from pagemill_routing.brain.interface import Assignment, RoutingRequest
from pagemill_routing.brain.resilience.ejection import Ejection
from pagemill_routing.config import RoutingConfig

NOTHING = frozenset[str]()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def brain(clock: Clock) -> LocalBrain:
    return LocalBrain(
        RoutingConfig(state_stale_after_s=3.0, ejection_base_s=1.0, ejection_max_s=8.0),
        clock=clock,
        rng=random.Random(1),
    )


def model(name: str, *endpoint_ids: str, **fields: object) -> CatalogModel:
    endpoints = [
        Endpoint(id=each, data_url=f"http://{each}:1", control_url=f"http://{each}:2") for each in endpoint_ids
    ]
    return CatalogModel(**{"deployment": name, "name": name, "endpoints": endpoints, **fields})


def frame(
    sequence: int = 1, *, snapshot: bool = True, running: int = 0, digest: str = "t", length: int = 100, **fields
):
    return StateFrame(
        sequence=sequence,
        snapshot=snapshot,
        max_model_len=length,
        digests=Digests(tokenizer_bundle=digest),
        load=EngineLoad(num_requests_running=running),
        **fields,
    )


async def place(brain: LocalBrain, name: str = "m", tried: frozenset[str] = NOTHING) -> Assignment:
    return await brain.choose(brain.resolve(name), tried, RoutingRequest(1))


def test_an_unknown_model_is_a_404_that_lists_the_known_ones(brain: LocalBrain) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("m", "a", aliases=["alias"])]))
    with pytest.raises(PagemillError) as error:
        brain.resolve("nope")
    assert (error.value.status, error.value.code) == (404, "model_not_found")
    assert "alias, m" in error.value.message


def test_an_alias_leads_to_its_deployment(brain: LocalBrain) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("m", "a", aliases=["alias"], namespace="team")]))
    brain.observer.observe("a", frame())
    target = brain.resolve("alias")
    assert (target.deployment, target.model, target.max_model_len) == ("team/m", "m", 100)


def test_before_the_first_report_the_refusal_states_the_phase_of_the_engines(brain: LocalBrain) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("m", "a", "b")]))
    brain.observer.note_phase("a", "loading", "weights 40 %")
    brain.observer.observe("b", frame(length=0))
    brain.observer.note_phase("b", "loading", "weights 40 %")
    with pytest.raises(PagemillError) as error:
        brain.resolve("m")
    assert (error.value.status, error.value.code) == (503, "model_not_ready")
    assert "2 engine(s) loading: weights 40 %" in error.value.message
    assert error.value.retry_after_s is not None


def test_a_refusal_has_no_addresses_of_engines_that_cannot_be_reached(brain: LocalBrain) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("m", "a", "b")]))
    brain.observer.note_phase("a", "unreachable", "ConnectionRefusedError: Connect call failed ('10.0.0.7', 8001)")
    brain.observer.note_phase("b", "ready", "ConnectionResetError: [Errno 104] Connection reset by peer")
    with pytest.raises(PagemillError) as error:
        brain.resolve("m")
    assert "2 engine(s) unreachable" in error.value.message
    assert not any(word in error.value.message for word in ("10.0.0.7", "8001", "Err"))


def test_a_deployment_without_endpoints_is_reported(brain: LocalBrain) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("m")]))
    with pytest.raises(PagemillError, match="no engine running"):
        brain.resolve("m")


def test_deployments_with_one_name_share_requests_by_weight(brain: LocalBrain) -> None:
    stable, canary, off = (model(name, name, weight=weight) for name, weight in (("s", 90), ("c", 10), ("o", 0)))
    models = [CatalogModel(deployment=each.deployment, name="m", weight=each.weight, endpoints=each.endpoints)
              for each in (stable, canary, off)]  # fmt: skip
    brain.observer.apply_catalog(Catalog(models=models))
    for each in "sco":
        brain.observer.observe(each, frame())
    shares = Counter(brain.resolve("m").deployment for _ in range(2000))
    assert 150 < shares["default/c"] < 260
    assert shares["default/o"] == 0
    brain.observer.observe("s", frame(2, snapshot=False, draining=True))
    assert {brain.resolve("m").deployment for _ in range(50)} == {"default/c"}


async def test_prompts_go_only_to_engines_with_their_tokenizer(brain: LocalBrain) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("m", "old", "new")]))
    brain.observer.observe("old", frame(digest="1", length=100))
    brain.observer.observe("new", frame(digest="2", length=200))
    for _ in range(20):
        target = brain.resolve("m")
        choice = await brain.choose(target, NOTHING, RoutingRequest(1))
        assert (target.bundle_digest, target.max_model_len, choice.endpoint_id) in {
            ("1", 100, "old"),
            ("2", 200, "new"),
        }


def test_a_gap_in_the_sequence_is_refused_until_the_next_snapshot(brain: LocalBrain) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("m", "a")]))
    with pytest.raises(StateGap):
        brain.observer.observe("a", frame(7, snapshot=False))
    brain.observer.observe("a", frame(7))
    brain.observer.observe("a", frame(8, snapshot=False))
    with pytest.raises(StateGap):
        brain.observer.observe("a", frame(10, snapshot=False))
    with pytest.raises(StateGap):
        brain.observer.observe("a", frame(11, snapshot=False))
    brain.observer.observe("a", frame(11))
    assert brain.registry.endpoints["a"].reports.num_gaps == 3


async def test_load_from_other_gateways_counts_while_the_report_is_fresh(brain: LocalBrain, clock: Clock) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("m", "a", "b")]))
    brain.observer.observe("a", frame(1, running=50))
    brain.observer.observe("b", frame(1))
    for _ in range(10):
        assert (await place(brain)).endpoint_id == "b"
    clock.now += 5  # the reports are stale: only this gateway's own requests count
    assert brain.reader.phase(brain.registry.endpoints["a"]) == "stale"
    assert {(await place(brain)).endpoint_id for _ in range(10)} == {"a"}


def test_a_report_sent_before_our_own_request_finished_is_not_load_from_elsewhere(brain: LocalBrain) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("m", "a")]))
    record = brain.registry.endpoints["a"]
    for sequence, running in enumerate((0, 3, 0), start=1):
        brain.observer.observe("a", frame(sequence, snapshot=sequence == 1, running=running))
    assert brain.reader.load_elsewhere(record) == 0
    for sequence in range(4, 4 + EXTERNAL_WINDOW):
        brain.observer.observe("a", frame(sequence, snapshot=False, running=3))
    assert brain.reader.load_elsewhere(record) == 3


async def test_missing_reports_never_stop_traffic(brain: LocalBrain, clock: Clock) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("m", "a", "b")]))
    for each in "ab":
        brain.observer.observe(each, frame())
        brain.observer.stream_lost(each)
    clock.now += 3600
    assert {(await place(brain)).endpoint_id for _ in range(4)} == {"a", "b"}


async def test_a_failed_endpoint_is_ejected_and_then_gets_one_probe_at_a_time(brain: LocalBrain, clock: Clock) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("m", "a", "b")]))
    for each in "ab":
        brain.observer.observe(each, frame())
    brain.failed(await place(brain, tried=frozenset("b")), "broken")
    assert brain.reader.phase(brain.registry.endpoints["a"]) == "ejected"
    assert {(await place(brain)).endpoint_id for _ in range(5)} == {"b"}
    clock.now += 1.0
    probe = await place(brain)
    assert probe.endpoint_id == "a"
    assert {(await place(brain)).endpoint_id for _ in range(5)} == {"b"}
    brain.failed(probe, "broken")
    clock.now += 1.5  # the second pause is longer than the first
    assert (await place(brain)).endpoint_id == "b"
    clock.now += 0.5
    probe = await place(brain)
    assert probe.endpoint_id == "a"
    brain.started(probe)
    assert (await place(brain)).endpoint_id == "a"


async def test_after_a_probes_client_left_another_request_probes(brain: LocalBrain, clock: Clock) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("m", "a", "b")]))
    for each in "ab":
        brain.observer.observe(each, frame())
    brain.failed(await place(brain, tried=frozenset("b")), "broken")
    clock.now += 1.0
    brain.finished(await place(brain))
    assert (await place(brain)).endpoint_id == "a"


async def test_the_last_endpoint_is_never_ejected(brain: LocalBrain) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("m", "a", "b")]))
    for each in "ab":
        brain.observer.observe(each, frame())
    for each in "ab":
        brain.failed(await place(brain, tried=frozenset("ab") - {each}), "broken")
    assert {(await place(brain)).endpoint_id for _ in range(4)} == {"a", "b"}


async def test_full_engines_and_single_bad_requests_cause_no_ejection(brain: LocalBrain) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("m", "a")]))
    brain.observer.observe("a", frame())
    for kind in ("request", "refused"):
        brain.failed(await place(brain), kind)
        assert brain.reader.phase(brain.registry.endpoints["a"]) == "ready"


async def test_a_state_stream_that_reconnects_allows_a_probe_at_once(brain: LocalBrain) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("m", "a", "b")]))
    for each in "ab":
        brain.observer.observe(each, frame())
    brain.failed(await place(brain, tried=frozenset("b")), "broken")
    brain.observer.stream_lost("a")
    assert (await place(brain)).endpoint_id == "b"
    brain.observer.observe("a", frame(1))
    assert (await place(brain)).endpoint_id == "a"


async def test_untried_endpoints_are_preferred_even_if_ejected(brain: LocalBrain) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("m", "a", "b")]))
    for each in "ab":
        brain.observer.observe(each, frame())
    brain.failed(await place(brain, tried=frozenset("b")), "broken")
    assert (await place(brain, tried=frozenset("b"))).endpoint_id == "a"
    assert (await place(brain, tried=frozenset("ab"))).endpoint_id in "ab"


async def test_a_new_catalogue_keeps_the_state_of_endpoints_that_remain(brain: LocalBrain) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("m", "a", "b")]))
    for each in "ab":
        brain.observer.observe(each, frame())
    on_a, on_b = await place(brain), await place(brain)
    brain.observer.apply_catalog(Catalog(models=[model("m", "a", "c")]))
    assert brain.registry.endpoints["a"].in_flight == 1
    assert "b" not in brain.registry.endpoints
    for choice in (on_a, on_b):
        brain.finished(choice)
    assert brain.registry.endpoints["a"].in_flight == 0
    assert (await place(brain)).endpoint_id == "a", "c has not reported yet"


def test_an_endpoint_with_a_new_address_starts_without_state(brain: LocalBrain) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("m", "a")]))
    brain.observer.observe("a", frame())
    moved = Endpoint(id="a", data_url="http://elsewhere:1", control_url="http://elsewhere:2")
    brain.observer.apply_catalog(Catalog(models=[model("m", endpoints=[moved])]))
    assert not brain.registry.endpoints["a"].usable


def test_failures_of_earlier_requests_do_not_lengthen_the_pause() -> None:
    ejection = Ejection(base_s=1.0, max_s=8.0)
    for _ in range(10):
        ejection.failed(0.0, 0)
    assert not ejection.allows(0.9)
    assert ejection.allows(1.0)


def test_the_pause_has_an_upper_bound() -> None:
    ejection = Ejection(base_s=1.0, max_s=8.0)
    now = 0.0
    for _ in range(50):
        ejection.failed(now, 0)
        now += 8.0
        assert ejection.allows(now)
