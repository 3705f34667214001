"""The connection between a worker and the control process: messages, late answers, and ended processes."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_gateway.config import GatewayConfig
from pagemill_gateway.control_process import ControlProcess
from pagemill_gateway.discovery.last_known import LastKnown, write_last_known
from pagemill_gateway.ipc import messages
from pagemill_gateway.ipc.control_process_client import ControlProcessClient
from pagemill_gateway.ipc.worker_connection import WorkerConnection, serving_workers
from pagemill_gateway.limits import store
from pagemill_gateway.limits.memory import MemoryStore
from pagemill_gateway.ports import WorkerMeasurements
from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.metrics import GATEWAY_IN_FLIGHT, GATEWAY_REQUESTS, Sample
from pagemill_protocol.report.state import Digests, EngineLoad, StateFrame
from pagemill_protocol.resource.served import QueueLimits
from pagemill_routing.brain.interface import (
    DEFAULT_TICKET,
    Assignment,
    CompletedRequest,
    HashScheme,
    QueueTicket,
    RequestOutcome,
    RetryContext,
    RoutingRequest,
    Target,
)
from pagemill_servers.keys.caller import Caller, Limits

TARGET = Target("default/d", "m", "bundle", 100, None, "deployment", HashScheme("w", "f16", 16, 4))
ASK = RoutingRequest(10)
ENTRY = store.ReservationRequest("a", "lease", 5, Limits(concurrency=1))
NAMED = [
    QueueTicket,
    RetryContext,
    RoutingRequest,
    Target,
    CompletedRequest,
    RequestOutcome,
    store.ReservationRequest,
    Caller,
]
"""Types whose values are generated from their annotations."""


def encoded(message: Any, kind: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Return values of a type without integers beyond 64 bits and without NaN, neither of which any request has.

    NaN survives the connection, but equals nothing: the comparison afterwards would fail.
    """
    return st.from_type(kind).filter(lambda value: not _has_nan(value) and _fits(value))


def _has_nan(value: Any) -> bool:
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.astuple(value)
    return any(map(_has_nan, value)) if isinstance(value, tuple) else value != value


def _fits(value: Any) -> bool:
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        return False
    return True


def test_drawn_values_contain_no_nan_at_any_depth() -> None:
    assert _has_nan(QueueTicket(waited_s=math.nan))
    assert _has_nan((1, ("a", QueueTicket(deadline_at=math.nan))))
    assert not _has_nan((1, QueueTicket()))


@pytest.mark.parametrize("kind", NAMED)
@given(data=st.data())
def test_every_value_survives_the_connection(kind: Any, data: st.DataObject) -> None:
    value = data.draw(values_of(kind))
    assert encoded(value, kind) == value


@given(number=st.integers(0, 2**40), ticket=values_of(QueueTicket), routing_request=values_of(RoutingRequest))
def test_requests_are_distinguished_from_notifications(
    number: int, ticket: QueueTicket, routing_request: RoutingRequest
) -> None:
    question = messages.Call(number, messages.Choose(TARGET, frozenset({"a", "b"}), routing_request, ticket, None))
    assert encoded(question, messages.ToControlProcess) == question
    for note in (messages.Accepted(number), messages.Finished(number, None), messages.Settle("l", number)):
        assert encoded(note, messages.ToControlProcess) == note
    for reported in (
        messages.KeepBundles(frozenset({"a"}), frozenset(), True),
        messages.ReplaceSharedKeys([Caller("h", "t")]),
    ):
        assert encoded(reported, messages.ToWorker) == reported


class WorkerStub:
    """A worker as the control process sees it."""

    def __init__(self) -> None:
        self.latest = WorkerMeasurements({}, 0)
        self.num_measured = 0
        self.digests: frozenset[str] | None = None
        self.whole = False
        self.callers: list[Caller] = []

    async def measure(self) -> WorkerMeasurements:
        return self.latest

    def measures(self) -> WorkerMeasurements:
        return self.latest

    def keep_bundles(self, digests: frozenset[str], templates: frozenset[str], *, whole: bool) -> None:
        self.digests = digests
        self.whole = whole

    def replace_shared_keys(self, callers: list[Caller]) -> None:
        self.callers = callers


class Place:
    """A folder in which control processes start and end, with one engine of one slot."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "control.sock"
        self._num_started = 0

    @asynccontextmanager
    async def control(self) -> AsyncIterator[ControlProcess]:
        config = GatewayConfig(queue=QueueLimits(max_requests=9, max_bytes=99, timeout_s=60.0))
        control = ControlProcess(config, num_before=self._num_started)
        self._num_started += 1
        control.brain.observer.apply_catalog(CATALOG)
        control.brain.observer.observe("a", FRAME)
        try:
            async with serving_workers(control, self.path):
                yield control
        finally:
            await control.close()

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[ControlProcessClient]:
        line = ControlProcessClient(self.path)
        line.start(WorkerStub())
        try:
            yield line
        finally:
            await line.close()


ENDPOINT = Endpoint(id="a", data_url="http://127.0.0.1:1", control_url="http://127.0.0.1:1")
CATALOG = Catalog(models=[CatalogModel(deployment="d", name="m", endpoints=[ENDPOINT])])
FRAME = StateFrame(
    sequence=0,
    snapshot=True,
    load=EngineLoad(),
    digests=Digests(weights="w", tokenizer_bundle="bundle"),
    max_model_len=100,
    max_num_seqs=1,
    models=["m"],
)


@pytest.fixture
def place() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        yield Place(Path(folder))


def in_flight(control: ControlProcess) -> int:
    return control.brain.registry.endpoints["a"].in_flight


async def test_what_is_settled_counts_in_no_process_when_the_store_says_so(place: Place) -> None:
    async with place.control() as control, place.worker() as line, place.worker() as other:
        for number in range(20):
            ask = ENTRY._replace(lease=f"lease-{number}")
            assert (await line.reserve(ask)).refused is None
            line.settle(ask.lease, 3)
            await line.settled()
            assert control.sharing.store.num_held == 0
            line, other = other, line
    await line.settled()  # without a connection nothing is counted, and nothing waits


async def test_a_decision_is_accounted_and_released_through_the_connection(place: Place, fake: SimpleNamespace) -> None:
    async with place.control() as control, place.worker() as line:
        choice = await line.choose(TARGET, frozenset(), ASK)
        assert (choice.endpoint_id, in_flight(control)) == ("a", 1)
        line.accepted(choice)
        line.started(choice)
        line.finished(choice, CompletedRequest(3, None))
        await fake.until(lambda: in_flight(control) == 0)


async def test_a_refusal_is_the_same_error_in_the_worker(place: Place) -> None:
    async with place.control() as control, place.worker() as line:
        with pytest.raises(PagemillError) as here:
            await control.brain.look_up("none")
        with pytest.raises(PagemillError) as there:
            await line.look_up("none")
        assert vars(there.value) == vars(here.value)


async def test_an_invalid_notification_affects_nothing_else(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fake: SimpleNamespace
) -> None:
    async with place.control() as control, place.worker() as line:
        choice = await line.choose(TARGET, frozenset(), ASK)
        monkeypatch.setattr(control.brain, "started", None)
        line.started(choice)
        assert (await line.look_up("m")).deployment == "default/d"
        assert "cannot be taken" in caplog.text
        line.finished(choice)
        await fake.until(lambda: in_flight(control) == 0)


async def test_a_cancelled_request_reserves_nothing(place: Place, fake: SimpleNamespace) -> None:
    """The same holds whether the answer was on its way or the request still waited."""
    async with place.control() as control, place.worker() as line:
        await line.wait_connected()
        for num_turns in range(12):
            question = asyncio.create_task(line.choose(TARGET, frozenset(), ASK))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            question.cancel()
            with suppress(asyncio.CancelledError):
                line.finished(await question)
            await fake.until(lambda: in_flight(control) == 0)
        choice = await line.choose(TARGET, frozenset(), ASK)
        waiting = asyncio.create_task(line.choose(TARGET, frozenset(), ASK))
        await fake.until(lambda: not control.brain.queues.is_empty("default/d"))
        waiting.cancel()
        await fake.until(lambda: control.brain.queues.is_empty("default/d"))
        line.finished(choice)
        await fake.until(lambda: in_flight(control) == 0)


@pytest.mark.parametrize("asked", [True, False])
async def test_a_worker_that_ended_reserves_nothing_and_its_counters_remain(
    place: Place, fake: SimpleNamespace, asked: bool
) -> None:
    """The same holds after a scrape and after a report without one."""
    async with place.control() as control, place.worker() as other:
        counted = control.sharing.store
        assert isinstance(counted, MemoryStore)
        async with place.worker() as line:
            stub = line._worker
            assert isinstance(stub, WorkerStub)
            labels = (("model", "m"), ("route", "r"), ("status", "200"))
            stub.latest = WorkerMeasurements(
                {
                    GATEWAY_REQUESTS.name: [Sample(GATEWAY_REQUESTS.exported_name, labels, 3.0)],
                    GATEWAY_IN_FLIGHT.name: [Sample(GATEWAY_IN_FLIGHT.name, (("model", "m"),), 1.0)],
                },
                1,
            )
            stub.num_measured += 1
            await line.choose(TARGET, frozenset(), ASK)
            assert (await line.reserve(ENTRY)).refused is None
            if asked:
                await control.scrape("")
            else:
                reported = control._workers[-1]
                assert isinstance(reported, WorkerConnection)
                await fake.until(lambda: reported._latest().num_requests == 1)
        waiting = asyncio.create_task(other.choose(TARGET, frozenset(), ASK, ticket=QueueTicket(priority=1)))
        assert (await waiting).endpoint_id == "a", "a waiting request must get the slot"
        await fake.until(lambda: counted.num_held == 0)
        text = (await control.scrape("")).body.decode()
        assert 'requests_total{model="m",route="r",status="200"} 3.0' in text
        assert 'in_flight_requests{model="m"} 0.0' in text
        assert "workers_lost_total 1.0" in text


async def test_a_new_control_process_knows_the_reservations_and_no_old_decisions(
    place: Place, fake: SimpleNamespace
) -> None:
    async with place.worker() as line:
        async with place.control():
            old = await line.choose(TARGET, frozenset(), ASK)
            assert (await line.reserve(ENTRY)).refused is None
        async with place.control() as control:
            assert (await line.reserve(ENTRY._replace(lease="other"))).refused == "concurrency"
            new = await line.choose(TARGET, frozenset(), ASK)
            assert new.decision != old.decision
            line.finished(old, CompletedRequest(3, None))
            assert await line.liveness("a") == "working"
            assert in_flight(control) == 1
            line.settle("lease", 1)
            assert (await line.reserve(ENTRY._replace(lease="other"))).refused is None


async def test_a_new_control_process_knows_the_growth_and_the_use_of_a_reservation(place: Place) -> None:
    limits = Limits(tokens_per_minute=1000)
    entry = ENTRY._replace(tokens=200, limits=limits)
    async with place.worker() as line:
        async with place.control():
            assert (await line.reserve(entry)).granted == 200
            assert await line.extend(store.ExtensionRequest(entry.account, entry.lease, 150, 300, limits)) == 300
        async with place.control():
            other = entry._replace(lease="other")
            assert (await line.reserve(other._replace(tokens=651))).refused == "tokens", (
                "50 and 300 tokens are reserved"
            )
            assert await line.extend(store.ExtensionRequest(entry.account, entry.lease, 400, 100, limits)) == 100
            line.settle(entry.lease, 420)
            assert (await line.reserve(other._replace(tokens=731))).refused == "tokens"
            assert (await line.reserve(other._replace(tokens=730))).refused is None, "270 were used here"


async def test_a_worker_that_dies_is_charged_for_the_reported_tokens(place: Place, fake: SimpleNamespace) -> None:
    limits = Limits(tokens_per_minute=1000)
    async with place.control() as control:
        counted = control.sharing.store
        assert isinstance(counted, MemoryStore)
        async with place.worker() as line:
            entry = ENTRY._replace(tokens=200, limits=limits)
            await line.reserve(entry)
            await line.extend(store.ExtensionRequest(entry.account, entry.lease, 150, 300, limits))
        await fake.until(lambda: counted.num_held == 0)
        assert counted.decide(entry._replace(lease="other", tokens=851)).refused == "tokens"
        assert counted.decide(entry._replace(lease="other", tokens=850)).refused is None


async def test_without_a_control_process_requests_wait(place: Place) -> None:
    async with place.worker() as line:
        question = asyncio.create_task(line.find("m", DEFAULT_TICKET))
        assert await line.liveness("a") == "working", "the state is unknown"
        assert not (await line.status()).ready
        async with place.control():
            assert (await question).deployment == "default/d"
            assert (await line.status()).ready
        assert (await line.status())[:3] == (True, False, "the control process is being replaced")


async def test_a_request_that_kills_control_processes_is_not_repeated_forever(
    place: Place, monkeypatch: pytest.MonkeyPatch, fake: SimpleNamespace
) -> None:
    num_asked = 0

    async with place.worker() as line:
        question = asyncio.create_task(line.look_up("m"))
        while not question.done():
            async with place.control() as control:
                asked = asyncio.Event()

                async def dies(model: str, asked: asyncio.Event = asked) -> Target:
                    nonlocal num_asked
                    num_asked += 1
                    asked.set()
                    return await asyncio.Event().wait()  # type: ignore[return-value]

                monkeypatch.setattr(control.brain, "look_up", dies)
                await asyncio.wait(
                    [question, waiting := asyncio.create_task(asked.wait())], return_when="FIRST_COMPLETED"
                )
                waiting.cancel()
        with pytest.raises(PagemillError, match="cannot decide"):
            await question
        assert num_asked == 2


async def test_a_control_process_that_dies_silently_counts_as_absent(place: Place, fake: SimpleNamespace) -> None:
    """The socket of a killed process accepts connections for a moment longer."""
    num_taken = 0

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_taken
        num_taken += 1
        writer.close()
        await writer.wait_closed()

    async with place.worker() as line:
        question = asyncio.create_task(line.look_up("m"))
        async with await asyncio.start_unix_server(hang_up, place.path):
            await fake.until(lambda: num_taken > 3)
        assert not question.done()
        async with place.control():
            assert (await question).deployment == "default/d"


async def test_keys_and_bundles_are_sent_to_workers_that_connect_later(place: Place, fake: SimpleNamespace) -> None:
    async with place.control() as control:
        control._publish_keys([Caller("h" * 64, "tenant")])
        async with place.worker() as line:
            stub = line._worker
            assert isinstance(stub, WorkerStub)
            await fake.until(lambda: stub.digests == frozenset())
            assert stub.callers == [Caller("h" * 64, "tenant")]


async def test_a_new_control_process_removes_nothing_before_it_has_contacted_the_engines(
    tmp_path: Path, fake: SimpleNamespace
) -> None:
    """Requests that arrive before that wait for the first reports."""
    write_last_known(tmp_path / "catalog.json", LastKnown(CATALOG, []))
    control = ControlProcess(GatewayConfig(), catalog_file=tmp_path / "catalog.json", num_before=1)
    try:
        control.attach(stub := WorkerStub())
        assert not stub.whole
        question = asyncio.create_task(control.brain.find("m"))
        await fake.until(lambda: control._streams.settled)
        assert not question.done()
        question.cancel()
        control.apply_catalog(Catalog())
        assert stub.whole
    finally:
        await control.close()


def test_choices_are_plain_values() -> None:
    choice = Assignment(1, "a", "http://a", "t", "Cost", True, 16, 64, 1.5, 0.25)
    assert encoded(choice, Assignment) == choice
