"""Logging of servers: one JSON object per line on standard error, which the processes of one pod may share."""

from __future__ import annotations

import logging

import orjson


class JsonLines(logging.Formatter):
    """Messages become objects with time and level; those that are objects already get these added.

    `extra={"request_id": ...}` of a call to a logger becomes a field of its own.
    """

    def __init__(self, process: str = "", structured: frozenset[str] = frozenset()) -> None:
        """`process`: the name of this process; `structured`: loggers whose messages are JSON objects already."""
        super().__init__()
        self._process = process
        self._structured = structured
        self._second = -1
        self._time_of_it = ""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        stamp = {"time": self._time(record), "level": record.levelname.lower()}
        if self._process:
            stamp["process"] = self._process
        if record.name in self._structured:
            return orjson.dumps(stamp).decode()[:-1] + "," + message[1:]
        fields = {"event": "log", "logger": record.name, "message": message}
        if request_id := getattr(record, "request_id", ""):
            fields["request_id"] = request_id
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


def configure(level: int | str, *, process: str = "", structured: frozenset[str] = frozenset()) -> None:
    # No line shows where it was written, or by which thread: that costs more than the line itself.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(process, structured))
    logging.basicConfig(level=level, handlers=[handler], force=True)
