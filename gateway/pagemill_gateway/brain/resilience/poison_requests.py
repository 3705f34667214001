"""Which requests may be what brings engines down, how that is found out, and when it is proven.

Engines end for many reasons, and a request that was there is mostly innocent. What its end says of a request:

- the engine was ended from outside, and its server says so (`killed`): nothing.
- its connections just ended (`lost`; a whole pod was killed, its node went, or its server died of what it was doing):
  little. Only the second one in a row, without a token in between, makes a suspect.
- its own work failed, and its server says so (`crashed`): one of those that were there is the cause. All are suspects.

A request that brings engines down does so whenever it is computed, before its next token: a token is an acquittal, and
what it went through before is forgotten. So a suspect has a trial, until its first token there. The first trial is
`shared`: no other suspect on trial is on that engine, and everybody else may come and go, since many are suspects after
an engine with many requests crashed and nobody shall have to wait for them. The next ones are `alone`: it goes where
nobody waits for a first token, and nobody may follow; the relay pauses longer before each of them, so that what ends
engines by chance is over or has shown itself.

It is convicted when an engine ended under its trial, nobody else there was without a token, and

- it was to be alone; or the engine crashed, and no other gateway had a request there; and
- engines of the deployment do not end without it as well: none did, in the same way, from shortly before its first one
  on (`brain.resilience.incidents`). Those that end under the trial of another suspect are that one's.

So a request that crashes engines costs two or three of them, one that takes the whole pod with it four, while no others
end; if others do, it is tried until `admission.attempts` ends it without a verdict. One that gets tokens between its
crashes is never convicted, and bounded there too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pagemill_gateway.brain.endpoints.record import EndpointRecord
from pagemill_gateway.brain.interface import EngineFailure, EngineFailureKind, Probe
from pagemill_gateway.brain.resilience.incidents import Incidents
from pagemill_protocol.errors import request_crashed_engine

TOLERATED_LOSSES = 2
"""Engines in a row that are just gone, before that is more than bad luck."""
HOLD_S = 1.0
"""An engine takes no newcomers this long for a suspect that is to be alone there; held again while that one waits."""
ALONE_S = 15.0
"""Nobody follows a suspect for so long; an answer that comes as a whole at its end may take minutes."""
Outcome = Literal["cleared", "ended", "blamed", "left"]
OUTCOMES: tuple[Outcome, ...] = ("cleared", "ended", "blamed", "left")
"""`ended`: its engine ended, which may have been chance. `left`: its client did, or the engine did not take it."""


class _RunningProbe(NamedTuple):
    deployment: str
    endpoint_id: str
    closed_until: float


class PoisonDetection:
    def __init__(self) -> None:
        self._incidents = Incidents()
        self._probes: dict[int, _RunningProbe] = {}
        """By decision."""
        self._held: dict[str, float] = {}
        """Endpoints that are being emptied of those without a token for a trial, until when."""
        self.outcomes: Counter[tuple[str, Outcome]] = Counter()
        """Of trials, by deployment, since the start."""

    def keep(self, deployments: set[str]) -> None:
        for key in [key for key in self.outcomes if key[0] not in deployments]:
            del self.outcomes[key]

    def next_probe(self, deployment: str, failures: Sequence[EngineFailure]) -> Probe:
        """What its next engine must be for a request that saw these ends. Raises `PagemillError` 500 when convicted."""
        if failures and self._blames(deployment, failures):
            self.outcomes[deployment, "blamed"] += 1
            raise request_crashed_engine()
        recent = [failure for failure in _since_last_token(failures) if self._incidents.had(failure)]
        telling = [failure for failure in recent if failure.kind != "killed"]
        if any(failure.probe != "none" and not failure.progressed for failure in telling):
            return "alone"
        suspicious = len(telling) >= TOLERATED_LOSSES or any(failure.kind == "crashed" for failure in telling)
        return "shared" if suspicious else "none"

    # Where trials are.

    def allowed(self, records: Sequence[EndpointRecord], probe: Probe, now: float) -> list[EndpointRecord]:
        """Those of `records` that may have a request with such a trial now."""
        if probe == "none":
            return self._open(records, now)
        busy = {each.endpoint_id for each in self._probes.values()}
        free = [record for record in records if record.endpoint.id not in busy]
        # One that is gone already, without anybody's knowledge, proves nothing.
        free = [record for record in free if record.reports.fresh(now)] or free
        if probe == "shared":
            return self._open(free, now)
        quiet = [record for record in free if not record.dispatches.num_uncomputed]
        if free and not quiet:
            self._held[min(free, key=self._num_before).endpoint.id] = now + HOLD_S
        return quiet

    def probe_started(self, decision: int, record: EndpointRecord, probe: Probe, now: float) -> None:
        if probe != "none":
            closed_until = now + ALONE_S if probe == "alone" else now
            self._probes[decision] = _RunningProbe(record.deployment, record.endpoint.id, closed_until)
            self._held.pop(record.endpoint.id, None)

    def cleared(self, decision: int) -> bool:
        """Its first token is here. Whether it was on trial, so that somebody may be waiting for that."""
        return self._close(decision, "cleared")

    def released(self, decision: int) -> None:
        """It is not at its engine any more, for whatever reason."""
        self._close(decision, "left")

    def engine_failed(self, decision: int, record: EndpointRecord, kind: EngineFailureKind, now: float) -> None:
        """The engine of `decision` is said to have ended; before any of those that were there is released."""
        self._note(record, kind, now)
        self._close(decision, "ended")

    def stream_lost(self, record: EndpointRecord, now: float) -> None:
        """The endpoint's own stream broke off, whoever was there."""
        self._note(record, None, now)

    def _note(self, record: EndpointRecord, kind: EngineFailureKind | None, now: float) -> None:
        self._incidents.note(record, kind, frozenset(self._probes), now)

    def _blames(self, deployment: str, failures: Sequence[EngineFailure]) -> bool:
        last = failures[-1]
        if last.kind == "killed" or last.probe == "none" or last.progressed:
            return False
        proven = last.probe == "alone" or (last.kind == "crashed" and not self._incidents.was_shared(last))
        return proven and self._incidents.was_only_one(last) and not self._incidents.is_chance(deployment, failures)

    def _num_before(self, record: EndpointRecord) -> tuple[bool, int]:
        """Who must have a token before a suspect is alone there; what is being emptied already comes first."""
        return record.endpoint.id not in self._held, record.dispatches.num_uncomputed

    def _open(self, records: Sequence[EndpointRecord], now: float) -> list[EndpointRecord]:
        """Those that no suspect has to itself, or is about to have."""
        if not self._probes and not self._held:
            return list(records)
        self._held = {endpoint_id: until for endpoint_id, until in self._held.items() if until > now}
        closed = {each.endpoint_id for each in self._probes.values() if each.closed_until > now} | self._held.keys()
        return [record for record in records if record.endpoint.id not in closed]

    def _close(self, decision: int, outcome: Outcome) -> bool:
        place = self._probes.pop(decision, None)
        if place is None:
            return False
        self.outcomes[place.deployment, outcome] += 1
        return True


def _since_last_token(failures: Sequence[EngineFailure]) -> Sequence[EngineFailure]:
    """What happened before is forgotten. What crashed after a token may be the request's doing, with the next one."""
    for place in reversed(range(len(failures))):
        if failures[place].progressed:
            return failures[place:] if failures[place].kind == "crashed" else failures[place + 1 :]
    return failures
