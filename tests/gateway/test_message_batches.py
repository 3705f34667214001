"""Anthropic's message batches through a gateway, with Anthropic's own client."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from batch_client import client_of, kept_in, until

if TYPE_CHECKING:
    import anthropic

pytestmark = pytest.mark.usefixtures("reporting_engines", "quick_batches")


def request(number: int, **params: Any) -> Any:
    given = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": f"q{number}"}], **params}
    return {"custom_id": f"c{number}", "params": given}


def client_at(gateway: Any) -> anthropic.AsyncAnthropic:
    import anthropic  # it takes 0.6 s, which only the worker that runs the test spends

    return anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0)


async def ended(client: anthropic.AsyncAnthropic, batch: Any) -> Any:
    return await until(
        lambda: client.messages.batches.retrieve(batch.id), lambda found: found.processing_status == "ended"
    )


@pytest.mark.layouts
async def test_requests_become_results_with_messages_and_errors(engines, gateways, tmp_path) -> None:
    gateway = await gateways(*engines, **kept_in(tmp_path))
    async with client_at(gateway) as client:
        requests = [*(request(number) for number in range(5)), request(5, max_tokens=0), request(6, model="nope")]
        batch = await client.messages.batches.create(requests=requests)
        assert (batch.type, batch.processing_status, batch.request_counts.processing) == (
            "message_batch",
            "in_progress",
            7,
        )
        assert (batch.ended_at, batch.results_url) == (None, None)
        assert (batch.expires_at - batch.created_at).total_seconds() == 24 * 3600
        batch = await ended(client, batch)
        counts = batch.request_counts
        assert (counts.processing, counts.succeeded, counts.errored, counts.canceled) == (0, 5, 2, 0)
        assert batch.ended_at is not None
        assert batch.results_url == f"{gateway.url}/v1/messages/batches/{batch.id}/results"
        results = {each.custom_id: each.result async for each in await client.messages.batches.results(batch.id)}
        for number in range(5):
            result: Any = results.pop(f"c{number}")
            assert (result.type, result.message.content[0].text) == ("succeeded", "hello world")
        kinds = {name: (each.type, each.error.error.type) for name, each in results.items()}  # type: ignore[union-attr]
        assert kinds == {"c5": ("errored", "invalid_request_error"), "c6": ("errored", "not_found_error")}


@pytest.mark.layouts
async def test_a_cancelled_batch_says_which_requests_were_not_run(engines, gateways, fake, tmp_path) -> None:
    gate = asyncio.Event()
    engines[0].behaviour = fake.says("a", gate=gate)
    gateway = await gateways(engines[0], **kept_in(tmp_path))
    async with client_at(gateway) as client:
        batch = await client.messages.batches.create(requests=[request(number) for number in range(3)])
        await fake.until(lambda: len(engines[0].requests) > 0)
        batch = await client.messages.batches.cancel(batch.id)
        assert batch.processing_status in ("canceling", "ended")
        batch = await ended(client, batch)
        assert (batch.request_counts.canceled, batch.request_counts.errored) == (3, 0)
        assert batch.cancel_initiated_at is not None
        results = [each async for each in await client.messages.batches.results(batch.id)]
        assert sorted((each.custom_id, each.result.type) for each in results) == [
            (f"c{number}", "canceled") for number in range(3)
        ]
    gate.set()


@pytest.mark.layouts
async def test_batches_are_listed_newest_first_and_deleted_with_their_files(engines, gateways, tmp_path) -> None:
    import anthropic

    gateway = await gateways(*engines, **kept_in(tmp_path))
    async with client_at(gateway) as client:
        batches = [await client.messages.batches.create(requests=[request(number)]) for number in range(3)]
        for each in batches:
            await ended(client, each)
        newest = [each.id for each in reversed(batches)]
        page = await client.messages.batches.list(limit=2)
        assert ([each.id for each in page.data], page.has_more) == (newest[:2], True)
        assert [each.id async for each in client.messages.batches.list(limit=1)] == newest
        deleted = await client.messages.batches.delete(newest[0])
        assert (deleted.id, deleted.type) == (newest[0], "message_batch_deleted")
        assert [each.id async for each in client.messages.batches.list()] == newest[1:]
        for wrong in (newest[0], "batch_1", "msgbatch_../x"):
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.batches.retrieve(wrong)
    _, files = await client_of(gateway).ask("GET", "/v1/files")
    assert len(files["data"]) == 4, "input and output of two batches"


@pytest.mark.parametrize(
    ("requests", "param"),
    [
        ([], "requests"),
        ([request(0), request(0)], "requests[1].custom_id"),
        ([{"custom_id": "a b", "params": {}}], "requests[0].custom_id"),
        ([{"custom_id": "a"}], "requests[0].params"),
        ([request(0), request(1, stream=True)], "requests[1].params.stream"),
    ],
)
async def test_a_batch_that_cannot_run_is_refused_by_its_field(engines, gateways, tmp_path, requests, param) -> None:
    gateway = await gateways(engines[0], **kept_in(tmp_path))
    reply = await gateway.post("/v1/messages/batches", {"requests": requests})
    assert (reply.status, reply.json["type"], reply.json["error"]["param"]) == (400, "error", param)
    _, files = await client_of(gateway).ask("GET", "/v1/files")
    assert files["data"] == []


async def test_a_running_batch_has_no_results_and_is_not_deleted(engines, gateways, fake, tmp_path) -> None:
    gate = asyncio.Event()
    engines[0].behaviour = fake.says("a", gate=gate)
    gateway = await gateways(engines[0], **kept_in(tmp_path))
    batch = (await gateway.post("/v1/messages/batches", {"requests": [request(0)]})).json
    path = f"/v1/messages/batches/{batch['id']}"
    reply = await gateway.get(f"{path}/results")
    assert (reply.status, json.loads(reply.raw)["type"]) == (400, "error")
    async with gateway.session.delete(gateway.url + path) as refused:
        assert (refused.status, (await refused.json())["error"]["code"]) == (409, "batch_is_not_over")
    gate.set()
