"""Predictions of latency: the engines' own step-time model under the observed load.

One replica gets an equal share of the arrivals. In the steady state every step takes `s` seconds, holds the requests
that decode (arrivals x output tokens x s, by Little's law) and computes the prompt tokens that arrived meanwhile; `s`
is the least fixed point of the step-time model. The percentile adds two things. To the time per output token: the
Poisson spread of the requests that decode at once, and of those that arrive while one decodes and whose prompts share
its steps. To the time to first token: the wait behind other prompts, as in a queue with one server. ADR 28 compares the
result with the scheduler. The autoscaler, `pagemill plan` and the gateway's page use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import msgspec

from pagemill_protocol.report.shape import Shape
from pagemill_protocol.report.step_time import StepTimeModel, in_rounds

MAX_ROUNDS = 200
CONVERGED = 1e-4
LEAST_RATE, MOST_RATE = 1e-3, 1e6
"""The range of requests per second that is searched."""
RATE_PRECISION = 0.02
"""The relative precision of `highest_rate` by default."""
SHARE_PRECISION = 1e-4
"""The precision of the share of the slowest replica's requests."""
MAX_UTILIZATION = 0.95
"""The share of the KV cache, of concurrent requests and of a step's tokens beyond which requests wait."""


class OfferedLoad(msgspec.Struct, frozen=True):
    """The load of all replicas together."""

    requests_per_s: float
    prompt_tokens: float
    """Mean length of a prompt, including cached tokens, which are read as context."""
    computed_tokens: float
    """Mean number of a prompt's tokens that are not cached."""
    computed_tokens_high: float
    """Number of a prompt's tokens that are not cached, at the percentile of the SLO."""
    output_tokens: float
    """Mean length of an answer."""
    dispersion: float = 1.0
    """The dispersion of the arrivals: 1 where they are independent of each other."""
    computed_variation: float = 1.0
    """The variance of the computed tokens of prompts, divided by the square of their mean: 0 for equal prompts."""

    def times(self, factor: float) -> OfferedLoad:
        """Return the load with `factor` times the requests."""
        return msgspec.structs.replace(self, requests_per_s=self.requests_per_s * factor)


class Prediction(msgspec.Struct, frozen=True):
    """Latencies at the percentile of the SLO; infinite where the replicas cannot serve the load."""

    ttft_ms: float
    tpot_ms: float
    limit: str = ""
    """The resource that is exhausted: steps, tokens, maxNumSeqs or blocks. Empty: none."""


class Predictor:
    """Predicts latencies for replicas of one capacity. Raises `ValueError` for invalid step-time parameters.

    Where replicas differ in speed, requests are taken to be distributed in proportion to it. The prediction is that of
    the slowest replica, on which all latencies are longest, for the share of its requests at which `share` of all
    requests are no slower.
    """

    def __init__(self, shape: Shape, share: float, model: StepTimeModel | None = None) -> None:
        """`share` is the percentile of the latencies, 0 to 1; `model` is that of the shape's step times, if built."""
        if (stages := shape.step_time.stages) > 1:
            most = stages * shape.max_step_tokens
            shape = msgspec.structs.replace(shape, step_time=in_rounds(shape.step_time), max_step_tokens=most)
        self._shape = shape
        self.share = share
        self._model = StepTimeModel.from_params(shape.step_time) if model is None else model
        self._slowness = shape.slowness or (1.0,)
        slowest = max(self._slowness)
        self._alone = _ReplicaPredictor(shape, self._model, share, slowest)
        share_of_slowest = _share_of_slowest(share, self._slowness)
        self._slowest = _ReplicaPredictor(shape, self._model, share_of_slowest, slowest)

    @property
    def known(self) -> bool:
        """Whether the step-time model has learned anything."""
        return self._model.known

    def at(self, share: float) -> Predictor:
        """Return the predictor for another percentile, with the same step-time model."""
        return Predictor(self._shape, share, self._model)

    def predict(self, load: OfferedLoad, replicas: int) -> Prediction:
        if replicas <= 0:
            return Prediction(math.inf, math.inf, "replicas")
        return self._replica(replicas).predict(load, self._rate(load, replicas), _together(load, replicas))

    def predict_prefill(self, load: OfferedLoad, replicas: int, held_s: float = 0.0) -> Prediction:
        """Predict for replicas that only compute prompts, whose steps have no decodes: the time per token is 0.

        `held_s`: time for which a computed prompt keeps its blocks until another replica has its keys and values.
        """
        if replicas <= 0:
            return Prediction(math.inf, math.inf, "replicas")
        rate, together = self._rate(load, replicas), _together(load, replicas)
        return self._replica(replicas).predict_prefill(load, rate, held_s, together)

    def predict_decode(self, load: OfferedLoad, replicas: int) -> Prediction:
        """Predict for replicas that only decode, whose steps have no prompts: the time to first token is 0."""
        computed = msgspec.structs.replace(load, computed_tokens=0.0, computed_tokens_high=0.0)
        found = self.predict(computed, replicas)
        return found if found.limit else msgspec.structs.replace(found, ttft_ms=0.0)

    def _replica(self, replicas: int) -> _ReplicaPredictor:
        """Return the predictor of the slowest of so many replicas."""
        return self._slowest if replicas > 1 else self._alone

    def _rate(self, load: OfferedLoad, replicas: int) -> float:
        """Return the requests per second of the slowest replica."""
        return load.requests_per_s / (max(self._slowness) * self._speed(replicas))

    def _speed(self, replicas: int) -> float:
        """Return the speed of all replicas together, where replicas to come are like the mean of the known ones.

        Of fewer replicas than are known the slowest is one.
        """
        num_known, known = len(self._slowness), sum(1 / each for each in self._slowness)
        if replicas >= num_known:
            return known * replicas / num_known
        slowest = 1 / max(self._slowness)
        return slowest + (replicas - 1) * (known - slowest) / (num_known - 1)

    def highest_rate(
        self, load: OfferedLoad, replicas: int, meets: Callable[[Prediction], bool], precision: float = RATE_PRECISION
    ) -> float:
        """Return the most requests per second, with the lengths of `load`, at which the prediction still `meets`.

        0 where no rate does.
        """
        low, high = 0.0, max(LEAST_RATE, load.requests_per_s)
        while high < MOST_RATE and meets(self.predict(msgspec.structs.replace(load, requests_per_s=high), replicas)):
            low, high = high, 2 * high
        while high - low > precision * high and high > LEAST_RATE:
            middle = (low + high) / 2
            if meets(self.predict(msgspec.structs.replace(load, requests_per_s=middle), replicas)):
                low = middle
            else:
                high = middle
        return low


class _ReplicaPredictor:
    """Predicts the latencies of one replica at its part of the load."""

    def __init__(self, shape: Shape, model: StepTimeModel, share: float, slowness: float) -> None:
        self._shape = shape
        self._model = model
        self._share = share
        self._spread = NormalDist().inv_cdf(share)
        # Predictions are longer by the typical error of the step-time model.
        error = shape.step_time.error_p50
        self._slowness = slowness * (1.0 + (min(0.5, error) if 0 < error < math.inf else 0.0))
        # Proposed tokens that are right make answers of fewer steps, each of which computes the others, too.
        self._per_step = model.tokens_per_decode
        self._computed = model.computed_per_decode

    def predict(self, load: OfferedLoad, rate: float, together: float) -> Prediction:
        """Predict the latencies at `rate` requests per second, which come in groups of `together`."""
        step_s = self._steady_step_s(load, rate)
        if step_s is None:
            return Prediction(math.inf, math.inf, "steps")
        decoding = rate * load.output_tokens / self._per_step * step_s
        prefill = rate * load.computed_tokens * step_s
        high = decoding + self._spread * math.sqrt(decoding)
        if limit := self._exhausted(load, high, prefill):
            return Prediction(math.inf, math.inf, limit)
        tpot_s = self._longest_step_s(load, rate, high, prefill) / self._per_step
        # A request waits for the rest of a step before its prompt can be computed.
        ttft_s = self._share * step_s + self._prompt_s(load, rate, decoding, together)
        return Prediction(ttft_s * 1000, tpot_s * 1000)

    def predict_prefill(self, load: OfferedLoad, rate: float, held_s: float, together: float) -> Prediction:
        """Predict the latency of a replica that only computes prompts."""
        ttft_s = self._prompt_s(load, rate, 0.0, together)
        if not math.isfinite(ttft_s):
            return Prediction(math.inf, math.inf, "steps")
        held = rate * (self._prefill_s(load, load.computed_tokens, 0.0) + held_s)
        if self._lacks_blocks(held + self._spread * math.sqrt(held), load.prompt_tokens):
            return Prediction(math.inf, math.inf, "blocks")
        return Prediction(ttft_s * 1000, 0.0)

    def _steady_step_s(self, load: OfferedLoad, rate: float) -> float | None:
        """Return the least fixed point of the length of a step, since longer steps hold more; None: there is none."""
        longest_s = self._longest_s(load)
        step_s = self._step_s(load, 1.0, 0.0)
        for _ in range(MAX_ROUNDS):
            decoding = rate * load.output_tokens / self._per_step * step_s
            prefill = rate * load.computed_tokens * step_s
            following = self._mean_step_s(load, max(1.0, decoding), prefill)
            if following <= step_s * (1 + CONVERGED):
                return following
            if following > longest_s:
                return None
            step_s = following
        return None

    def _longest_s(self, load: OfferedLoad) -> float:
        """Return the length of the largest step that is allowed."""
        tokens = self._max_step_tokens
        return self._step_s(load, min(tokens, self._shape.max_num_seqs or tokens), tokens) + 1.0

    @property
    def _max_step_tokens(self) -> int:
        return self._shape.max_step_tokens or 2048

    def _step_s(self, load: OfferedLoad, decoding: float, prefill: float) -> float:
        context = load.prompt_tokens + load.output_tokens / 2
        products = prefill * load.prompt_tokens / 2
        tokens = max(1, round(decoding * self._computed + prefill))
        ms = self._model.predict_ms(tokens, round(decoding * context), round(products))
        return (ms + min(1.0, decoding) * self._model.draft_ms) * self._slowness / 1000

    def _mean_step_s(self, load: OfferedLoad, decoding: float, prefill: float) -> float:
        """Return the mean length of steps that compute `prefill` prompt tokens on average.

        A prompt is computed in one step, for which all decoding requests wait. Spread over many steps it might cost
        nothing.
        """
        budget = max(1.0, self._max_step_tokens - decoding)
        together = min(budget, max(1.0, load.computed_tokens, prefill))
        without_s = self._step_s(load, decoding, 0.0)
        return without_s + (self._step_s(load, decoding, together) - without_s) * prefill / together

    def _exhausted(self, load: OfferedLoad, decoding: float, prefill: float) -> str:
        shape = self._shape
        if decoding + prefill > MAX_UTILIZATION * self._max_step_tokens:
            return "tokens"
        if shape.max_num_seqs and decoding > MAX_UTILIZATION * max(2, shape.max_num_seqs):
            return "maxNumSeqs"
        return "blocks" if self._lacks_blocks(decoding, load.prompt_tokens + load.output_tokens / 2) else ""

    def _lacks_blocks(self, sequences: float, tokens: float) -> bool:
        """Whether so many sequences of so many tokens, the last block half full, need more than the KV cache."""
        return sequences * self._shape.bytes_of(tokens) > MAX_UTILIZATION * self._shape.num_bytes

    def _longest_step_s(self, load: OfferedLoad, rate: float, decoding: float, prefill: float) -> float:
        """Return the least fixed point of the time per step, since a longer decode shares steps with more prompts."""
        num_steps = load.output_tokens / self._per_step
        budget = max(0.0, self._max_step_tokens - decoding)
        step_s = self._mean_step_s(load, max(1.0, decoding), prefill)
        for _ in range(MAX_ROUNDS):
            met = rate * num_steps * step_s
            prompts = (met + self._spread * math.sqrt(met)) * load.computed_tokens
            met_tokens = min(budget, max(prefill, prompts / num_steps))
            following = self._mean_step_s(load, max(1.0, decoding), met_tokens)
            if following <= step_s * (1 + CONVERGED):
                return following
            step_s = following
        return step_s

    def _prompt_s(self, load: OfferedLoad, rate: float, decoding: float, together: float) -> float:
        """Return the time of a prompt from the end of the running step: the wait behind other prompts, and its own."""
        own_s, mean_s = (
            self._prefill_s(load, tokens, decoding) for tokens in (load.computed_tokens_high, load.computed_tokens)
        )
        # Waiting prompts share their steps, so each delays the others only by its part of a full step.
        budget = max(1.0, self._max_step_tokens - decoding)
        service_s = load.computed_tokens / budget * self._step_s(load, decoding, budget)
        variation = (together + load.computed_variation) / 2
        wait_s, high_wait_s = waits_s(rate, service_s, self._share, variation)
        # A few very long prompts can make the mean longer than most prompts.
        return max(own_s + wait_s, min(own_s, mean_s) + high_wait_s)

    def _prefill_s(self, load: OfferedLoad, num_tokens: float, decoding: float) -> float:
        """Return the time of a prompt that is computed in chunks beside decoding requests."""
        budget = max(1.0, self._max_step_tokens - decoding)
        full, rest = divmod(max(1.0, num_tokens), budget)
        whole_s = full * self._step_s(load, decoding, budget) if full else 0.0
        return whole_s + (self._step_s(load, decoding, rest) if rest else 0.0)


def waits_s(rate: float, service_s: float, share: float, variation: float = 1.0) -> tuple[float, float]:
    """Return the mean wait for one server, and the wait that a `share` of the arrivals do not exceed, in seconds.

    Allen and Cunneen: `variation` is the mean of the squared variations of the times between arrivals and of the
    service, which is 1 where both are exponential. The tail of the wait is exponential. Both are infinite from
    `MAX_UTILIZATION` on.
    """
    busy = rate * service_s
    if busy >= MAX_UTILIZATION:
        return math.inf, math.inf
    if busy <= 0:
        return 0.0, 0.0
    wait_s = busy / (1 - busy) * service_s * variation
    return wait_s, wait_s / busy * max(0.0, math.log(busy / (1 - share)))


def _share_of_slowest(share: float, slowness: Sequence[float]) -> float:
    """Return the share of the slowest replica's requests that must be in time, so that `share` of all requests are.

    Fewer requests of the faster replicas are late: the tails of the latencies are taken to be exponential, and as much
    shorter as the replicas are faster.
    """
    slowest, speed = max(slowness), sum(1 / each for each in slowness)
    if slowest <= min(slowness):
        return share
    low, high = 1.0 - share, 1.0
    while high - low > SHARE_PRECISION:
        late = (low + high) / 2
        if sum(late ** (slowest / each) / each for each in slowness) <= (1.0 - share) * speed:
            low = late
        else:
            high = late
    return 1.0 - low


def _together(load: OfferedLoad, replicas: int) -> float:
    """Return the dispersion of the arrivals at one replica: of requests that come together each gets a part."""
    return 1.0 + (load.dispersion - 1.0) / replicas
