"""The state of the watches: their age, whether the first listings have arrived, and deletions between watches."""

from __future__ import annotations

import asyncio

import pytest
from hand_clock import Clock
from waiting import WAIT_LIMIT_S

from pagemill_operator.backends.kubernetes.kinds import BY_NAME
from pagemill_operator.controller.watching.session import stream_of
from pagemill_operator.controller.watching.watches import StreamId, Watches

PODS = StreamId("Pod")
SERVICES = StreamId("Service")


Listing = tuple[str, str, set[tuple[str, str]]]


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def listings() -> list[Listing]:
    return []


@pytest.fixture
def watches(clock: Clock, listings: list[Listing]) -> Watches:
    kinds = [BY_NAME["Pod"], BY_NAME["Service"]]
    return Watches(kinds, on_listed=lambda *listing: listings.append(listing), clock=clock)


def test_the_age_of_a_kind_is_that_of_its_most_silent_watch(clock: Clock) -> None:
    watches = Watches([BY_NAME["Pod"]], ["a", "b"], clock=clock)
    clock.now = 30
    watches.received(StreamId("Pod", "a"))
    clock.now = 40
    assert watches.age_s("Pod") == 40
    watches.received(StreamId("Pod", "b"))
    assert watches.age_s("Pod") == 10


def test_a_watch_that_fails_to_connect_is_alive_but_receives_nothing(watches: Watches, clock: Clock) -> None:
    clock.now = 200
    watches.tried(PODS)
    watches.tried(SERVICES)
    assert watches.stalled_s() == 0
    assert watches.age_s("Pod") == 200


def test_one_silent_watch_is_a_stall(watches: Watches, clock: Clock) -> None:
    clock.now = 200
    watches.received(PODS)
    assert watches.stalled_s() == 200


async def test_caches_are_filled_when_all_listed_objects_have_arrived(watches: Watches) -> None:
    waiting = asyncio.create_task(watches.wait_synced())
    watches.page(PODS, [("default", "a")], is_first=True)
    watches.page(PODS, [("default", "b")], is_first=False)
    watches.watch_begins(PODS)
    watches.page(SERVICES, [], is_first=True)
    watches.watch_begins(SERVICES)
    assert watches.unsynced() == ["Pod"]
    watches.handled("Pod", ("default", "a"))
    await asyncio.sleep(0)
    assert not waiting.done()
    watches.handled("Pod", ("default", "b"))
    await asyncio.wait_for(waiting, WAIT_LIMIT_S)


def test_a_complete_listing_is_reported_once_with_all_its_pages(watches: Watches, listings: list[Listing]) -> None:
    watches.page(PODS, [("default", "a")], is_first=True)
    watches.page(PODS, [("default", "b")], is_first=False)
    assert listings == []
    watches.watch_begins(PODS)
    watches.watch_begins(PODS)  # the same listing, after the watch was reopened
    assert listings == [("Pod", "", {("default", "a"), ("default", "b")})]


def test_a_listing_that_restarts_drops_its_first_pages(watches: Watches, listings: list[Listing]) -> None:
    watches.page(PODS, [("default", "a")], is_first=True)
    watches.page(PODS, [("default", "b")], is_first=True)
    watches.watch_begins(PODS)
    assert listings == [("Pod", "", {("default", "b")})]


@pytest.mark.parametrize(
    ("path", "stream"),
    [
        ("/api/v1/pods", StreamId("Pod")),
        ("/api/v1/namespaces/team-a/pods", StreamId("Pod", "team-a")),
        ("/apis/apps/v1/deployments", StreamId("Deployment")),
        ("/apis/pagemill.dev/v1beta1/namespaces/x/llmdeployments", StreamId("LLMDeployment", "x")),
        ("/apis/apps/v1", None),
        ("/api/v1", None),
        ("/api/v1/namespaces/team-a/pods/chat-0", None),
        ("/apis/other.io/v1/deployments", None),
        ("/version", None),
    ],
)
def test_a_request_belongs_to_the_watch_of_its_collection(path: str, stream: StreamId | None) -> None:
    assert stream_of(path) == stream
