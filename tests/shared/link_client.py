"""A small client of an engine's link, for tests that send requests as a gateway does."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from contextlib import closing
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
from waiting import WAIT_LIMIT_S

from pagemill_protocol.frames import FrameDecoder
from pagemill_protocol.link import (
    LINK_PATH,
    LINK_PROTOCOL,
    Record,
    RecordDecoder,
    RecordKind,
    Refusal,
    encode_number,
    encode_pieces,
    encode_record,
)
from pagemill_protocol.request.generate import FrameMeta, GenerateRequest
from pagemill_protocol.versions import protocol_headers


class LinkClient:
    """The gateway's end of a link. If the engine refuses it, `refused` is the answer."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """`headers`: those of the request for the link, besides the version of the protocol."""
        parts = urlsplit(url)
        self.socket = socket.create_connection((parts.hostname, parts.port), timeout=WAIT_LIMIT_S)
        offer = {"Host": parts.netloc, "Connection": "Upgrade", "Upgrade": LINK_PROTOCOL}
        fields = {**offer, **protocol_headers(), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.socket.sendall(f"GET {LINK_PATH} HTTP/1.1\r\n{head}\r\n".encode())
        answer = http.client.HTTPResponse(self.socket)
        answer.begin()
        self.status = answer.status
        self.refused = b"" if self.status == 101 else answer.read()
        self._decoder = RecordDecoder()
        self.records: list[Record] = []

    def close(self) -> None:
        self.socket.close()

    def send(self, number: int, request: GenerateRequest | bytes) -> None:
        raw = request if isinstance(request, bytes) else msgspec.msgpack.encode(request)
        for record in encode_pieces(RecordKind.REQUEST_PART, number, raw):
            self.socket.sendall(record)
        self.socket.sendall(encode_record(RecordKind.REQUEST, number))

    def send_number(self, kind: RecordKind, stream: int, number: int) -> None:
        self.socket.sendall(encode_number(kind, stream, number))

    def read_some(self) -> None:
        """Read what has arrived, at least one byte."""
        data = self.socket.recv(1 << 20)
        assert data, "the engine closed the connection"
        self.records += self._decoder.feed(data)

    def read_until(self, *ended: int) -> None:
        """Read until these streams have ended."""
        while not set(ended) <= {
            number for kind, number, _ in self.records if kind in (RecordKind.END, RecordKind.REFUSED)
        }:
            self.read_some()

    def read_now(self, limit_s: float) -> None:
        """Read everything that arrives without a pause of `limit_s` seconds."""
        self.socket.settimeout(limit_s)
        try:
            while data := self.socket.recv(1 << 20):
                self.records += self._decoder.feed(data)
        except TimeoutError:
            self.socket.settimeout(WAIT_LIMIT_S)

    def kinds(self, number: int) -> list[int]:
        return [kind for kind, stream, _ in self.records if stream == number]

    def data(self, number: int) -> bytes:
        return b"".join(data for kind, stream, data in self.records if (kind, stream) == (RecordKind.DATA, number))

    def num_bytes(self, number: int) -> int:
        return len(self.data(number))

    def frames(self, number: int) -> list[tuple[FrameMeta, bytes]]:
        decoder = FrameDecoder()
        frames = decoder.feed(self.data(number))
        decoder.close()
        return frames

    def refusal(self, number: int) -> Refusal:
        (data,) = [data for kind, stream, data in self.records if (kind, stream) == (RecordKind.REFUSED, number)]
        return msgspec.msgpack.decode(data, type=Refusal)


class LinkAnswer(NamedTuple):
    """The answer to one request, or the refusal of the request or of the link."""

    status: int
    body: bytes
    """The body of an error."""
    frames: list[tuple[FrameMeta, bytes]]
    weights_digest: str = ""

    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


def generate(url: str, request: GenerateRequest | bytes, headers: Mapping[str, str]) -> LinkAnswer:
    """Send one request over a link of its own, and wait for the whole answer."""
    with closing(LinkClient(url, headers)) as link:
        if link.status != 101:
            return LinkAnswer(link.status, link.refused, [])
        link.send(1, request)
        link.read_until(1)
        if RecordKind.REFUSED in link.kinds(1):
            refusal = link.refusal(1)
            return LinkAnswer(refusal.status, refusal.body, [])
        digest = next(data for kind, _, data in link.records if kind == RecordKind.ACCEPTED)
        return LinkAnswer(200, b"", link.frames(1), digest.decode())
