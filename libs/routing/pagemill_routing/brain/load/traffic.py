"""Measures arrivals, latencies and lengths per deployment, which the autoscaler cannot learn from engines.

An arrival is counted when a request first needs an engine, with the time at which it reached the gateway. So the
autoscaler sees waiting requests, and they do not look like a burst when an engine becomes ready. Latencies and lengths
are counted at the end of a request (`RequestOutcome`). Low-priority requests, such as lines of batches, are not
counted: they use idle capacity and are no reason for more. `brain.brain` writes the counts, and `brain.load.measure`
reads them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from pagemill_protocol.report.histogram import Histogram, bin_of
from pagemill_protocol.report.load import Arrivals, Latencies, Lengths
from pagemill_routing.brain.interface import RequestOutcome

WINDOW_S = 60
BURST_WINDOW_S = 6
"""The window in which bursts are measured, a tenth of `WINDOW_S`."""
TICKS_PER_S = 10
"""The resolution of arrival times."""
MAX_LENGTHS = 512.0
"""With more requests, all counts are halved: lengths survive idle hours and follow a changed workload."""
LATENCY_SLOTS = 6


class TrafficMeter:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deployments: dict[str, _DeploymentTraffic] = {}

    def keep(self, deployments: set[str]) -> None:
        """Keep these deployments; forget all others."""
        for gone in self._deployments.keys() - deployments:
            del self._deployments[gone]
        for new in deployments - self._deployments.keys():
            self._deployments[new] = _DeploymentTraffic(self._clock())

    def arrived(self, deployment: str, num_tokens: int, at: float, num_requests: int = 1) -> None:
        """Count a request that needs an engine for the first time and arrived at `at` (0: now).

        `num_requests` is 0 for a request that was counted before its number of tokens was known.
        """
        traffic = self._deployments.get(deployment)
        if traffic is not None:
            now = self._clock()
            traffic.arrived(num_requests, num_tokens, min(at, now) if at > 0 else now, now)

    def record_outcome(self, outcome: RequestOutcome) -> None:
        traffic = self._deployments.get(outcome.deployment)
        if traffic is not None:
            traffic.record_outcome(outcome, self._clock())

    def arrivals(self, deployment: str, *, busy: bool = False) -> Arrivals:
        """Return the arrival rates. `busy`: requests wait or are served now, so the deployment is not idle."""
        traffic = self._deployments.get(deployment)
        return traffic.arrivals(self._clock(), busy) if traffic is not None else Arrivals()

    def latencies(self, deployment: str) -> Latencies:
        traffic = self._deployments.get(deployment)
        return traffic.latencies(self._clock()) if traffic is not None else Latencies()

    def lengths(self, deployment: str) -> Lengths:
        traffic = self._deployments.get(deployment)
        return traffic.lengths() if traffic is not None else Lengths()


class _DeploymentTraffic:
    """The counts of one deployment."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._latest = now
        """The latest time at which there was a request."""
        self._ticks: deque[tuple[int, int, int]] = deque(maxlen=(WINDOW_S + 2) * TICKS_PER_S)
        """The ticks with arrivals in order, as (tick, requests, tokens)."""
        self._ttft = _LatencyWindow()
        self._tpot = _LatencyWindow()
        self._prompt, self._computed, self._output = _LengthHistogram(), _LengthHistogram(), _LengthHistogram()

    def arrived(self, num_new: int, num_tokens: int, at: float, now: float) -> None:
        self._latest = now
        tick = int(at * TICKS_PER_S)
        if now - at > WINDOW_S:
            return
        for index in range(len(self._ticks) - 1, -1, -1):
            known, num_requests, num_known = self._ticks[index]
            if known == tick:
                self._ticks[index] = (known, num_requests + num_new, num_known + num_tokens)
                return
            if known < tick:
                break
        self._drop_old(now)
        self._ticks.append((tick, num_new, num_tokens))
        if len(self._ticks) > 1 and self._ticks[-2][0] > tick:
            self._ticks = deque(sorted(self._ticks), maxlen=self._ticks.maxlen)

    def record_outcome(self, outcome: RequestOutcome, now: float) -> None:
        if outcome.ttft_ms is not None:
            self._ttft.add(outcome.ttft_ms, now)
        if outcome.tpot_ms is not None:
            self._tpot.add(outcome.tpot_ms, now)
        self._prompt.add(outcome.num_prompt_tokens)
        self._computed.add(outcome.num_prompt_tokens - outcome.num_cached_tokens)
        self._output.add(outcome.num_output_tokens)

    def arrivals(self, now: float, busy: bool) -> Arrivals:
        self._latest = now if busy else self._latest
        window_s = min(float(WINDOW_S), max(1.0, now - self._since))
        burst_s = min(float(BURST_WINDOW_S), window_s)
        requests, tokens = self._sum(now - window_s)
        burst, _ = self._sum(now - burst_s)
        return Arrivals(
            truth="value",
            window_s=round(window_s, 1),
            requests_per_s=round(requests / window_s, 4),
            tokens_per_s=round(tokens / window_s, 2),
            burst_window_s=round(burst_s, 1),
            burst_requests_per_s=round(burst / burst_s, 4),
            idle_s=round(max(0.0, now - self._latest), 1),
        )

    def latencies(self, now: float) -> Latencies:
        ttft, tpot = self._ttft.histogram(now), self._tpot.histogram(now)
        return Latencies(truth="value" if ttft.counts else "unknown", ttft_ms=ttft, tpot_ms=tpot)

    def lengths(self) -> Lengths:
        prompt = self._prompt.histogram()
        return Lengths(
            truth="value" if prompt.counts else "unknown",
            prompt=prompt,
            computed=self._computed.histogram(),
            output=self._output.histogram(),
        )

    def _sum(self, since: float) -> tuple[int, int]:
        """Return requests and tokens of the ticks whose larger part is after `since`."""
        recent = [entry for entry in self._ticks if since <= self._since or entry[0] + 0.5 > since * TICKS_PER_S]
        return sum(requests for _, requests, _ in recent), sum(tokens for _, _, tokens in recent)

    def _drop_old(self, now: float) -> None:
        while self._ticks and self._ticks[0][0] < (now - WINDOW_S - 1) * TICKS_PER_S:
            self._ticks.popleft()


class _LatencyWindow:
    """A histogram of the last minute, in slots of which old ones are dropped."""

    def __init__(self) -> None:
        self._slots: deque[tuple[int, Counter[int]]] = deque(maxlen=LATENCY_SLOTS + 1)

    def add(self, value: float, now: float) -> None:
        slot = _slot(now)
        if not self._slots or self._slots[-1][0] < slot:
            self._slots.append((slot, Counter()))
        self._slots[-1][1][bin_of(value)] += 1

    def histogram(self, now: float) -> Histogram:
        total: Counter[int] = Counter()
        for slot, counts in self._slots:
            if slot > _slot(now) - LATENCY_SLOTS:
                total.update(counts)
        return Histogram({index: float(count) for index, count in total.items()})


class _LengthHistogram:
    """A histogram of the latest requests, regardless of their age."""

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        self._total = 0.0

    def add(self, num_tokens: int) -> None:
        index = bin_of(num_tokens)
        self._counts[index] = self._counts.get(index, 0.0) + 1.0
        self._total += 1.0
        if self._total > MAX_LENGTHS:
            self._counts = {index: count / 2 for index, count in self._counts.items() if count > 0.1}
            self._total = sum(self._counts.values())

    def histogram(self) -> Histogram:
        return Histogram({index: round(count, 3) for index, count in self._counts.items()})


def _slot(now: float) -> int:
    return int(now * LATENCY_SLOTS / WINDOW_S)
