"""A client of files and batches over HTTP, and the lines of input files."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from pagemill_gateway.config import BatchesConfig

CHAT = "/v1/chat/completions"
OVER = ("completed", "failed", "expired", "cancelled")


async def until(ask: Callable[[], Awaitable[Any]], holds: Callable[[Any], bool]) -> Any:
    """Return the first response that satisfies the condition."""
    while True:
        found = await ask()
        if holds(found):
            return found
        await asyncio.sleep(0.02)


def kept_in(folder: Path, **bounds: Any) -> dict[str, Any]:
    return {"batches": BatchesConfig(directory=str(folder / "batches"), **bounds)}


def line(number: int, text: str = "hi", url: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    return {"custom_id": f"c{number}", "method": "POST", "url": url, "body": {**body, **fields}}


def content_of(lines: list[Any]) -> bytes:
    return b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines)


class Client:
    """A client of one tenant."""

    def __init__(self, url: str, session: aiohttp.ClientSession, headers: Any = None) -> None:
        self._url = url
        self._session = session
        self._headers = headers

    async def ask(self, method: str, path: str, **fields: Any) -> tuple[int, Any]:
        async with self._session.request(method, self._url + path, headers=self._headers, **fields) as reply:
            return reply.status, await reply.json()

    async def upload(self, content: bytes, purpose: str = "batch") -> tuple[int, Any]:
        form = aiohttp.FormData()
        form.add_field("purpose", purpose)
        form.add_field("file", io.BytesIO(content), filename="in.jsonl", content_type="application/jsonl")
        return await self.ask("POST", "/v1/files", data=form)

    async def create(self, lines: list[Any], endpoint: str = CHAT, window: str = "24h") -> Any:
        _, file = await self.upload(content_of(lines))
        body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": window}
        status, batch = await self.ask("POST", "/v1/batches", json=body)
        assert (status, batch["status"]) == (200, "validating"), batch
        return batch

    async def batch(self, batch: Any) -> Any:
        return (await self.ask("GET", f"/v1/batches/{batch['id']}"))[1]

    async def ended(self, batch: Any) -> Any:
        return await until(lambda: self.batch(batch), lambda found: found["status"] in OVER)

    async def results(self, file_id: str) -> list[Any]:
        async with self._session.get(f"{self._url}/v1/files/{file_id}/content", headers=self._headers) as reply:
            assert reply.status == 200
            return [json.loads(each) for each in (await reply.read()).splitlines()]


def client_of(gateway: Any, headers: Any = None) -> Client:
    return Client(gateway.url, gateway.session, headers)
