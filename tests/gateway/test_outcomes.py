"""Each request has one outcome, counted once, and metrics, log and traces agree with what its client got."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
from batch_client import client_of, kept_in, line
from otlp_receiver import SAMPLED, receiving
from waiting import WAIT_LIMIT_S, eventually

from pagemill_gateway.limits.store import Reason
from pagemill_gateway.metrics.beginnings import LIMITS
from pagemill_gateway.metrics.control_process import ControlProcessMetrics
from pagemill_gateway.metrics.worker import WorkerMetrics
from pagemill_gateway.ports import WorkerMeasurements
from pagemill_gateway.request_record import RequestRecord
from pagemill_protocol import metrics as specs
from pagemill_protocol.errors import deadline_exceeded, unavailable
from pagemill_protocol.report.outcomes import BURNING, NO_CAPACITY, NO_FIRST_TOKEN, OUTCOMES, Outcome, outcome_of
from pagemill_protocol.resource.served import QueueLimits
from pagemill_servers.auth import hash_key
from pagemill_servers.keys.caller import Limits
from pagemill_servers.keys.entries import parse_entry
from pagemill_servers.tracing.config import TracingConfig

KEY, LIMITED = ({"Authorization": f"Bearer sk-{name}"} for name in ("one", "two"))
KEYS = [f"{hash_key('sk-one')} tenant=a", f"{hash_key('sk-two')} tenant=b requests_per_minute=1"]
REQUESTS = specs.GATEWAY_REQUESTS.exported_name
ENDED = specs.GATEWAY_OUTCOMES.exported_name

WITHOUT_A_BEGINNING = (
    specs.GATEWAY_REQUESTS,
    specs.GATEWAY_ROUTING_DECISIONS,
    specs.GATEWAY_ADAPTER_REQUESTS,
    specs.GATEWAY_ADAPTER_TOKENS,
    specs.GATEWAY_LIMITED,
)
"""Metrics whose labels have too many values, of which no objective is computed, and those that begin with the keys."""


class Place:
    """A gateway whose only engine has one place, and a queue for one request."""

    def __init__(self, gateway: Any, engine: Any, fake: Any) -> None:
        self.gateway, self.engine, self.fake = gateway, engine, fake

    async def ask(self, **fields: Any) -> Outcome:
        """Return the outcome that the client sees."""
        headers = {**KEY, **fields.pop("headers", {})}
        reply = await self.gateway.chat(headers=headers, **fields)
        if reply.status < 400 and b'"error"' not in reply.raw:
            return "completed"
        if b'"content"' in reply.raw:
            return "failed_after_first_token"
        code = (reply.error if reply.status >= 400 else reply.events[-1]["error"])["code"]
        return outcome_of(reply.status if reply.status >= 400 else 500, code, after_first_token=False)

    @contextlib.asynccontextmanager
    async def full(self) -> Any:
        """Occupy the engine's place."""
        release = asyncio.Event()
        self.engine.behaviours.append(self.fake.says("first", gate=release))
        first = asyncio.create_task(self.ask(stream=True))
        await self.fake.until(lambda: self.gateway.record(self.engine).in_flight == 1)
        yield
        release.set()
        assert await first == "completed"

    async def in_use(self) -> None:
        """Wait for the end of the engine's ejection."""
        reader, record = self.gateway.gateway.control.brain.reader, self.gateway.record(self.engine)
        await eventually(lambda: reader.phase(record) == "ready")

    async def samples(self) -> Counter[Outcome]:
        """Return how many requests ended with each outcome, by the metrics."""
        found: dict[str, Counter[Outcome]] = {REQUESTS: Counter(), ENDED: Counter()}
        text = (await self.gateway.get("/metrics", control=True)).raw.decode()
        for each in text.splitlines():
            for metric in {REQUESTS, ENDED}:
                if each.startswith(f"{metric}{{") and 'model=""' not in each:
                    (name,) = [outcome.name for outcome in OUTCOMES if f'outcome="{outcome.name}"' in each]
                    found[metric][name] += int(float(each.rpartition(" ")[2]))
        assert found[REQUESTS] == +found[ENDED]
        return found[REQUESTS]

    async def samples_of(self, num_requests: int) -> Counter[Outcome]:
        """Return `samples` once so many requests are counted, which may be a moment after their clients' ends."""

        async def found() -> Counter[Outcome] | None:
            samples = await self.samples()
            return samples if samples.total() >= num_requests else None

        return Counter(await eventually(found))


async def completes(place: Place) -> list[Outcome]:
    return [await place.ask(stream=False), await place.ask(stream=True)]


async def sends_a_wrong_request(place: Place) -> list[Outcome]:
    url, session = place.gateway.url + "/v1/chat/completions", place.gateway.session
    for headers, body in (({}, "{}"), (KEY, "{"), ({**KEY, "content-type": "text/plain"}, "{}")):
        async with session.post(url, data=body, headers={"content-type": "application/json", **headers}) as response:
            assert response.status in (400, 401, 415)
    return [
        *["refused"] * 3,
        await place.ask(model="unheard-of"),
        await place.ask(temperature=-1),
        await place.ask(messages=[{"role": "user", "content": "x" * 70_000}]),
    ]


async def exceeds_its_own_limit(place: Place) -> list[Outcome]:
    return ["refused" if await place.ask(headers=LIMITED) == "refused" else "completed" for _ in range(2)]


async def waits_in_vain(place: Place) -> list[Outcome]:
    async with place.full():
        stream = asyncio.create_task(place.ask(stream=True))
        await eventually(lambda: place.gateway.gateway.control.brain.queues.state("default/d").num_requests == 1)
        full = await place.ask()
        waited = await stream
        return ["completed", full, waited, await place.ask(headers={"x-request-timeout-s": "0.03"})]


async def has_a_deadline(place: Place) -> list[Outcome]:
    place.engine.behaviours += [place.fake.says("a", "b", gate=asyncio.Event()) for _ in range(2)]
    headers = {"x-request-timeout-s": "0.05"}
    found = [await place.ask(stream=True, headers=headers), await place.ask(stream=False, headers=headers)]
    place.engine.behaviours.clear()  # a request whose time was over before it was sent has used none
    return found


async def meets_a_broken_engine(place: Place) -> list[Outcome]:
    found: list[Outcome] = []
    for stream in (True, False):
        place.engine.behaviour = place.fake.sends(b"garbage")
        found.append(await place.ask(stream=stream))
        place.engine.behaviour = place.fake.says("hello", " world")
        await place.in_use()
    return found


async def loses_its_engine_in_mid_answer(place: Place) -> list[Outcome]:
    place.engine.behaviours.append(place.fake.breaks_off(1))
    place.engine.behaviour = place.fake.sends(b"garbage")
    found = await place.ask(stream=True)
    place.engine.behaviour = place.fake.says("hello", " world")
    await place.in_use()
    return [found]


async def leaves(place: Place) -> list[Outcome]:
    place.engine.behaviours.append(place.fake.says("a", "b", gate=asyncio.Event()))
    num_before = len(place.engine.requests)
    asking = asyncio.create_task(place.ask(stream=False))
    await eventually(lambda: len(place.engine.requests) > num_before)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await eventually(lambda: place.gateway.record(place.engine).in_flight == 0)
    return ["client_left"]


WAYS: list[Callable[[Place], Awaitable[list[Outcome]]]] = [
    completes,
    sends_a_wrong_request,
    waits_in_vain,
    has_a_deadline,
    meets_a_broken_engine,
    loses_its_engine_in_mid_answer,
    leaves,
]


async def place_of(engines: Any, gateways: Any, fake: Any) -> Place:
    engines[0].max_num_seqs = 1
    gateway = await gateways(
        engines[0],
        api_keys=KEYS,
        keep_alive_interval_s=0.02,
        max_body_bytes=60_000,
        queue=QueueLimits(max_requests=1, max_bytes=10**8, timeout_s=0.5),
    )
    return Place(gateway, engines[0], fake)


@pytest.mark.slow
@pytest.mark.parametrize("num_requests", [1, pytest.param(2000, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
async def test_outcomes_are_the_clients_own_count(engines, gateways, fake, num_requests, caplog) -> None:
    """With one request, each way to end is taken once."""
    place = await place_of(engines, gateways, fake)
    caplog.set_level("INFO", logger="pagemill.gateway.access")
    expected = Counter(await exceeds_its_own_limit(place))
    ways = list(WAYS)
    while ways or expected.total() < num_requests:
        way = ways.pop() if ways else random.choice(WAYS)
        expected += Counter(found := await way(place))
        if num_requests == 1:
            assert await place.samples_of(expected.total()) == expected, (way.__name__, found)
    await eventually(lambda: len(_lines(caplog)) == expected.total())
    assert await place.samples_of(expected.total()) == expected
    assert Counter(each["outcome"] for each in _lines(caplog)) == expected
    assert all(each.get("error") for each in _lines(caplog) if each["outcome"] not in ("completed", "client_left"))
    assert {each["model"] for each in _lines(caplog)} == {"tiny", "unknown"}


def _lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(each.message) for each in caplog.records if each.name == "pagemill.gateway.access"]


def _lines_of(caplog: pytest.LogCaptureFixture, route: str) -> list[dict[str, Any]]:
    return [each for each in _lines(caplog) if each["route"] == route]


@pytest.mark.usefixtures("reporting_engines", "quick_batches")
async def test_a_line_whose_owner_cancels_the_batch_is_a_client_that_left(
    engines, gateways, fake, caplog, tmp_path: Path
) -> None:
    engines[0].max_num_seqs, engines[0].behaviour = 64, fake.says("a", "b", gate=asyncio.Event())
    gateway = await gateways(engines[0], **kept_in(tmp_path))
    client = client_of(gateway)
    batch = await client.create([line(number) for number in range(3)])
    await eventually(lambda: engines[0].num_inside == 3)
    with caplog.at_level("INFO", logger="pagemill.gateway.access"):
        await client.ask("POST", f"/v1/batches/{batch['id']}/cancel")
        assert (await client.ended(batch))["status"] == "cancelled"
        await eventually(lambda: len(_lines_of(caplog, "/v1/chat/completions")) == 3)
    lines = _lines_of(caplog, "/v1/chat/completions")
    assert [(each["status"], each["outcome"]) for each in lines] == [(499, "client_left")] * 3


async def test_attempts_at_a_killed_engine_reach_a_scrape(engines, gateways, fake) -> None:
    gateway = await gateways(*engines[:2])
    engines[0].behaviour = fake.breaks_off(1)
    while not any(request.stream for request in engines[0].requests):
        assert (await gateway.chat(stream=True)).status == 200
    await engines[0].kill()
    catalog = fake.catalog_of(engines[1])
    gateway.gateway.control.apply_catalog(catalog)
    for _ in range(2):  # the first measurement may be that of the status
        await gateway.get("/status", control=True)
    text = (await gateway.get("/metrics", control=True)).raw.decode()
    assert 'upstream_attempts_total{model="tiny",outcome="lost"} 1.0' in text


async def test_series_of_a_known_model_begin_at_zero(engines, gateways) -> None:
    """A series that begins with its first event has no `rate()` for it."""
    gateway = await gateways(engines[0])
    text = (await gateway.get("/metrics", control=True)).raw.decode()
    for model, stream, outcome in product(("tiny", "unknown"), ("true", "false"), OUTCOMES):
        series = f'{ENDED}{{model="{model}",outcome="{outcome.name}",stream="{stream}"}}'
        assert f"{series} 0.0" in text
    names = {each.name for each in specs.GATEWAY_METRICS if each.kind != "gauge" and "model" in each.labels}
    missing = {name for name in names if not re.search(rf'^{name}\w*{{.*model="tiny"', text, re.MULTILINE)}
    assert missing == {each.name for each in WITHOUT_A_BEGINNING}


def test_series_of_what_keys_declare_begin_at_zero_and_end_after_their_tenant() -> None:
    now = 0.0
    metrics = WorkerMetrics(lambda: now)
    declared = [
        "tenant=a objective=99",
        "tenant=b requests_per_minute=6 tokens_per_day@sales=9",
        "tenant=c",
        "concurrency=1",
    ]
    callers = [parse_entry(f"{hash_key(each)} {each}") for each in declared]

    def series() -> set[str]:
        metrics.follow_keys(callers)
        samples = metrics.samples(body_bytes=0, journal_tokens=0)
        kept = (specs.GATEWAY_TENANT_REQUESTS, specs.GATEWAY_TENANT_ERROR_BUDGET, specs.GATEWAY_LIMITED)
        return {f"{spec.name}{sorted(dict(each.labels).values())}" for spec in kept for each in samples[spec.name]}

    of_a = {f"pagemill_gateway_tenant_requests{sorted(('a', each.name))}" for each in OUTCOMES}
    of_a |= {"pagemill_gateway_tenant_error_budget['a']"}
    expected = of_a | {
        *(f"pagemill_gateway_tenant_requests{sorted(('b', each.name))}" for each in OUTCOMES),
        "pagemill_gateway_limited['-', 'b', 'requests']",
        "pagemill_gateway_limited['b', 'budget_day', 'sales']",
        "pagemill_gateway_limited['-', '-', 'concurrency']",
    }
    assert series() == expected
    assert metrics.num_updates == 0
    del callers[0]
    assert series() == expected
    now = 599
    assert series() == expected
    now = 600
    assert series() == expected - of_a
    assert set(LIMITS.values()) == set(get_args(Reason))
    assert set(LIMITS) == set(Limits._fields)


async def test_the_span_of_a_request_has_its_outcome(engines, gateways, fake, monkeypatch) -> None:
    monkeypatch.setattr("pagemill_servers.tracing.exporting.BATCH_DELAY_S", 0.02)
    async with receiving() as receiver:
        gateway = await gateways(engines[0], tracing=TracingConfig(endpoint=receiver.url))
        engines[0].behaviour = fake.sends(b"garbage")
        await gateway.chat(headers=SAMPLED)
        await eventually(lambda: receiver.named("POST /v1/chat/completions"))
    (root,) = receiver.named("POST /v1/chat/completions")
    assert root["attributes"]["pagemill.outcome"] == "failed_before_first_token"


@pytest.mark.parametrize("code", sorted(NO_CAPACITY))
def test_an_error_without_room_is_no_fault_of_the_client(code: str) -> None:
    assert outcome_of(503, code, after_first_token=False) == "no_capacity"
    assert outcome_of(429, code, after_first_token=True) == "failed_after_first_token"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 413, 415, 429])
def test_other_errors_of_clients_burn_nothing(status: int) -> None:
    assert outcome_of(status, "rate_limit_exceeded", after_first_token=False) == "refused"


def test_a_deadline_counts_alike_whether_or_not_a_stream_had_begun_with_comments() -> None:
    for stream, tokens, expected in (
        (False, 5, "no_capacity"),
        (True, 0, "no_capacity"),
        (True, 5, "failed_after_first_token"),
    ):
        record = RequestRecord("/r", stream=stream, num_delivered=tokens, status=200)
        record.failed(deadline_exceeded())
        assert record.outcome == expected
        assert expected in BURNING


def test_an_answer_that_broke_off_has_failed_after_its_first_token() -> None:
    record = RequestRecord("/r", status=200, has_broken_off=True)
    record.failed(unavailable("Too many."))
    assert record.outcome == "failed_after_first_token"
    assert record.outcome not in NO_FIRST_TOKEN


async def test_a_model_without_an_engine_is_named_and_burns(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0], catalog=fake.catalog_of(aliases=["also"]), wait=False)
    reply = await gateway.chat(model="also")
    assert (reply.status, reply.error["code"]) == (503, "model_not_ready")
    text = (await gateway.get("/metrics", control=True)).raw.decode()
    (found,) = [each for each in text.splitlines() if each.startswith(f"{REQUESTS}{{")]
    assert 'model="tiny"' in found
    assert 'outcome="no_capacity"' in found


def test_every_error_code_for_missing_room_is_in_the_sources() -> None:
    root = Path(__file__).resolve().parents[2]
    text = "".join(
        path.read_text("utf-8") for folder in ("gateway", "libs") for path in (root / folder).rglob("*.py")
        if path.name != "outcomes.py"
    )  # fmt: skip
    assert [code for code in NO_CAPACITY if f'"{code}"' not in text] == []


async def test_tenants_of_ended_workers_are_forgotten_too(engines, gateways) -> None:
    now = 0.0
    reader = (await gateways(engines[0])).gateway.control.brain.reader
    ended = WorkerMetrics()
    for tenant in ("revoked", "kept", ""):
        ended.tenant_used(tenant, "m", 1, 1)
    metrics = ControlProcessMetrics(lambda: now)
    metrics.worker_left(ended.samples(body_bytes=0, journal_tokens=0), lost=False)

    def tenants() -> set[str]:
        worker = WorkerMeasurements({}, 0, frozenset({"kept"}))
        text = metrics.scrape(reader, [worker], ready=True, current=True, accept="").body.decode()
        return set(re.findall(r'tenant="([^"]+)"', text))

    assert tenants() == {"revoked", "kept", "-"}
    now = 600
    assert tenants() == {"kept", "-"}


def test_a_request_of_a_tenant_with_an_objective_adds_to_its_error_budget() -> None:
    metrics = WorkerMetrics()
    for status, code in ((200, None), (503, "queue_full"), (400, "invalid_value")):
        record = RequestRecord("/v1/chat/completions", status=status, error_code=code)
        record.called_by(parse_entry(f"{hash_key('sk-one')} tenant=a objective=99.5"))
        record.error_status = status if code else 0
        metrics.finished(record)
    samples = metrics.samples(body_bytes=0, journal_tokens=0)
    (allowed,) = samples[specs.GATEWAY_TENANT_ERROR_BUDGET.name]
    assert (dict(allowed.labels), allowed.value) == ({"tenant": "a"}, pytest.approx(0.01)), "a refusal is not counted"
    counted = {dict(each.labels)["outcome"]: each.value for each in samples[specs.GATEWAY_TENANT_REQUESTS.name]}
    assert counted == {"completed": 1, "no_capacity": 1, "refused": 1}


@pytest.mark.parametrize(
    ("headers", "body", "status", "code"),
    [
        ({}, b"{}", 401, "invalid_api_key"),
        ({**KEY, "content-type": "text/plain"}, b"{}", 415, "unsupported_media_type"),
        (KEY, b"x" * 70_000, 413, None),
    ],
)
async def test_an_error_before_routing_has_its_reason_in_log_and_metrics(
    engines, gateways, fake, caplog, headers, body, status, code
) -> None:
    place = await place_of(engines, gateways, fake)
    caplog.set_level("INFO", logger="pagemill.gateway.access")
    url = f"{place.gateway.url}/v1/chat/completions"
    async with place.gateway.session.post(
        url, data=body, headers={"content-type": "application/json", **headers}
    ) as response:
        assert response.status == status
        shown = (await response.json())["error"]
    await eventually(lambda: _lines(caplog))
    logged = _lines(caplog)[-1]
    reason = shown["code"] or shown["type"]
    assert (logged["status"], logged["outcome"], logged["error"], logged["model"]) == (
        status,
        "refused",
        reason,
        "unknown",
    )
    assert code in (None, reason)
    text = (await place.gateway.get("/metrics", control=True)).raw.decode()
    assert f'pagemill_gateway_requests_rejected_total{{code="{reason}"}} 1.0' in text
    assert not reason.isdigit()


@pytest.mark.parametrize(
    ("limits", "status", "outcome"),
    [
        ({"body_timeout_s": 0.1}, 408, "refused"),
        ({"max_body_bytes": 100_000, "max_in_flight_body_bytes": 100_000}, 503, "no_capacity"),
    ],
)
async def test_a_slow_body_and_a_full_body_budget_have_their_reasons(
    engines, gateways, caplog, limits, status, outcome
) -> None:
    gateway = await gateways(engines[0], **limits)
    caplog.set_level("INFO", logger="pagemill.gateway.access")
    never = asyncio.Event()

    async def endless() -> Any:
        yield b'{"model": "tiny", "prompt": "' + b"x" * 60_000
        await never.wait()

    async def send() -> int:
        headers = {"content-type": "application/json"}
        async with gateway.session.post(f"{gateway.url}/v1/completions", data=endless(), headers=headers) as response:
            return int(response.status)

    sending = [asyncio.create_task(send()) for _ in range(2)]
    done, others = await asyncio.wait(sending, timeout=WAIT_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
    assert {each.result() for each in done} == {status}
    await eventually(lambda: _lines(caplog))
    logged = _lines(caplog)[0]
    assert (logged["status"], logged["outcome"]) == (status, outcome)
    assert logged["error"]
    assert not logged["error"].isdigit()
    for each in others:
        each.cancel()
    await asyncio.gather(*sending, return_exceptions=True)
