"""Attacks that need a connection and no key: pipelining, heads, idle connections, framing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from attacks.cases import case, expect
from attacks.site import ATTACKER, HONEST, TOKEN, Site
from attacks.wire import SMALL_BUFFER_BYTES, exchange, head, parsed, post, wires

ALL_PORTS = ("gateway data", "gateway control", "engine data", "engine control")
DATA_PORTS = ("gateway data", "engine data")
KEYLESS_PATHS = {"gateway data": "/health", "engine data": "/metrics"}
"""The largest answers without a key; `/metrics` on control ports."""
NUM_PIPELINING, PIPELINED_BYTES = 60, 250_000
NUM_HEADS, HEAD_BYTES = 900, 64_000
NUM_CONNECTIONS = 7_000
OTHER_ADDRESS = "127.0.0.9"
COMPLETION = b'{"model": "tiny", "prompt": "x", "max_tokens": 2}'


@case("none", only_grid=("gateway data",))
async def nothing_is_attacked(site: Site, port: str) -> str:
    await asyncio.sleep(2 * site.hold_s)
    return ""


@case("pipelining", *ALL_PORTS)
async def many_requests_are_sent_and_no_answer_is_read(site: Site, port: str) -> str:
    asked = head(KEYLESS_PATHS.get(port, "/metrics"), method="GET")
    return await pipeline(site, port, asked)


@case("pipelining", only_grid=("gateway data",))
async def many_bodies_are_sent_and_no_refusal_is_read(site: Site, port: str) -> str:
    return await pipeline(site, port, post("/v1/completions", COMPLETION, "wrong"))


@case("pipelining", only_grid=DATA_PORTS)
async def many_requests_with_a_key_are_sent_and_no_answer_is_read(site: Site, port: str) -> str:
    return await pipeline(site, port, post("/v1/completions", COMPLETION, key_at(port)))


async def pipeline(site: Site, port: str, asked: bytes) -> str:
    data = asked * (PIPELINED_BYTES // len(asked))
    async with wires(site.url(port), NUM_PIPELINING, buffer_bytes=SMALL_BUFFER_BYTES) as opened:
        taken = await asyncio.gather(*(each.send(data, site.hold_s) for each in opened))
        await asyncio.sleep(site.hold_s)
    return f"{sum(taken)} of {NUM_PIPELINING} connections taken whole"


@case("connections", "gateway data", only_grid=("gateway control", "engine data", "engine control"))
async def one_address_opens_seven_thousand_connections(site: Site, port: str) -> str:
    async with wires(site.url(port), NUM_CONNECTIONS, source=OTHER_ADDRESS) as opened:
        await asyncio.sleep(site.hold_s)
        answered = sum(await asyncio.gather(*(each.ended(0.5) for each in opened)))
    return f"{len(opened)} opened, {answered} ended by the server"


@case("heads", *ALL_PORTS)
async def heads_of_short_lines_never_end(site: Site, port: str) -> str:
    return await unfinished(site, port, b"GET / HTTP/1.1\r\nHost: x\r\n" + b"ab:\r\n" * (HEAD_BYTES // 5))


@case("heads", only_grid=ALL_PORTS)
async def heads_of_one_long_line_never_end(site: Site, port: str) -> str:
    return await unfinished(site, port, b"GET / HTTP/1.1\r\nHost: x\r\nab: " + b"x" * HEAD_BYTES)


@case("heads", only_grid=DATA_PORTS)
async def addresses_of_requests_never_end(site: Site, port: str) -> str:
    return await unfinished(site, port, b"GET /" + b"x" * HEAD_BYTES)


@case("heads", only_grid=DATA_PORTS)
async def trailers_never_end(site: Site, port: str) -> str:
    begun = head("/v1/completions", fields=["Transfer-Encoding: chunked"]) + b"0\r\n"
    return await unfinished(site, port, begun + b"ab:\r\n" * (HEAD_BYTES // 5))


@case("heads", only_grid=DATA_PORTS)
async def extensions_of_a_chunk_never_end(site: Site, port: str) -> str:
    begun = head("/v1/completions", fields=["Transfer-Encoding: chunked"]) + b"5;"
    return await unfinished(site, port, begun + b"a=b;" * (HEAD_BYTES // 4))


@case("heads", only_grid=DATA_PORTS)
async def heads_come_line_by_line(site: Site, port: str) -> str:
    async with wires(site.url(port), 2000) as opened:
        await asyncio.gather(*(each.send(b"GET / HTTP/1.1\r\nHost: x\r\n") for each in opened))
        for _ in range(int(site.hold_s)):
            await asyncio.gather(*(each.send(b"ab:\r\n" * 20) for each in opened))
            await asyncio.sleep(1.0)
    return f"{len(opened)} opened"


async def unfinished(site: Site, port: str, data: bytes) -> str:
    async with wires(site.url(port), NUM_HEADS) as opened:
        taken = await asyncio.gather(*(each.send(data, site.hold_s) for each in opened))
        await asyncio.sleep(site.hold_s)
    return f"{sum(taken)} of {NUM_HEADS} taken whole"


def key_at(port: str) -> str:
    """Return a key of a client of this port."""
    return ATTACKER if port.startswith("gateway") else TOKEN


@case("framing", "gateway data", "engine data")
async def framing_and_credentials_are_ambiguous(site: Site, port: str) -> str:
    """An engine behind a gateway knows no `x-api-key`, so that its refusals of keys are not compared."""
    url, key = site.url(port), key_at(port)
    for what, request, statuses in ambiguous(key):
        answer = await exchange(url, request)
        found = answer.status if answer else None
        expect(found in statuses, f"{what}: {found} instead of {statuses}")
    if port.startswith("gateway"):
        await credentials(url)
    return ""


def ambiguous(key: str) -> Iterator[tuple[str, bytes, tuple[int, ...]]]:
    begun, chunked = "/v1/completions", b"%x\r\n%b\r\n0\r\n\r\n" % (len(COMPLETION), COMPLETION)
    json_type = "Content-Type: application/json"
    for coding in ("gzip, chunked", "chunked, gzip", "identity", "chunked, chunked", "xchunked"):
        yield coding, head(begun, key, fields=[json_type, f"Transfer-Encoding: {coding}"]) + chunked, (400, 501)
    plain = head(begun, key, fields=[json_type, "Transfer-Encoding: chunked"])
    yield "chunked", plain + chunked, (200,)
    twice = head(begun, key, length=len(COMPLETION), fields=[f"Authorization: Bearer {HONEST}"])
    yield "two keys", twice + COMPLETION, (400, 401)
    same = head(begun, key, length=len(COMPLETION), fields=[f"Authorization: Bearer {key}"])
    yield "one key twice", same + COMPLETION, (400, 401)


async def credentials(url: str) -> None:
    """Check both headers of keys, and the challenge of a 401."""
    both = head("/v1/completions", ATTACKER, length=len(COMPLETION), fields=[f"x-api-key: {ATTACKER}"])
    answer = await exchange(url, both + COMPLETION)
    expect(answer and answer.status == 200, f"the same key in both headers: {answer}")
    different = head("/v1/completions", ATTACKER, length=len(COMPLETION), fields=[f"x-api-key: {HONEST}"])
    answer = await exchange(url, different + COMPLETION)
    expect(answer and answer.status == 401, f"two different keys: {answer}")
    assert answer is not None
    message = str(answer.error()["message"]).lower()
    expect("authorization" in message and "x-api-key" in message, f"two keys: {message}")
    expect(answer.headers.get("www-authenticate"), f"a 401 without WWW-Authenticate: {answer.headers}")


@case("framing", "gateway data", only_grid=("engine data",))
async def an_upload_is_refused_before_it_has_arrived(site: Site, port: str) -> str:
    """A client that sends its whole body first and reads then must get the answer, not a reset connection."""
    length = 64 * 2**20
    for what, key, statuses in (("no key", "wrong", (401,)), ("too large", key_at(port), (413,))):
        async with wires(site.url(port), 1) as opened:
            wire = opened[0]
            await wire.send(head("/v1/completions", key, length=length))
            for _ in range(64):
                if not await wire.send(b"x" * 2**20, 2.0):
                    break
            answer = parsed(await wire.read(5.0))
        found = answer.status if answer else None
        expect(found in statuses, f"{what}: {found} instead of {statuses}")
    return ""
