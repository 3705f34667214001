"""Attacks with request bodies that never end, or that are as large as may be."""

from __future__ import annotations

import asyncio

from attacks.cases import case
from attacks.connections import key_at
from attacks.site import ATTACKER, LIMITED, Site
from attacks.wire import answering, head, post, wires

NUM_SMALL, NUM_LARGE, LARGE_BYTES = 4_200, 45, 8_300_000
NUM_LONG = 300
AT_ONCE = 500
PATHS = {"gateway control": "/catalog", "engine control": "/wake_up"}


@case("bodies", "gateway data")
async def small_bodies_of_a_limited_key_never_end(site: Site, port: str) -> str:
    return await unfinished_bodies(site, port, LIMITED, NUM_SMALL, 1000, b"{")


@case("bodies", "gateway data", only_grid=("engine data", "gateway control", "engine control"))
async def small_bodies_never_end(site: Site, port: str) -> str:
    return await unfinished_bodies(site, port, key_at(port), NUM_SMALL, 1000, b"{")


@case("bodies", "gateway data", "engine data", only_grid=("gateway control", "engine control"))
async def large_bodies_never_end(site: Site, port: str) -> str:
    return await unfinished_bodies(site, port, key_at(port), NUM_LARGE, LARGE_BYTES, b"x" * (LARGE_BYTES - 1))


@case("bodies", "gateway control", only_grid=("gateway data", "engine data", "engine control"))
async def large_bodies_without_a_key_never_end(site: Site, port: str) -> str:
    return await unfinished_bodies(site, port, "wrong", NUM_LARGE, LARGE_BYTES, b"x" * (LARGE_BYTES - 1))


@case("bodies", "gateway data", only_grid=("engine data",))
async def bodies_in_chunks_of_a_byte(site: Site, port: str) -> str:
    """Each byte takes six bytes on the wire, more in a server that keeps the pieces, and a call of the parser."""
    begun = head("/v1/completions", key_at(port), fields=["Transfer-Encoding: chunked"])
    async with wires(site.url(port), 100) as opened:
        sent = await asyncio.gather(*(each.send(begun + b"1\r\nx\r\n" * 1_000_000, site.hold_s) for each in opened))
    return f"{sum(sent)} of 100 taken whole"


@case("bodies", "gateway data")
async def uploads_never_end(site: Site, port: str) -> str:
    begun = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"x" * 2_000_000
    fields = ["Content-Type: multipart/form-data; boundary=b", f"Content-Length: {100 * 2**20}"]
    async with wires(site.url(port), 200) as opened:
        data = head("/v1/files", ATTACKER, fields=fields) + begun
        taken = await asyncio.gather(*(each.send(data, site.hold_s) for each in opened))
        await asyncio.sleep(site.hold_s / 2)
    return f"{sum(taken)} of 200 taken"


async def unfinished_bodies(site: Site, port: str, key: str, number: int, length: int, body: bytes) -> str:
    begun = head(PATHS.get(port, "/v1/completions"), key, method=_method(port), length=length)
    async with wires(site.url(port), number) as opened:
        taken = []
        for first in range(0, number, AT_ONCE):
            group = opened[first : first + AT_ONCE]
            taken += await asyncio.gather(*(each.send(begun + body, site.hold_s) for each in group))
        await asyncio.sleep(site.hold_s)
    return f"{sum(taken)} of {number} taken"


def _method(port: str) -> str:
    return "PUT" if port == "gateway control" else "POST"


@case("bodies", "engine data", only_grid=("gateway data",))
async def prompts_as_long_as_the_context_wait(site: Site, port: str) -> str:
    """Each is 0.8 MB, and more once it is parsed; hundreds of them wait for the few that an engine has blocks for."""
    body = {"model": "tiny", "prompt": [7] * 130_000, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    request = post("/v1/completions", body, key_at(port))
    number = NUM_LONG if site.whole_grid else NUM_LONG // 3
    async with wires(site.url(port), number) as opened:
        await asyncio.gather(*(each.send(request, 4 * site.hold_s) for each in opened))
        statuses = await answering(opened, number, 4 * site.hold_s)
    return f"statuses {statuses}"
