"""One response of a gateway to a test's client: its status, headers and body."""

from __future__ import annotations

from typing import Any

import msgspec


class Reply:
    def __init__(self, status: int, headers: dict[str, str], raw: bytes) -> None:
        self.status = status
        self.headers = headers
        self.raw = raw

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.raw)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def text(self) -> str:
        """Return the generated text of a body."""
        choice = self.json["choices"][0]
        return choice["message"]["content"] if "message" in choice else choice["text"]

    @property
    def events(self) -> list[Any]:
        """Return the payloads of a stream's events, without comments; `[DONE]` stays text."""
        assert self.raw.endswith(b"\n\n")
        events = [event for event in self.raw.split(b"\n\n")[:-1] if not event.startswith(b":")]
        datas = [event.removeprefix(b"data: ") for event in events]
        return [data.decode() if data == b"[DONE]" else msgspec.json.decode(data) for data in datas]

    @property
    def streamed_text(self) -> str:
        chunks = [event for event in self.events if isinstance(event, dict) and event.get("choices")]
        return "".join(chunk["choices"][0].get("delta", {}).get("content") or "" for chunk in chunks)
