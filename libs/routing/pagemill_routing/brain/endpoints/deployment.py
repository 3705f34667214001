"""The state of one deployment: its endpoints, the lengths of its answers, and the durations of its engines' starts."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from pagemill_protocol.catalog import CatalogModel
from pagemill_protocol.report.adapters import AdapterStatus
from pagemill_routing.admission.output_tokens import OutputTokens
from pagemill_routing.brain.endpoints.adapters import AdapterUses
from pagemill_routing.brain.endpoints.record import EndpointRecord
from pagemill_routing.brain.interface import Target

NUM_KEPT_STARTS = 5
START_TIMING_LIMIT_S = 300.0
"""A start is not timed any more if no request has needed an engine for this long."""
LEAST_LEFT_S = 1.0
WAIT_FACTOR = 2.0
"""A start may take this many times as long as it usually does before requests stop waiting for it."""


class StartEstimator:
    """Estimates how long a deployment without an engine has to wait for one, from the durations of earlier starts.

    A start lasts from the first request that found no engine to the first report of a serving engine. Starts from zero
    and restarts of a known engine are kept apart, because scheduling a pod takes longer than restarting a container.
    Before the first start, the estimate is the start time that engines report.
    """

    def __init__(self) -> None:
        self._durations_s: dict[bool, deque[float]] = {
            from_zero: deque(maxlen=NUM_KEPT_STARTS) for from_zero in (True, False)
        }
        self._reported_s: float | None = None
        self._requested_at: float | None = None
        self._latest_request_at = 0.0
        self._from_zero = False
        self._ended_at = -math.inf
        """When an engine served after the latest start."""
        self._latest_until = -math.inf
        """The instant until which requests could wait for the latest start."""

    def engine_reported(self, start_s: dict[str, float]) -> None:
        """Keep an engine's reported start time, given by phase."""
        if start_s:
            self._reported_s = sum(start_s.values())

    def requested(self, now: float, *, from_zero: bool) -> None:
        """Note a request that needs an engine while none serves. `from_zero`: there is no engine that could return."""
        if self._requested_at is None or now - self._latest_request_at > START_TIMING_LIMIT_S:
            self._requested_at, self._from_zero = now, from_zero
        self._latest_request_at = now

    def served(self, now: float) -> None:
        """Note that an engine serves, which ends the start."""
        if self._requested_at is not None and now - self._latest_request_at <= START_TIMING_LIMIT_S:
            self._ended_at, self._latest_until = now, self.waits_until(now)
            self._durations_s[self._from_zero].append(now - self._requested_at)
        self._requested_at = None

    def usual_s(self, *, from_zero: bool) -> float | None:
        """Return the median duration of a start; `None` if unknown."""
        took_s = self._durations_s[from_zero]
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
        """Return the expected time until the requested engine serves, counted from its request; `None` if unknown."""
        expected_s = self.usual_s(from_zero=self._from_zero)
        if expected_s is None:
            return None
        waited_s = now - self._requested_at if self._requested_at is not None else 0.0
        # A start that is late by some time is expected to take as much time again.
        return max(LEAST_LEFT_S, abs(expected_s - waited_s))


@dataclass(slots=True)
class DeploymentRecord:
    model: CatalogModel
    records: list[EndpointRecord] = field(default_factory=list)
    last_served_at: float | None = None
    """The latest time at which an endpoint that serves reported, or the platform found one ready for the first time."""
    output_tokens: OutputTokens = field(default_factory=OutputTokens)
    bundle_digest: str = ""
    """The tokenizer that one of its endpoints reported last, which its next endpoint most likely has as well."""
    starts: StartEstimator = field(default_factory=StartEstimator)
    adapter_uses: AdapterUses = field(default_factory=AdapterUses)
    targets: dict[str, Target] = field(default_factory=dict)
    """Cached targets for requests, by the endpoints' tokenizer, until `changed`."""
    _usable: list[EndpointRecord] | None = None
    _with_bundle: dict[str, list[EndpointRecord]] = field(default_factory=dict)
    _with_adapter: dict[str, tuple[str, list[EndpointRecord]]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return deployment_key(self.model)

    @property
    def serving(self) -> bool:
        return any(record.serving for record in self.records)

    def is_adapter(self, name: str) -> bool:
        """Whether the name, which leads to this deployment, is that of an adapter."""
        if name == self.model.name or name in self.model.aliases:
            return False
        return name in self.model.adapters or any(name in record.adapters.by_name for record in self.records)

    def usable_with_adapter(self, name: str) -> tuple[str, list[EndpointRecord]]:
        """Return the adapter's digest and the usable endpoints that know it; empty if none does.

        While its content changes, endpoints differ: the digest that most of them know counts.
        """
        known = self._with_adapter.get(name)
        if known is None:
            digests = Counter(digest for record in self.usable() if (digest := record.adapters.digest(name)))
            digest = max(digests, key=digests.__getitem__, default="")
            records = [record for record in self.usable() if digest and record.adapters.digest(name) == digest]
            known = self._with_adapter[name] = (digest, records)
        return known

    def adapter_statuses(self, name: str) -> list[AdapterStatus]:
        """Return what the usable endpoints report of an adapter."""
        return [record.adapters.by_name[name] for record in self.usable() if name in record.adapters.by_name]

    def usable(self) -> list[EndpointRecord]:
        """Return the usable endpoints. The list is cached until `changed`, because every request reads it."""
        if self._usable is None:
            self._usable = [record for record in self.records if record.usable]
        return self._usable

    def usable_with(self, bundle_digest: str) -> list[EndpointRecord]:
        """Return the usable endpoints with this tokenizer."""
        records = self._with_bundle.get(bundle_digest)
        if records is None:
            records = [record for record in self.usable() if record.bundle_digest == bundle_digest]
            self._with_bundle[bundle_digest] = records
        return records

    def keeps(self, records: Sequence[EndpointRecord]) -> bool:
        """Whether `records` is a cached list of `usable_with`, which is the same object until `changed`."""
        return any(each is records for each in self._with_bundle.values())

    def changed(self) -> None:
        """Drop the cached lists, because an endpoint may have become usable, unusable, or another engine."""
        self._usable = None
        self._with_bundle.clear()
        self._with_adapter.clear()
        self.targets.clear()

    def departing(self) -> list[EndpointRecord]:
        """Return the leaving endpoints that still take requests; they are used if no others are left."""
        return [record for record in self.records if record.serving and record.leaving and record.reports.connected]


def deployment_key(model: CatalogModel) -> str:
    return f"{model.namespace}/{model.deployment}"
