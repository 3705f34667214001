"""Attacks on a gateway with TLS: clients that begin a handshake and leave it unfinished."""

from __future__ import annotations

import asyncio
import contextlib
import ssl

from attacks.cases import case
from attacks.connections import NUM_CONNECTIONS, OTHER_ADDRESS
from attacks.site import Site
from attacks.wire import wires


@case("handshakes", "gateway tls")
async def handshakes_never_end(site: Site, port: str) -> str:
    return await unfinished_handshakes(site, port, client_hello())


@case("handshakes", only_grid=("gateway tls",))
async def handshakes_never_begin(site: Site, port: str) -> str:
    return await unfinished_handshakes(site, port, b"")


async def unfinished_handshakes(site: Site, port: str, begun: bytes) -> str:
    async with wires(site.url(port), NUM_CONNECTIONS, source=OTHER_ADDRESS) as opened:
        await asyncio.gather(*(each.send(begun, 20.0) for each in opened))
        await asyncio.sleep(site.hold_s)
        ended = sum(await asyncio.gather(*(each.ended(0.5) for each in opened)))
    return f"{len(opened)} opened, {ended} ended by the server"


def client_hello() -> bytes:
    """Return the first bytes of a handshake, for which the server computes its part of the key."""
    sent = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    return sent.read()
