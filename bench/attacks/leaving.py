"""Attacks by clients that leave: what they asked for must end with them, whatever the size and form of the request."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable

import aiohttp

from attacks.cases import case, expect
from attacks.connections import key_at
from attacks.site import ATTACKER, Site
from attacks.wire import Wire, head, wires

SIZES = (1_000, 60_000, 70_000, 1_000_000, 4_000_000, 8_000_000)
NUM_CLIENTS = 4
"""Clients that leave at once: more than the honest tenant's requests, whose number changes all the time."""
MAX_HONEST = 2
LEFT_LIMIT_S, LOOK_S = 0.1, 0.3
"""The time after which a request must have ended, and what looking at the counts of engines may add."""
START_LIMIT_S = 20.0
RUNNING = re.compile(rb"^vllm:num_requests_(?:running|waiting)\{[^}]*\} (\S+)$", re.MULTILINE)


@case("leaving", "gateway data", only_grid=("engine data",))
async def clients_leave_before_the_answer(site: Site, port: str) -> str:
    slowest_s = 0.0
    async with aiohttp.ClientSession() as session:
        for size in SIZES if site.whole_grid else SIZES[::2]:
            for streamed in (False, True):
                for at_once in (True, False):
                    request = long_request(size, key_at(port), streamed)
                    pieces = (b"".join(request),) if at_once else request
                    took_s = await asked_and_left(site, port, session, pieces, reset=streamed == at_once)
                    what = f"{size} bytes, streamed: {streamed}, in one write: {at_once}"
                    expect(took_s < LEFT_LIMIT_S + LOOK_S, f"engines ran {took_s:.2f} s longer: {what}")
                    slowest_s = max(slowest_s, took_s)
    return f"the slowest ended after {slowest_s:.2f} s"


def long_request(size: int, key: str, streamed: bool) -> tuple[bytes, bytes]:
    """Return head and body of a request whose answer takes minutes."""
    asked = {"model": "tiny", "prompt": "x", "max_tokens": 100_000, "ignore_eos": True, "stream": streamed}
    body = json.dumps({**asked, "user_data": "x" * max(0, size - 120)}).encode()
    return head("/v1/completions", key, length=len(body)), body


async def asked_and_left(
    site: Site, port: str, session: aiohttp.ClientSession, pieces: tuple[bytes, ...], *, reset: bool
) -> float:
    """Let clients leave while engines run their requests; return the seconds until these have ended."""
    async with wires(site.url(port), NUM_CLIENTS) as clients:
        await asyncio.gather(*(_send(each, pieces) for each in clients))
        started_s = await _until(site, session, lambda running: running >= 1 + NUM_CLIENTS)
        expect(started_s < START_LIMIT_S, "the requests do not run")
        for each in clients:
            each.close(reset=reset)
        return await _until(site, session, lambda running: running <= MAX_HONEST)


async def _send(wire: Wire, pieces: tuple[bytes, ...]) -> None:
    for piece in pieces:
        expect(await wire.send(piece, START_LIMIT_S), "a request was not taken")
        await asyncio.sleep(0.01)


async def _until(site: Site, session: aiohttp.ClientSession, holds: Callable[[int], bool]) -> float:
    """Return the seconds until `holds` is true of the number of running requests, at most `START_LIMIT_S`."""
    began_s = time.monotonic()
    while not holds(await num_running(site, session)) and time.monotonic() < began_s + START_LIMIT_S:
        pass
    return time.monotonic() - began_s


async def num_running(site: Site, session: aiohttp.ClientSession) -> int:
    """Return the number of running and waiting requests, as the engines report it."""
    number = 0.0
    for engine in site.engines:
        async with session.get(f"{engine.control_url}/metrics") as response:
            number += sum(float(each) for each in RUNNING.findall(await response.read()))
    return int(number)


@case("leaving", "gateway data")
async def one_client_leaves_again_and_again(site: Site, port: str) -> str:
    request = b"".join(long_request(4_000_000, ATTACKER, streamed=False))
    end_s, number = time.monotonic() + 2 * site.hold_s, 0
    while time.monotonic() < end_s:
        async with wires(site.url(port), 1) as opened:
            await asyncio.gather(*(each.send(request) for each in opened))
            await asyncio.sleep(0.1)
            number += 1
    async with aiohttp.ClientSession() as session:
        took_s = await _until(site, session, lambda running: running <= MAX_HONEST)
    expect(took_s < 1.0, f"engines ran requests for {took_s:.1f} s after the last of {number} clients had left")
    return f"{number} clients"
