"""Keeps the latest scaling decisions, as the operator reports them, for the page `/ui`.

They live in the control process. The operator reports all that it has whenever it connects, so that a restart of either
loses nothing that one of them still has.
"""

from __future__ import annotations

import msgspec

from pagemill_protocol.errors import PagemillError, invalid_field
from pagemill_protocol.report.scaling import KEPT_DECISIONS, ScalingDecision, ScalingReport


def decode_report(raw: bytes) -> ScalingReport:
    """Decode a report. Raises `PagemillError` 400 that names the invalid part."""
    try:
        report = msgspec.json.decode(raw, type=ScalingReport)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"The report of scaling decisions cannot be read: {error}."
        raise PagemillError(message, code="invalid_report") from error
    if len(report.decisions) > KEPT_DECISIONS:
        raise invalid_field(
            "decisions",
            f"decisions: {len(report.decisions)} were sent, and {KEPT_DECISIONS} are kept. Send the latest ones.",
        )
    return report


class ScalingDecisions:
    def __init__(self) -> None:
        self._kept: list[ScalingDecision] = []

    def add(self, decisions: list[ScalingDecision]) -> None:
        """Add the decisions that are not known yet."""
        known = set(map(msgspec.json.encode, self._kept))
        new = [each for each in decisions if msgspec.json.encode(each) not in known]
        # The sort is stable: decisions of one second keep their order.
        self._kept = sorted([*self._kept, *new], key=lambda each: each.time)[-KEPT_DECISIONS:]

    def latest(self, limit: int) -> bytes:
        """Return the latest decisions as JSON, newest first."""
        decisions = [msgspec.structs.asdict(each) for each in reversed(self._kept[-limit:])]
        return msgspec.json.encode({"decisions": decisions})
