"""Debian's Chromium for tests of the page `/ui`, and what they see in it.

`make browser` installs Playwright and axe-core.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from waiting import eventually

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

CHROMIUM = "/usr/bin/chromium"
TIMEOUT_MS = 60_000.0
EXPECTED = ("net::ERR_", "Failed to load resource")
"""What the browser logs when a connection is refused or lost, as some tests want it."""


class Looker:
    """A page with what the browser complained about."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        """Errors of scripts, violations of the page's policy, and dialogs."""
        page.on("console", lambda message: self._note(message.type, message.text))
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("dialog", self._dismiss)

    async def open(self, url: str, view: str = "fleet") -> None:
        await self.page.goto(f"{url}/ui#{view}")

    async def sees(self, text: str, within: str = "body") -> None:
        """Wait until the page shows the text."""
        await self.page.locator(within).get_by_text(text).first.wait_for(timeout=TIMEOUT_MS)

    async def has_ready(self, number: int) -> None:
        """Wait until so many engines are shown as ready."""
        ready = self.page.locator(".tile[data-phase=ready]")

        async def is_shown() -> bool:
            return bool(await ready.count() == number)

        await eventually(is_shown, every_s=0.05)

    async def _dismiss(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        await dialog.dismiss()

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not any(each in text for each in EXPECTED):
            self.complaints.append(f"{kind}: {text}")


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    # Other tests are collected without Playwright.
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        # Without a sandbox of its own, since tests may run as root.
        chromium = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"], timeout=TIMEOUT_MS
        )
        yield chromium
        await chromium.close()


@pytest.fixture
async def look(browser: Browser) -> AsyncIterator[Callable[..., Awaitable[Looker]]]:
    """Return `look(**options)`, which opens a window; in the end, no window may have had a complaint."""
    lookers: list[Looker] = []

    async def open_window(**options: Any) -> Looker:
        context = await browser.new_context(**options)
        context.set_default_timeout(TIMEOUT_MS)
        lookers.append(Looker(await context.new_page()))
        return lookers[-1]

    yield open_window
    assert [each.complaints for each in lookers] == [[] for _ in lookers]


@pytest.fixture(scope="session")
def axe() -> str:
    """Return the source of axe-core."""
    return Path(os.environ["AXE_CORE"]).read_text("utf-8")


class Forwarder:
    """A stable address in front of a gateway that is restarted on another port."""

    def __init__(self) -> None:
        self.url = self.target = ""
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self.target.removeprefix("http://").split(":")
        try:
            to_reader, to_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        self._writers |= {writer, to_writer}
        await asyncio.gather(_copy(reader, to_writer), _copy(to_reader, writer))
        self._writers -= {writer, to_writer}

    def cut_off(self) -> None:
        for each in self._writers:
            each.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def forwarding() -> AsyncIterator[Forwarder]:
    forwarder = Forwarder()
    server = await asyncio.start_server(forwarder.serve, "127.0.0.1", 0)
    forwarder.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield forwarder
    finally:
        server.close()
        forwarder.cut_off()


@pytest.fixture
async def forwarder() -> AsyncIterator[Forwarder]:
    async with forwarding() as found:
        yield found
