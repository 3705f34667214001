"""Logging of servers: one JSON object per line on standard error, which the processes of one pod may share."""

from __future__ import annotations

import logging

import orjson


class JsonLines(logging.Formatter):
    """Formats messages as objects with time and level, which are added to messages that are JSON objects already.

    `extra={"request_id": ...}` of a logging call becomes a separate field.
    """

    def __init__(self, process: str = "", structured: frozenset[str] = frozenset()) -> None:
        """Make a formatter.

        `process`: name of this process; `structured`: loggers whose messages are JSON objects already.
        """
        super().__init__()
        self._process = process
        self._structured = structured
        self._second = -1
        self._formatted_second = ""

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
        # Lone surrogates, as in undecodable file names, would not be valid JSON.
        clean = {
            name: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
            for name, value in fields.items()
        }
        return orjson.dumps({**stamp, **clean}).decode()

    def _time(self, record: logging.LogRecord) -> str:
        """Return the time to the second, formatted once per second."""
        second = int(record.created)
        if second != self._second:
            self._second, self._formatted_second = second, self.formatTime(record, "%Y-%m-%dT%H:%M:%S")
        return self._formatted_second


def configure(level: int | str, *, process: str = "", structured: frozenset[str] = frozenset()) -> None:
    # Lines show neither source location nor thread: finding them costs more than the line itself.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(process, structured))
    logging.basicConfig(level=level, handlers=[handler], force=True)
