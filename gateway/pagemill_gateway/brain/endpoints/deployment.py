"""One deployment: its endpoints, what was learned of its answers, and how long its engines take to start."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from pagemill_gateway.admission.output_tokens import OutputTokens
from pagemill_gateway.brain.endpoints.record import EndpointRecord
from pagemill_gateway.brain.interface import Target
from pagemill_protocol.catalog import CatalogModel

REMEMBERED = 5
LAPSE_S = 300.0
"""Without another request for an engine, this long after the latest one, a start is no longer timed."""
LEAST_LEFT_S = 1.0
WAIT_FACTOR = 2.0
"""A start may take this many times as long as it usually does before requests stop waiting for it."""


class Starts:
    """How much longer a deployment without an engine has to wait for one, learned from how long earlier starts took.

    The time counts from the first request that found no engine, which is when a deployment that scaled to zero gets
    one, to the first report of an engine that serves. Starts from zero and returns of a known engine are learned apart:
    a pod that must be scheduled takes longer than a container that restarts. Before the first of either, the start
    times that engines report are used.
    """

    def __init__(self) -> None:
        self._took_s: dict[bool, deque[float]] = {from_zero: deque(maxlen=REMEMBERED) for from_zero in (True, False)}
        self._reported_s: float | None = None
        self._requested_at: float | None = None
        self._latest_request_at = 0.0
        self._from_zero = False
        self._ended_at = -math.inf
        """When an engine served after the latest start."""
        self._latest_until = -math.inf
        """The instant until which requests could wait for the latest start."""

    def engine_reported(self, start_s: dict[str, float]) -> None:
        """Keep what an engine reports of its own start, by phase."""
        if start_s:
            self._reported_s = sum(start_s.values())

    def requested(self, now: float, *, from_zero: bool) -> None:
        """A request needs an engine and none serves; `from_zero`: nor is one known that could come back."""
        if self._requested_at is None or now - self._latest_request_at > LAPSE_S:
            self._requested_at, self._from_zero = now, from_zero
        self._latest_request_at = now

    def served(self, now: float) -> None:
        """An engine serves."""
        if self._requested_at is not None and now - self._latest_request_at <= LAPSE_S:
            self._ended_at, self._latest_until = now, self.waits_until(now)
            self._took_s[self._from_zero].append(now - self._requested_at)
        self._requested_at = None

    def usual_s(self, *, from_zero: bool) -> float | None:
        """How long a start takes; `None`: unknown."""
        took_s = self._took_s[from_zero]
        return median(took_s) if took_s else self._reported_s

    def waits_until(self, arrived_at: float) -> float:
        """Return the instant until which a start gives a request that arrived at `arrived_at` reason to wait.

        That is twice the usual duration after the start began; the second half leaves time for the request's turn.
        -inf where the request met no start, or where it is not known how long one takes.
        """
        if self._requested_at is None:
            return self._latest_until if arrived_at <= self._ended_at else -math.inf
        usual_s = self.usual_s(from_zero=self._from_zero)
        return -math.inf if usual_s is None else self._requested_at + WAIT_FACTOR * usual_s

    def left_s(self, now: float) -> float | None:
        """Until the engine serves that was requested, or is requested now; `None`: unknown."""
        expected_s = self.usual_s(from_zero=self._from_zero)
        if expected_s is None:
            return None
        waited_s = now - self._requested_at if self._requested_at is not None else 0.0
        # A start that is late already may well be late by as much again.
        return max(LEAST_LEFT_S, abs(expected_s - waited_s))


@dataclass(slots=True)
class DeploymentRecord:
    model: CatalogModel
    records: list[EndpointRecord] = field(default_factory=list)
    last_served_at: float | None = None
    """When an endpoint last reported and would take requests, or its platform first called one ready."""
    output_tokens: OutputTokens = field(default_factory=OutputTokens)
    bundle_digest: str = ""
    """Of the tokenizer that one of its endpoints reported last: its next endpoint will most likely have the same."""
    starts: Starts = field(default_factory=Starts)
    targets: dict[str, Target] = field(default_factory=dict)
    """Targets for requests, by the tokenizer of the endpoints; kept until `changed`."""
    _usable: list[EndpointRecord] | None = None
    _with_bundle: dict[str, list[EndpointRecord]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return deployment_key(self.model)

    @property
    def serving(self) -> bool:
        return any(record.serving for record in self.records)

    def adapter_digest(self, name: str) -> str:
        """Of the adapter that clients name `name`; empty: it is none of its adapters."""
        return next((each.digest for each in self.model.adapters if each.name == name), "")

    def usable(self) -> list[EndpointRecord]:
        """Every request reads them, so they are computed again only after `changed`."""
        if self._usable is None:
            self._usable = [record for record in self.records if record.usable]
        return self._usable

    def usable_with(self, bundle_digest: str) -> list[EndpointRecord]:
        """Those that understand the token ids of this tokenizer."""
        records = self._with_bundle.get(bundle_digest)
        if records is None:
            records = [record for record in self.usable() if record.bundle_digest == bundle_digest]
            self._with_bundle[bundle_digest] = records
        return records

    def keeps(self, records: Sequence[EndpointRecord]) -> bool:
        """Whether `records` is a list of `usable_with`, which stays the same until `changed`."""
        return any(each is records for each in self._with_bundle.values())

    def changed(self) -> None:
        """One of its endpoints may have become usable or unusable, or be another engine than before."""
        self._usable = None
        self._with_bundle.clear()
        self.targets.clear()

    def departing(self) -> list[EndpointRecord]:
        """Leaving endpoints that still take requests: used when no other is left."""
        return [record for record in self.records if record.serving and record.leaving and record.reports.connected]


def deployment_key(model: CatalogModel) -> str:
    return f"{model.namespace}/{model.deployment}"
