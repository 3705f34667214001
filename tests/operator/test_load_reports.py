"""What several gateways report of one deployment becomes one load."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest
from hand_clock import Clock

from pagemill_operator.backends.kubernetes.snapshot import Load
from pagemill_operator.controller.load_stream import DeploymentLoad, LoadBook, Report, display_wait_s

KEY = "default/chat"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock) -> LoadBook:
    return LoadBook(clock)


def report(running: int, *, age_s: float | None = 0.0, ready: int = 1, usage: float | None = 0.5) -> Report:
    load = DeploymentLoad("default", "chat", kv_cache_usage=usage, running=running, ready=ready, age_s=age_s)
    return Report([load])


def test_nobody_heard_is_not_zero(book: LoadBook) -> None:
    assert book.load(KEY) is None
    book.report("g1", Report([]))
    assert book.load(KEY) is None


def test_gateways_see_the_same_engines_so_the_freshest_counts(book: LoadBook, clock: Clock) -> None:
    book.report("g1", report(7, age_s=0.1, ready=1))
    book.report("g2", report(5, age_s=3.0, ready=2))
    assert book.load(KEY) == Load(kv_cache_usage=0.5, running=7, waiting=0, ready=2)
    clock.now += 4
    book.report("g2", report(6, age_s=0.0))
    load = book.load(KEY)
    assert load is not None
    assert load.running == 6


def test_requests_in_the_queues_of_gateways_add_up(book: LoadBook) -> None:
    for gateway, queued in (("g1", 3), ("g2", 4)):
        load = DeploymentLoad("default", "chat", running=2, waiting=1, ready=1, age_s=0.0, queued=queued)
        assert book.report(gateway, Report([load])) == {KEY}
    load = book.load(KEY)
    assert load is not None
    assert load.waiting == 1 + 3 + 4
    book.lost("g2")
    load = book.load(KEY)
    assert load is not None
    assert load.waiting == 1 + 3


def test_a_gateway_that_is_lost_says_nothing_any_more(book: LoadBook) -> None:
    book.report("g1", report(7))
    book.lost("g1")
    assert book.load(KEY) is None


def test_only_what_changed_is_told(book: LoadBook) -> None:
    assert book.report("g1", report(7)) == {KEY}
    assert book.report("g1", report(7, age_s=1.0)) == set()
    assert book.report("g1", report(8)) == {KEY}


@pytest.mark.parametrize(("reported", "shown"), [(1.5, 1.0), (-0.1, 0.0), (None, None)])
def test_a_share_is_a_share(book: LoadBook, reported: float | None, shown: float | None) -> None:
    book.report("g1", report(1, usage=reported))
    load = book.load(KEY)
    assert load is not None
    assert load.kv_cache_usage == shown


def test_fields_of_a_newer_gateway_are_ignored() -> None:
    line = b'{"deployments":[{"namespace":"a","name":"b","kv_cache_usage":null,"running":1,"later":2}],"more":1}'
    assert msgspec.json.decode(line, type=Report).deployments == [DeploymentLoad("a", "b", running=1)]


@pytest.mark.parametrize(
    ("shown_at", "wait_s"),
    [(None, 5.0), ("2026-01-01T00:00:00Z", 30.0), ("2026-01-01T00:00:50Z", 30.0), ("2025-12-31T23:59:40Z", 10.0)],
)
def test_a_shown_load_stays_for_half_a_minute(shown_at: str | None, wait_s: float) -> None:
    status = {"load": {"lastUpdateTime": shown_at}} if shown_at else {}
    assert display_wait_s(status, datetime(2026, 1, 1, tzinfo=UTC)) == wait_s
