"""Helpers for tests of the whole repository, and a canned OpenAI server for the terminal commands."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from loaded_file import module_of
from waiting import WAIT_LIMIT_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def generate(root: Path) -> Any:
    """Return the module that writes the reference pages, `docs/generate.py`."""
    return module_of(root / "docs" / "generate.py", "docs_generate")


@dataclass
class CannedServer:
    """A server that answers chats with the pieces of `answers` in turn; `None` waits until the client leaves."""

    url: str = ""
    models: list[str] = field(default_factory=lambda: ["canned"])
    answers: list[list[Any]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    refusal: tuple[int, str] | None = None
    hung: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        if self.refusal is not None:
            status, message = self.refusal
            return web.json_response({"error": {"message": message}}, status=status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        pieces = self.answers.pop(0) if self.answers else ["Hello", " there."]
        try:
            for piece in pieces:
                await self._send(response, piece)
        except (asyncio.CancelledError, ConnectionResetError):
            self.left.set()
            raise
        return response

    async def _send(self, response: web.StreamResponse, piece: Any) -> None:
        if piece is None:
            self.hung.set()
            while True:  # a write fails once the client has left
                await response.write(b": waiting\n\n")
                await asyncio.sleep(0.02)
        event = {"choices": [{"delta": {"content": piece}}]} if isinstance(piece, str) else piece
        await response.write(
            b"data: " + json.dumps(event).encode() + b"\n\n" if piece != "[DONE]" else b"data: [DONE]\n\n"
        )


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
FINISH = {"choices": [{"delta": {}, "finish_reason": "stop"}]}


@pytest.fixture
def answer_of() -> Any:
    """Return a function that builds one complete answer of the canned server from pieces of text."""
    return lambda *texts: [{"choices": [{"delta": {"role": "assistant"}}]}, *texts, FINISH, USAGE, "[DONE]"]


@pytest.fixture
def canned_server() -> Iterator[CannedServer]:
    server = CannedServer()
    started = threading.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", server.list_models)
        app.router.add_post("/v1/chat/completions", server.chat)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await server.stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert started.wait(WAIT_LIMIT_S)
    yield server
    loop.call_soon_threadsafe(server.stop.set)
    thread.join(WAIT_LIMIT_S)
    loop.close()
