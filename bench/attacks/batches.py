"""Attacks by batches: lines whose answers are larger than they are, restarts, cancelled and lost files."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from attacks.answers import NUM_CHOICES, echoed
from attacks.cases import case, expect
from attacks.site import ATTACKER, Site

FINAL = {"completed", "failed", "expired", "cancelled"}
NUM_HEAVY, NUM_LIGHT = 40, 200
OVER_LIMIT_S = 30.0


class Client:
    """The attacking tenant's client of files and batches."""

    def __init__(self, session: aiohttp.ClientSession, site: Site) -> None:
        self._session = session
        self._site = site

    async def call(self, method: str, path: str, **given: Any) -> Any:
        headers = {"Authorization": f"Bearer {ATTACKER}"}
        url = self._site.gateway.url + path
        async with self._session.request(method, url, headers=headers, **given) as response:
            return json.loads(await response.read()) | {"http_status": response.status}

    async def create(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """Upload the bodies as a file, and start its batch."""
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        text = "".join(
            json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}) + "\n"
            for number, body in enumerate(lines)
        )
        form.add_field("file", text.encode(), filename="lines.jsonl")
        file = await self.call("POST", "/v1/files", data=form)
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        created: dict[str, Any] = await self.call("POST", "/v1/batches", json=asked)
        return created

    async def becomes(self, batch_id: str, statuses: set[str], limit_s: float) -> dict[str, Any]:
        """Wait for one of these statuses; return the batch as it is then, or at the end of the time."""
        end = time.monotonic() + limit_s
        while True:
            batch: dict[str, Any] = await self.call("GET", f"/v1/batches/{batch_id}")
            if batch.get("status") in statuses or time.monotonic() > end:
                return batch
            await asyncio.sleep(0.05)

    async def lines_of(self, batch: dict[str, Any]) -> int:
        """Return the number of lines of both files."""
        number = 0
        for file_id in (batch.get("output_file_id"), batch.get("error_file_id")):
            if file_id:
                url = f"{self._site.gateway.url}/v1/files/{file_id}/content"
                async with self._session.get(url, headers={"Authorization": f"Bearer {ATTACKER}"}) as response:
                    if response.status == 200:
                        number += (await response.read()).count(b"\n")
        return number


@asynccontextmanager
async def client(site: Site) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60.0)) as session:
        yield Client(session, site)


def light(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "x", "max_tokens": 20, "ignore_eos": True, **fields}


@case("batches", "gateway data")
async def lines_whose_answers_are_large(site: Site, port: str) -> str:
    """Each line is 56 kB, each of its answers 80 MB."""
    async with client(site) as tenant:
        batch = await tenant.create([echoed() for _ in range(NUM_HEAVY)])
        expect(batch["http_status"] == 200, f"the batch was not created: {batch}")
        await asyncio.sleep(2 * site.hold_s)
        await tenant.call("POST", f"/v1/batches/{batch['id']}/cancel")
        over = await tenant.becomes(batch["id"], FINAL, OVER_LIMIT_S)
        expect(over["status"] in FINAL, f"{OVER_LIMIT_S:.0f} s after its cancellation the batch is {over['status']}")
        return f"{over['status']} {over['request_counts']}"


@case("batches", only_grid=("gateway data",))
async def lines_with_many_log_probabilities(site: Site, port: str) -> str:
    async with client(site) as tenant:
        lines = [light(n=NUM_CHOICES, logprobs=20, max_tokens=90) for _ in range(64)]
        batch = await tenant.create(lines)
        await asyncio.sleep(2 * site.hold_s)
        await tenant.call("POST", f"/v1/batches/{batch['id']}/cancel")
        over = await tenant.becomes(batch["id"], FINAL, OVER_LIMIT_S)
    expect(over["status"] in FINAL, f"the batch is {over['status']}")
    return f"{over['status']} {over['request_counts']}"


@case("batches", "gateway data", ends_servers=True)
async def a_batch_runs_in_two_deaths_of_its_gateway(site: Site, port: str) -> str:
    """A line that was running twice when its gateway was killed is failed by name, and not run again."""
    async with client(site) as tenant:
        batch = await tenant.create([light(max_tokens=100_000), light(max_tokens=2)])
        for _ in range(2):
            await tenant.becomes(batch["id"], {"in_progress", *FINAL}, OVER_LIMIT_S)
            await asyncio.sleep(1.0)
            await asyncio.to_thread(site.restart_gateway, killed=True)
        over = await tenant.becomes(batch["id"], FINAL, OVER_LIMIT_S)
        expect(over["status"] == "completed", f"after two deaths the batch is {over}")
        counts = over["request_counts"]
        expect(counts["failed"] == 1, f"the line that ran in both deaths has not failed: {counts}")
        expect(await tenant.lines_of(over) == 2, "a line is missing in the results")
        return f"{counts}"


@case("batches", "gateway data")
async def a_batch_is_cancelled_while_it_starts(site: Site, port: str) -> str:
    async with client(site) as tenant:
        batch = await tenant.create([light(max_tokens=100_000) for _ in range(100)])
        await tenant.call("POST", f"/v1/batches/{batch['id']}/cancel")
        over = await tenant.becomes(batch["id"], FINAL, 10.0)
        expect(over["status"] == "cancelled", f"the batch is {over['status']}")
        counts, lines = over["request_counts"], await tenant.lines_of(over)
        expect(lines == counts["total"] == 100, f"100 lines, {counts}, {lines} in the results")
        return f"{counts}"


@case("files", "gateway data")
async def the_file_of_a_running_batch_is_deleted(site: Site, port: str) -> str:
    """The file stays, or the batch fails by name; either way every line is accounted for."""
    async with client(site) as tenant:
        batch = await tenant.create([light() for _ in range(NUM_LIGHT)])
        await tenant.becomes(batch["id"], {"in_progress", *FINAL}, OVER_LIMIT_S)
        deleted = await tenant.call("DELETE", f"/v1/files/{batch['input_file_id']}")
        over = await tenant.becomes(batch["id"], FINAL, 2 * OVER_LIMIT_S)
        lines, counts = await tenant.lines_of(over), over["request_counts"]
        kept = over["status"] == "completed" and counts["completed"] == lines == NUM_LIGHT
        named = over["status"] == "failed" and over.get("errors")
        expect(
            kept or named, f"deletion {deleted['http_status']}: {over['status']} {counts}, {lines} lines in the results"
        )
        locks = [each.name for each in (site.folder / "batches").rglob("*.lock")]
        expect(not [each for each in locks if batch["id"] in each], f"lock files stay: {locks}")
        return f"deletion {deleted['http_status']}, {over['status']} {counts}"
