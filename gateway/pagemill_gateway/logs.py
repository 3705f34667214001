"""Logging of the gateway process: one JSON object per line on standard error."""

from __future__ import annotations

import logging

import orjson

STRUCTURED = frozenset({"pagemill.gateway.access", "pagemill.gateway.event"})


class JsonLines(logging.Formatter):
    """Access lines and events are JSON objects already and get the time added; other messages become one."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.name in STRUCTURED:
            fields = orjson.loads(message)
        else:
            fields = {"event": "log", "logger": record.name, "message": message}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        stamp = {"time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S"), "level": record.levelname.lower()}
        # Halves of surrogate pairs, as undecodable file names have, would not be JSON.
        clean = {
            name: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
            for name, value in fields.items()
        }
        return orjson.dumps({**stamp, **clean}).decode()


def configure(level: int = logging.INFO) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
