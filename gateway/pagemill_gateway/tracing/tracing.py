"""What becomes of the record of a request that is over: traces, or nothing. OpenTelemetry is imported if used."""

from __future__ import annotations

from typing import Protocol

from starlette.types import Scope

from pagemill_gateway.config import TracingConfig
from pagemill_gateway.request_record import RequestRecord


class Tracing(Protocol):
    def finished(self, record: RequestRecord, scope: Scope) -> str:
        """Trace a request that is over; returns its trace id in hex, empty where it is not sampled."""
        ...

    async def close(self) -> None:
        """Send the remaining spans, for as long as one export may take."""
        ...


class NoTracing:
    def finished(self, record: RequestRecord, scope: Scope) -> str:
        return ""

    async def close(self) -> None:
        return


def open_tracing(config: TracingConfig | None) -> Tracing:
    """Raises `SettingsError` when the file of headers cannot be used."""
    if config is None:
        return NoTracing()
    from pagemill_gateway.tracing.exporting import ExportedTraces

    return ExportedTraces(config)
