"""How many tokens answers of one deployment will have, learned from finished ones.

Answers are grouped by the power of two of the `max_tokens` their clients sent, since short limits and short answers go
together; a limit that was seen too rarely uses the answers of all. Old answers fade, so a changed workload is learned
anew. Memory does not grow: one histogram with bins of a factor of 1.4 per power of two.
"""

from __future__ import annotations

import math

QUANTILE = 0.8
"""Of the learned lengths. Many requests together need their mean; a few need more than that."""
PRIOR_TOKENS = 256
"""The estimate while nothing is learned, for answers that may be longer."""
PRIOR_MEAN_TOKENS = 128.0
MEAN_WEIGHT = 0.02
"""Of the newest answer in the mean: a memory of about 50."""
LEAST_SAMPLES = 8.0
"""Answers before a histogram is used."""
MAX_SAMPLES = 512.0
"""Beyond this many, all counts are halved."""
NUM_BINS = 48
NUM_LIMITS = 24


class OutputTokens:
    def __init__(self) -> None:
        self.mean = PRIOR_MEAN_TOKENS
        """Of recent answers: how long a sequence slot is used on average."""
        self._by_limit: dict[int, _Histogram] = {}
        self._all = _Histogram()

    def ended(self, num_tokens: float, max_tokens: int | None) -> None:
        """One answer came to its own end."""
        self.mean += MEAN_WEIGHT * (num_tokens - self.mean)
        self._all.add(num_tokens)
        self._by_limit.setdefault(_limit_class(max_tokens), _Histogram()).add(num_tokens)

    def expect(self, max_tokens: int | None) -> int:
        """Tokens that most answers with this limit stay below; at least 1, at most the limit."""
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
