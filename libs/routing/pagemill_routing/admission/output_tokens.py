"""Estimates how many tokens the answers of a deployment will have, from finished answers.

Answers are grouped by the power of two of their requests' `max_tokens`, because short limits and short answers go
together; a group with too few answers uses those of all groups. Old answers lose weight, so the estimate follows the
workload. Memory is constant: each group is a histogram whose bins grow by a factor of 1.4.
"""

from __future__ import annotations

import math

QUANTILE = 0.8
"""The quantile of the lengths that is the estimate. Few requests may together need more than their mean length."""
PRIOR_TOKENS = 256
"""The estimate while there are too few answers."""
PRIOR_MEAN_TOKENS = 128.0
MEAN_WEIGHT = 0.02
"""The weight of the newest answer in the mean, which thus covers about 50 answers."""
LEAST_SAMPLES = 8.0
"""The number of answers from which on a histogram is used."""
MAX_SAMPLES = 512.0
"""When a histogram has more answers, all its counts are halved."""
NUM_BINS = 48
NUM_LIMITS = 24


class OutputTokens:
    def __init__(self) -> None:
        self.mean = PRIOR_MEAN_TOKENS
        """The mean number of tokens in recent answers."""
        self._by_limit: dict[int, _Histogram] = {}
        self._all = _Histogram()

    def ended(self, num_tokens: float, max_tokens: int | None) -> None:
        """Add an answer that reached its end."""
        self.mean += MEAN_WEIGHT * (num_tokens - self.mean)
        self._all.add(num_tokens)
        self._by_limit.setdefault(_limit_class(max_tokens), _Histogram()).add(num_tokens)

    def expect(self, max_tokens: int | None) -> int:
        """Return the estimate for an answer with this limit: at least 1, at most the limit."""
        own = self._by_limit.get(_limit_class(max_tokens))
        histogram = own if own is not None and own.total >= LEAST_SAMPLES else self._all
        tokens = histogram.quantile(QUANTILE) if histogram.total >= LEAST_SAMPLES else PRIOR_TOKENS
        return max(1, tokens if max_tokens is None else min(tokens, max_tokens))


class _Histogram:
    def __init__(self) -> None:
        self.total = 0.0
        self._bins = [0.0] * NUM_BINS

    def add(self, num_tokens: float) -> None:
        index = math.ceil(2 * math.log2(num_tokens)) if num_tokens > 1 else 0
        self._bins[min(NUM_BINS - 1, index)] += 1.0
        self.total += 1.0
        if self.total > MAX_SAMPLES:
            self._bins = [count / 2 for count in self._bins]
            self.total /= 2

    def quantile(self, share: float) -> int:
        wanted, seen = share * self.total, 0.0
        for index, count in enumerate(self._bins):
            seen += count
            if seen >= wanted:
                return math.ceil(math.pow(2.0, index / 2))
        return math.ceil(math.pow(2.0, (NUM_BINS - 1) / 2))


def _limit_class(max_tokens: int | None) -> int:
    return NUM_LIMITS if max_tokens is None else min(NUM_LIMITS - 1, max(0, max_tokens - 1).bit_length())
