"""The honest tenant, in a process of its own: it streams and asks while another tenant attacks.

`python honest.py URL KEY CONTROL_URL...` prints `ready` after the first token, measures until its input ends, and
prints one line of JSON. It knows nothing of the attack. Each request has a connection of its own, like a new client.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial

import aiohttp

MODEL = "tiny"
STREAM_TOKENS = 20_000
ASK_EVERY_S = 0.1
PROBE_EVERY_S = 0.05
LIMIT_S = 30.0
"""A request without an answer for this long counts as refused."""
MAX_KEPT_FAULTS = 5


@dataclass
class Figures:
    """What this tenant saw."""

    gap_s: float = 0.0
    """The longest time without a byte of its stream."""
    num_answers: int = 0
    num_refused: int = 0
    """Requests without a whole answer, and streams that ended early."""
    slowest_s: float = 0.0
    """The longest time to a whole short answer."""
    lag_s: float = 0.0
    """The longest time to the answer of a probe, which only needs the event loop of a server."""
    own_lag_s: float = 0.0
    """How long this process itself was late at most, because the machine was busy."""
    faults: list[str] = field(default_factory=list)

    def refuse(self, fault: str) -> None:
        self.num_refused += 1
        if len(self.faults) < MAX_KEPT_FAULTS:
            self.faults.append(fault)


class Tenant:
    """One tenant with a stream, a request every tenth of a second, and probes of all servers."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str, control_urls: list[str]) -> None:
        self.figures = Figures()
        self._session = session
        self._url = f"{url}/v1/completions"
        self._headers = {"Authorization": f"Bearer {key}"}
        self._probes = [f"{each}/livez" for each in control_urls]
        self._streaming = asyncio.Event()
        self._received_s = 0.0

    async def run(self, until: Callable[[], Awaitable[object]]) -> Figures:
        """Work until `until()` returns; what has no answer by then counts with its time so far."""
        streaming = asyncio.create_task(self._stream())
        async with asyncio.timeout(LIMIT_S):
            await self._streaming.wait()
        print("ready", flush=True)
        probing = [partial(self._probe, each) for each in self._probes]
        work = [_repeat(self._ask, ASK_EVERY_S), *(_repeat(each, PROBE_EVERY_S) for each in probing)]
        tasks = [streaming, *(asyncio.create_task(each) for each in (*work, self._watch_itself()))]
        await until()
        self._note_piece()
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(ended, asyncio.CancelledError):
                self.figures.refuse(f"the tenant itself: {ended!r}")
        return self.figures

    async def _stream(self) -> None:
        body = {**asked(STREAM_TOKENS), "stream": True}
        while True:
            try:
                async with self._session.post(self._url, json=body, headers=self._headers) as response:
                    last = b""
                    async for piece in response.content.iter_any():
                        self._note_piece()
                        last = (last + piece)[-64:]
                    if response.status != 200 or b"[DONE]" not in last:
                        self.figures.refuse(f"stream: {response.status} {last!r}")
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self.figures.refuse(f"stream: {error!r}")
            await asyncio.sleep(ASK_EVERY_S)

    def _note_piece(self) -> None:
        now = time.monotonic()
        if self._streaming.is_set():
            self.figures.gap_s = max(self.figures.gap_s, now - self._received_s)
        self._received_s = now
        self._streaming.set()

    async def _ask(self) -> None:
        began_s = time.monotonic()
        try:
            async with (
                asyncio.timeout(LIMIT_S),
                self._session.post(self._url, json=asked(2), headers=self._headers) as response,
            ):
                text = await response.text()
            if response.status == 200:
                self.figures.num_answers += 1
            else:
                self.figures.refuse(f"{response.status} {text[:200]}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.figures.refuse(repr(error))
        finally:
            self.figures.slowest_s = max(self.figures.slowest_s, time.monotonic() - began_s)

    async def _probe(self, url: str) -> None:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(LIMIT_S), self._session.get(url) as response:
                await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.figures.refuse(f"{url}: {error!r}")
        finally:
            self.figures.lag_s = max(self.figures.lag_s, time.monotonic() - began_s)

    async def _watch_itself(self) -> None:
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(PROBE_EVERY_S)
            late_s = time.monotonic() - began_s - PROBE_EVERY_S
            self.figures.own_lag_s = max(self.figures.own_lag_s, late_s)


def asked(num_tokens: int) -> dict[str, object]:
    return {"model": MODEL, "prompt": "hello", "max_tokens": num_tokens, "ignore_eos": True}


async def _repeat(work: Callable[[], Awaitable[None]], every_s: float) -> None:
    while True:
        await work()
        await asyncio.sleep(every_s)


@asynccontextmanager
async def _session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session


async def main() -> None:
    url, key, *control_urls = sys.argv[1:]
    async with _session() as session:
        tenant = Tenant(session, url, key, control_urls)
        figures = await tenant.run(lambda: asyncio.to_thread(sys.stdin.read))
    print(json.dumps(asdict(figures)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
