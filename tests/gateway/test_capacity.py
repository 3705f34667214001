"""The capacity that a request needs, an engine's free capacity, and the effect of refusals and finished answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pagemill_protocol.catalog import Endpoint
from pagemill_protocol.report.cache_kinds import ONE_KIND, CacheKind, one_kind
from pagemill_protocol.report.state import EngineLoad, KindBytes, StateFrame
from pagemill_routing.admission.output_tokens import PRIOR_TOKENS, OutputTokens
from pagemill_routing.admission.reservations import (
    BASE_PAUSE_S,
    MAX_PAUSE_S,
    CapacityNeed,
    RefusalBackoff,
    Reservations,
)
from pagemill_routing.brain.endpoints.record import EndpointRecord, has_capacity
from pagemill_routing.brain.endpoints.reports import EndpointReports
from pagemill_routing.brain.queue.deployment_queue import UNKNOWN_WAIT_S, DrainRate


class Engine:
    """An endpoint's record and the reports for it."""

    def __init__(self, *, max_num_seqs: int = 0, blocks: int = 0, kinds: Sequence[CacheKind] = ONE_KIND) -> None:
        """`blocks`: the size of the cache, in blocks of one byte unless `kinds` have others."""
        self.kinds = list(kinds)
        endpoint = Endpoint(id="e", data_url="http://e:1", control_url="http://e:2")
        self.record = EndpointRecord(endpoint, "d", EndpointReports(3.0))
        self.max_num_seqs, self.blocks = max_num_seqs, blocks
        self.now = 0.0
        self._sequence = 0
        self._decision = 0

    def report(self, *, active: int = 0, **load: Any) -> None:
        self._sequence += 1
        frame = StateFrame(
            sequence=self._sequence,
            snapshot=self._sequence == 1,
            max_model_len=1000,
            max_num_seqs=self.max_num_seqs,
            block_size=10,
            kinds=self.kinds,
            load=EngineLoad(num_kv_bytes_total=self.blocks, num_kv_bytes_active=active, **load),
        )
        reserved = self.record.reserved
        self.record.reports.accept(frame, reserved.num_sequences, self.now, reserved.num_low_priority_sequences)
        self.record.reserved.reported()

    def fits(self, need: CapacityNeed) -> bool:
        return has_capacity(self.record, need, self.now)

    def send(self, need: CapacityNeed) -> int:
        self._decision += 1
        self.record.in_flight += 1
        self.record.reserved.reserve(self._decision, need, need.num_bytes(10, self.kinds))
        return self._decision

    def fill(self, need: CapacityNeed) -> int:
        """Send requests until none fits; return their number."""
        count = 0
        while self.fits(need):
            self.send(need)
            count += 1
        return count


def need(prompt: int = 20, output: int = 30, sequences: int = 1) -> CapacityNeed:
    return CapacityNeed(prompt, prompt, output, sequences)


def test_log_probabilities_cost_a_part_of_a_token_each() -> None:
    asked = replace(need(prompt=20, output=30, sequences=4), num_logprobs=20)
    assert need(prompt=20, output=30, sequences=4).cost_tokens == 20 + 4 * 30
    assert asked.cost_tokens == 20 + 4 * 30 * 3
    assert asked.with_cached(15).cost_with(10) == 5 + 10 * 3


def test_sequence_slots_are_counted_until_none_is_free() -> None:
    engine = Engine(max_num_seqs=8)
    engine.report()
    assert engine.fill(need()) == 8


def test_each_sequence_takes_a_slot_and_one_request_always_fits_an_idle_engine() -> None:
    engine = Engine(max_num_seqs=8)
    engine.report()
    assert engine.fill(need(sequences=3)) == 2
    small = Engine(max_num_seqs=2)
    small.report()
    assert small.fill(need(sequences=3)) == 1


def test_slots_of_sequences_that_give_way_are_free_for_all_others() -> None:
    engine, line = Engine(max_num_seqs=4), replace(need(), is_low_priority=True)
    engine.report()
    assert engine.fill(line) == 4
    assert engine.fill(need()) == 4
    assert not engine.fits(line)


def test_batch_lines_of_another_gateway_give_way_while_the_report_is_fresh() -> None:
    engine, line = Engine(max_num_seqs=8), replace(need(), is_low_priority=True)
    engine.send(line)
    for _ in range(4):
        engine.report(num_requests_running=8, num_low_priority_requests=6)
    assert engine.record.reports.external_low_priority() == 5
    assert not engine.fits(line)
    assert engine.fill(need()) == 6
    engine.record.reports.disconnected()
    assert engine.fill(need()) == 2, "without reports, only one line and six requests of this gateway are known"


def test_sequences_share_the_blocks_of_their_prompt() -> None:
    assert need(prompt=21, output=30).num_bytes(10, ONE_KIND) == 3 + 3
    assert need(prompt=21, output=30, sequences=4).num_bytes(10, ONE_KIND) == 3 + 4 * 3


def windowed(window: int, num_full: int, num_windowed: int) -> list[CacheKind]:
    """Return the kinds of a model with so many layers of each."""
    return [CacheKind("full", block_bytes=100 * num_full), CacheKind("w", window, block_bytes=100 * num_windowed)]


def test_behind_a_window_tokens_need_no_more_bytes() -> None:
    kinds = windowed(40, 1, 5)
    assert need(prompt=30, output=1).num_bytes(10, kinds) == 600 * need(prompt=30, output=1).num_bytes(10, ONE_KIND)
    # 101 blocks in one layer of six, and at most the window's 4 and one more in five.
    assert need(prompt=1000, output=1).num_bytes(10, kinds) == 101 * 100 + 5 * 500
    assert need(prompt=1, output=1000, sequences=4).num_bytes(10, kinds) == 401 * 100 + 4 * 5 * 500


@pytest.mark.parametrize(("window", "num_windowed", "share"), [(1024, 5, 0.20), (128, 1, 0.51)])
def test_an_engine_gets_as_many_windowed_sequences_as_it_can_hold(window: int, num_windowed: int, share: float) -> None:
    kinds = windowed(window, 1, num_windowed)
    wanted, full = need(prompt=32_768, output=1), [one_kind(kinds)]
    size = wanted.num_bytes(10, kinds)
    assert size <= share * wanted.num_bytes(10, full)
    for several, count in ((full, int(5 * share)), (kinds, 5)):
        engine = Engine(blocks=5 * size, kinds=several)
        engine.report()
        assert engine.fill(wanted) == count
    # Those that hold their windows already need no more than their next block.
    engine = Engine(blocks=5 * size, kinds=kinds)
    engine.report()
    for decision in [engine.send(wanted) for _ in range(3)]:
        engine.record.reserved.accepted(decision)
    held = [KindBytes(0, 3 * 3277 * 100, 0), KindBytes(0, 3 * (size - 3278 * 100), 0)]
    running = {"num_requests_running": 3, "num_tokens_running": 3 * 32_769, "kind_bytes": held}
    for _ in range(2):
        engine.report(active=sum(each.active for each in held), **running)
    assert engine.fill(wanted) == 2


def test_blocks_are_reserved_before_any_report_shows_them() -> None:
    engine = Engine(blocks=23)
    engine.report()
    assert engine.fill(need()) == 4


def test_blocks_of_other_gateways_count() -> None:
    engine = Engine(blocks=23)
    engine.report(active=9, num_requests_running=1)
    assert engine.fill(need()) == 2


def test_slots_of_other_gateways_count_while_the_report_is_fresh() -> None:
    engine = Engine(max_num_seqs=8)
    engine.report(num_requests_running=3)
    assert engine.fill(need()) == 5
    stale = Engine(max_num_seqs=8)
    stale.report(num_requests_running=3)
    stale.now = 10.0
    assert stale.fill(need()) == 8, "only this gateway's own requests count"


def test_for_a_silent_engine_only_own_reservations_count() -> None:
    engine = Engine(blocks=20)
    engine.report(active=20, num_requests_running=1)
    engine.now = 10.0
    assert engine.fill(need()) == 4


def test_an_engine_without_reports_is_limited_only_by_its_refusals() -> None:
    engine = Engine()
    assert engine.fits(need())
    engine.report()
    engine.send(need(prompt=10**6))
    assert engine.fits(need())


def test_a_request_larger_than_the_cache_is_sent_to_an_idle_engine() -> None:
    engine = Engine(blocks=10)
    engine.report()
    decision = engine.send(need(output=10))
    assert not engine.fits(need(prompt=500))
    engine.record.reserved.release(decision)
    assert engine.fits(need(prompt=500))


def test_two_reports_after_its_acceptance_only_growth_of_a_request_is_reserved() -> None:
    engine = Engine(blocks=100)
    engine.report()
    decision = engine.send(need(prompt=100, output=200))
    engine.report(active=10, num_requests_running=1, num_tokens_running=100)
    assert engine.record.reserved.num_unreported_bytes == 30, "the engine has not accepted the request"
    engine.record.reserved.accepted(decision)
    engine.report(active=10, num_requests_running=1, num_tokens_running=100)
    assert engine.record.reserved.num_unreported_bytes == 30, "that report may have been sent before the acceptance"
    engine.report(active=10, num_requests_running=1, num_tokens_running=100)
    assert engine.record.reserved.num_unreported_bytes == 0
    free = 100 - 10 - 20 - 1  # one for a last block that is not full
    assert engine.fits(need(prompt=10 * free, output=0))
    assert not engine.fits(need(prompt=10 * free + 1, output=0))
    engine.report(active=25, num_requests_running=1, num_tokens_running=250)
    assert engine.fits(need(prompt=10 * (100 - 25 - 5 - 1), output=0))


def test_requests_that_wait_in_the_engine_take_their_blocks_first() -> None:
    engine = Engine(blocks=50)
    engine.report(num_requests_waiting=1, num_tokens_waiting=300)
    assert engine.fits(need(prompt=200, output=0))
    assert not engine.fits(need(prompt=201, output=0))


@given(st.data())
def test_every_reservation_is_released_in_full(data: st.DataObject) -> None:
    reserved, open_decisions = Reservations(), set()
    for decision in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["reserve", "accepted", "reported", "release"]))
        if action == "reserve":
            prompt, output = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 99))
            some = need(prompt, output, data.draw(st.integers(1, 4)))
            wanted = replace(some, is_low_priority=data.draw(st.booleans()))
            reserved.reserve(decision, wanted, wanted.num_bytes(16, ONE_KIND))
            open_decisions.add(decision)
        elif action == "accepted" and open_decisions:
            reserved.accepted(data.draw(st.sampled_from(sorted(open_decisions))))
        elif action == "reported":
            reserved.reported()
        elif action == "release" and open_decisions:
            gone = data.draw(st.sampled_from(sorted(open_decisions)))
            open_decisions.remove(gone)
            assert reserved.release(gone) is not None
            assert reserved.release(gone) is None
        assert 0 <= reserved.num_unreported_bytes <= reserved.num_bytes
        assert 0 <= reserved.num_low_priority_sequences <= reserved.num_sequences
        assert len(reserved) == len(open_decisions)
    for decision in open_decisions:
        reserved.release(decision)
    counts = (
        reserved.num_sequences,
        reserved.num_low_priority_sequences,
        reserved.num_bytes,
        reserved.num_unreported_bytes,
        reserved.num_reported_sequences,
        reserved.num_reported_prompt_tokens,
        reserved.num_reported_output_tokens,
    )
    assert counts == (0,) * 7


# -- lengths of answers ------------------------------------------------------------------------------------------------


def test_without_observations_the_expected_length_is_a_default_within_the_limit() -> None:
    outputs = OutputTokens()
    assert outputs.expect(None) == PRIOR_TOKENS
    assert outputs.expect(40) == 40
    assert outputs.expect(100_000) == PRIOR_TOKENS


def test_lengths_are_learned_separately_by_size_of_the_limit() -> None:
    outputs = OutputTokens()
    for _ in range(100):
        outputs.ended(30, 4096)
        outputs.ended(900, 1000)
    assert 30 <= outputs.expect(4096) <= 45
    assert 900 <= outputs.expect(1000) <= 1000
    assert outputs.expect(16) == 16, "nothing is known of such a limit: the lengths of all answers count"
    assert outputs.expect(None) >= 900


def test_a_changed_workload_is_learned_again() -> None:
    outputs = OutputTokens()
    for _ in range(5000):
        outputs.ended(2000, None)
    for _ in range(3000):
        outputs.ended(50, None)
    assert outputs.expect(None) <= 80


@given(lengths=st.lists(st.integers(0, 200_000), min_size=8, max_size=200), limit=st.none() | st.integers(1, 10**6))
def test_an_expected_length_covers_most_answers_and_stays_within_the_limit(
    lengths: list[int], limit: int | None
) -> None:
    outputs = OutputTokens()
    for length in lengths:
        outputs.ended(length, limit)
    expected = outputs.expect(limit)
    assert 1 <= expected <= (math.inf if limit is None else limit)
    covered = sum(length <= expected for length in lengths) / len(lengths)
    assert covered >= 0.8 - 1e-9 or expected == limit


# -- the rate of the queue ---------------------------------------------------------------------------------------------


def test_without_observations_the_expected_wait_is_a_default() -> None:
    assert DrainRate().retry_after_s(10**9) == UNKNOWN_WAIT_S
    assert DrainRate().wait_s(10) is None


def test_the_rate_is_measured_only_while_requests_wait() -> None:
    drain = DrainRate()
    drain.watch(0.0, waiting=True)
    for second in range(1, 11):
        drain.served(100)
        drain.watch(float(second), waiting=True)
    drain.watch(10.0, waiting=False)
    drain.watch(1000.0, waiting=True)
    assert drain.wait_s(1000) == pytest.approx(10.0, rel=0.3)


def test_retry_after_stays_between_one_second_and_two_minutes() -> None:
    drain = DrainRate()
    drain.watch(0.0, waiting=True)
    drain.watch(1.0, waiting=True)
    drain.served(100)
    assert drain.retry_after_s(1) == 1.0
    assert drain.retry_after_s(10**9) == 120.0


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_refusal_applies_until_an_own_request_ends_or_the_pause_is_over() -> None:
    refusal_backoff = RefusalBackoff()
    assert refusal_backoff.allows(10**6, 0.0)
    refusal_backoff.refused(5, now=0.0)
    assert not refusal_backoff.allows(5, 0.0)
    assert refusal_backoff.allows(4, 0.0)
    assert refusal_backoff.allows(5, BASE_PAUSE_S)


def test_after_the_pause_one_request_is_sent_and_its_acceptance_ends_the_refusal() -> None:
    refusal_backoff = RefusalBackoff()
    refusal_backoff.refused(5, now=0.0)
    refusal_backoff.chosen(5, BASE_PAUSE_S)
    assert not refusal_backoff.allows(6, BASE_PAUSE_S)
    refusal_backoff.accepted()
    assert refusal_backoff.allows(100, BASE_PAUSE_S)


def test_pauses_grow_up_to_a_limit() -> None:
    refusal_backoff, now = RefusalBackoff(), 0.0
    for _ in range(30):
        refusal_backoff.refused(0, now)
        assert not refusal_backoff.allows(0, now + BASE_PAUSE_S * 0.9)
        assert refusal_backoff.allows(0, now + MAX_PAUSE_S)
        now += MAX_PAUSE_S
    assert not refusal_backoff.allows(0, now - MAX_PAUSE_S * 0.1)
