"""Predictions of latency: the engines' own step-time model under the observed load.

One replica gets an equal share of the arrivals. In the steady state every step takes `s` seconds, holds the requests
that decode (arrivals x output tokens x s, by Little's law) and computes the prompt tokens that arrived meanwhile; `s`
is the least fixed point of the step-time model. The percentile adds two things. To the time per output token: the
Poisson spread of the requests that decode at once, and of those that arrive while one decodes and whose prompts share
its steps. To the time to first token: the wait behind other prompts, as in a queue with one server. ADR 28 compares the
result with the scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import msgspec

from pagemill_operator.autoscaler.signals import Shape
from pagemill_protocol.step_time import StepTimeModel

MAX_ROUNDS = 200
CONVERGED = 1e-4
LEAST_RATE, MOST_RATE = 1e-3, 1e6
"""The range of requests per second that is searched."""
RATE_PRECISION = 0.02
"""The relative precision of `highest_rate` by default."""
MAX_KV_USAGE = 0.95
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
    """Predicts latencies for replicas of one capacity. Raises `ValueError` for invalid step-time parameters."""

    def __init__(self, shape: Shape, share: float) -> None:
        self._shape = shape
        self._model = StepTimeModel.from_params(shape.step_time)
        self._share = share
        self._spread = NormalDist().inv_cdf(share)
        # Predictions are longer by the typical error of the step-time model.
        error = shape.step_time.error_p50
        self._margin = 1.0 + (min(0.5, error) if 0 < error < math.inf else 0.0)

    @property
    def known(self) -> bool:
        """Whether the step-time model has learned anything."""
        return self._model.known

    def predict(self, load: OfferedLoad, replicas: int) -> Prediction:
        if replicas <= 0:
            return Prediction(math.inf, math.inf, "replicas")
        rate = load.requests_per_s / replicas
        step_s = self._steady_step_s(load, rate)
        if step_s is None:
            return Prediction(math.inf, math.inf, "steps")
        decoding = rate * load.output_tokens * step_s
        prefill = rate * load.computed_tokens * step_s
        high = decoding + self._spread * math.sqrt(decoding)
        if limit := self._exhausted(load, high, prefill):
            return Prediction(math.inf, math.inf, limit)
        tpot_s = self._tpot_s(load, rate, high, prefill)
        # Of those that come together each replica gets a part.
        together = 1.0 + (load.dispersion - 1.0) / replicas
        return Prediction(self._ttft_s(load, rate, step_s, decoding, together) * 1000, tpot_s * 1000)

    def highest_rate(
        self, load: OfferedLoad, replicas: int, meets: Callable[[Prediction], bool], precision: float = RATE_PRECISION
    ) -> float:
        """Return the most requests per second, with the lengths of `load`, at which the prediction still `meets`.

        0 where no rate does.
        """
        low, high = 0.0, load.requests_per_s
        while high < MOST_RATE and meets(self.predict(msgspec.structs.replace(load, requests_per_s=high), replicas)):
            low, high = high, 2 * high
        while high - low > precision * high and high > LEAST_RATE:
            middle = (low + high) / 2
            if meets(self.predict(msgspec.structs.replace(load, requests_per_s=middle), replicas)):
                low = middle
            else:
                high = middle
        return low

    def _steady_step_s(self, load: OfferedLoad, rate: float) -> float | None:
        """Return the least fixed point of the length of a step, since longer steps hold more; None: there is none."""
        longest_s = self._longest_s(load)
        step_s = self._step_s(load, 1.0, 0.0)
        for _ in range(MAX_ROUNDS):
            decoding, prefill = rate * load.output_tokens * step_s, rate * load.computed_tokens * step_s
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
        tokens = max(1, round(decoding + prefill))
        return self._model.predict_ms(tokens, round(decoding * context), round(products)) * self._margin / 1000

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
        if decoding + prefill > MAX_KV_USAGE * self._max_step_tokens:
            return "tokens"
        if shape.max_num_seqs and decoding > MAX_KV_USAGE * max(2, shape.max_num_seqs):
            return "maxNumSeqs"
        per_request = load.prompt_tokens + load.output_tokens / 2 + shape.block_size / 2
        return "blocks" if decoding * per_request > MAX_KV_USAGE * shape.num_tokens else ""

    def _tpot_s(self, load: OfferedLoad, rate: float, decoding: float, prefill: float) -> float:
        """Return the least fixed point of the time per token, since a longer decode shares steps with more prompts."""
        budget = max(0.0, self._max_step_tokens - decoding)
        step_s = self._mean_step_s(load, max(1.0, decoding), prefill)
        for _ in range(MAX_ROUNDS):
            met = rate * load.output_tokens * step_s
            prompts = (met + self._spread * math.sqrt(met)) * load.computed_tokens
            met_tokens = min(budget, max(prefill, prompts / load.output_tokens))
            following = self._mean_step_s(load, max(1.0, decoding), met_tokens)
            if following <= step_s * (1 + CONVERGED):
                return following
            step_s = following
        return step_s

    def _ttft_s(self, load: OfferedLoad, rate: float, step_s: float, decoding: float, together: float) -> float:
        """Return the time to first token: the rest of a step, the wait behind other prompts, and the own prompt."""
        own_s, mean_s = (
            self._prefill_s(load, tokens, decoding) for tokens in (load.computed_tokens_high, load.computed_tokens)
        )
        # Waiting prompts share their steps, so each delays the others only by its part of a full step.
        budget = max(1.0, self._max_step_tokens - decoding)
        service_s = load.computed_tokens / budget * self._step_s(load, decoding, budget)
        busy = min(1.0, rate * service_s)
        if busy >= MAX_KV_USAGE:
            return math.inf
        # Pollaczek and Khinchine with exponential service, and Allen and Cunneen for the dispersion of arrivals; the
        # tail of the wait is exponential too.
        wait_s = busy / (1 - busy) * service_s * (1 + together) / 2
        high_wait_s = wait_s / busy * max(0.0, math.log(busy / (1 - self._share))) if busy > 0 else 0.0
        return self._share * step_s + max(own_s + wait_s, mean_s + high_wait_s)

    def _prefill_s(self, load: OfferedLoad, num_tokens: float, decoding: float) -> float:
        """Return the time of a prompt that is computed in chunks beside decoding requests."""
        budget = max(1.0, self._max_step_tokens - decoding)
        full, rest = divmod(max(1.0, num_tokens), budget)
        whole_s = full * self._step_s(load, decoding, budget) if full else 0.0
        return whole_s + (self._step_s(load, decoding, rest) if rest else 0.0)
