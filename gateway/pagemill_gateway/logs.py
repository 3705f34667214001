"""Configures the logging of the gateway's processes. Access lines and events are logged as JSON objects."""

from __future__ import annotations

import logging

import orjson

from pagemill_servers.process import logs

EVENTS = "pagemill.gateway.event"
STRUCTURED = frozenset({"pagemill.gateway.access", EVENTS})


def configure(level: int = logging.INFO, *, process: str = "") -> None:
    logs.configure(level, process=process, structured=STRUCTURED)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def log_event(event: str, **fields: str | int) -> None:
    """Log an event for programs, as one line of JSON."""
    logging.getLogger(EVENTS).info(orjson.dumps({"event": event, **fields}).decode())
