"""Logging of a gateway's processes: one JSON object per line on standard error, which all of them share."""

from __future__ import annotations

import logging

import orjson

EVENTS = "pagemill.gateway.event"
STRUCTURED = frozenset({"pagemill.gateway.access", EVENTS})


class JsonLines(logging.Formatter):
    """Access lines and events are JSON objects already and get the time added; other messages become one."""

    def __init__(self, process: str = "") -> None:
        """`process`: the name of this process."""
        super().__init__()
        self._process = process
        self._second = -1
        self._time_of_it = ""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        stamp = {"time": self._time(record), "level": record.levelname.lower()}
        if self._process:
            stamp["process"] = self._process
        if record.name in STRUCTURED:
            return orjson.dumps(stamp).decode()[:-1] + "," + message[1:]
        fields = {"event": "log", "logger": record.name, "message": message}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        # Halves of surrogate pairs, as undecodable file names have, would not be JSON.
        clean = {
            name: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
            for name, value in fields.items()
        }
        return orjson.dumps({**stamp, **clean}).decode()

    def _time(self, record: logging.LogRecord) -> str:
        """Formatted once a second."""
        second = int(record.created)
        if second != self._second:
            self._second, self._time_of_it = second, self.formatTime(record, "%Y-%m-%dT%H:%M:%S")
        return self._time_of_it


def configure(level: int = logging.INFO, *, process: str = "") -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(process))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def log_event(event: str, **fields: str | int) -> None:
    """Log one line that programs wait for."""
    logging.getLogger(EVENTS).info(orjson.dumps({"event": event, **fields}).decode())
