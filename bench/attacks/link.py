"""Attacks on the link, the engine's port for gateways: without the token, with junk, and requests that never end."""

from __future__ import annotations

import asyncio
import struct

from attacks.cases import case, expect
from attacks.site import TOKEN, Site
from attacks.wire import Wire, exchange, head, wires
from pagemill_protocol.versions import PROTOCOL_HEADER, PROTOCOL_VERSION

UPGRADE = ("Connection: Upgrade", "Upgrade: pagemill-link/1", f"{PROTOCOL_HEADER}: {PROTOCOL_VERSION}")
REQUEST_PART = 1
PIECE = b"x" * 65_536
NUM_LINKS, NUM_STREAMS, NUM_PIECES = 4, 1000, 4
"""A gigabyte of parts, of which every request has a quarter of a megabyte."""


@case("link", "engine data")
async def links_carry_huge_records_and_none_without_a_token(site: Site, port: str) -> str:
    """A record says its length first: four gigabytes must not be waited for, and nothing is read without a token."""
    url, asked = site.url(port), head("/internal/link", method="GET", fields=UPGRADE)
    answer = await exchange(url, asked)
    expect(answer and answer.status == 401, f"a link without a token: {answer}")
    ended = 0
    for length in (2**32 - 1, 2**31, 2**24):
        async with wires(url, 60) as opened:
            await become_links(opened)
            junk = struct.pack("<IIB", length, 1, REQUEST_PART) + PIECE * 8
            await asyncio.gather(*(each.send(junk, site.hold_s / 3) for each in opened))
            ended += sum(await asyncio.gather(*(each.ended(site.hold_s / 3) for each in opened)))
    expect(ended == 180, f"{180 - ended} of 180 links with records that are too long stay open")
    return ""


@case("link", "engine data")
async def links_carry_requests_that_never_end(site: Site, port: str) -> str:
    async with wires(site.url(port), NUM_LINKS) as opened:
        await become_links(opened)
        num_sent = 0
        for number in range(NUM_STREAMS // NUM_LINKS):
            records = b"".join(struct.pack("<IIB", len(PIECE), number, REQUEST_PART) + PIECE for _ in range(NUM_PIECES))
            taken = await asyncio.gather(*(each.send(records, site.hold_s) for each in opened))
            num_sent += sum(taken)
            if not any(taken):
                break
        await asyncio.sleep(1.0)
    return f"{num_sent * NUM_PIECES * len(PIECE) / 2**20:.0f} MiB taken"


async def become_links(opened: list[Wire]) -> None:
    opening = head("/internal/link", TOKEN, method="GET", fields=UPGRADE)
    await asyncio.gather(*(each.send(opening) for each in opened))
    answers = await asyncio.gather(*(each.read(0.2, 64) for each in opened))
    expect(all(b" 101 " in each for each in answers), f"connections that should be links: {answers[0]!r}")
