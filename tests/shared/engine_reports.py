"""Reports of engines with the numbers that matter to a test."""

from __future__ import annotations

from pagemill_protocol.report.load import EngineReport
from pagemill_protocol.report.state import EngineLoad


def reported(engine: str, blocks: int = 0, requests: int = 0) -> EngineReport:
    """Return a report with this many active blocks and running requests."""
    return EngineReport(engine, EngineLoad(num_kv_bytes_active=blocks, num_requests_running=requests))


def used(share: float, running: int = 0, waiting: int = 0) -> EngineLoad:
    """Return a load that uses this share of the KV cache, to the thousandth."""
    return EngineLoad(
        num_kv_bytes_total=1000,
        num_kv_bytes_active=round(1000 * share),
        num_requests_running=running,
        num_requests_waiting=waiting,
    )
