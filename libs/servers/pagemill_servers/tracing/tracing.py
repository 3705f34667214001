"""Entry point of tracing: finished requests become traces, or nothing. OpenTelemetry's messages are imported if
used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from starlette.types import Scope

from pagemill_servers.tracing.config import TracingConfig

if TYPE_CHECKING:
    from pagemill_servers.tracing.messages import WriteSpans


class Tracing(Protocol):
    def finished(self, scope: Scope, write: WriteSpans) -> str:
        """Trace a finished request. Returns its trace id in hex, or an empty text where it is not sampled.

        `write` makes its spans, later and in another thread: it must read only data that no longer changes.
        """
        ...

    async def close(self) -> None:
        """Send the remaining spans, for at most the time of one export."""
        ...


class NoTracing:
    def finished(self, scope: Scope, write: WriteSpans) -> str:
        return ""

    async def close(self) -> None:
        return


def open_tracing(config: TracingConfig | None) -> Tracing:
    """Return the tracing of these settings. Raises `SettingsError` when settings or file of headers cannot be used."""
    if config is None:
        return NoTracing()
    config.check()
    from pagemill_servers.tracing.exporting import ExportedTraces

    return ExportedTraces(config)
