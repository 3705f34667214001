"""The step-time model: predicts a step's duration from its composition and learns online from the steps themselves.

    ms = piecewise_linear(tokens in the step) + d * decode context + e * sum(chunk * context)

The piecewise part is reading the weights, once for all tokens of a step, and the matmuls with them, for which devices
use other kernels with few tokens than with many; the other two terms are attention, of decodes and of prompts.

Router, autoscaler, planner and simulator share this implementation. The piecewise part rises from knot to knot; it and
both coefficients are never negative, so neither is any prediction. The engine observes its steps and publishes
`params()`; all others predict from those with `from_params`. A calibration before the engine is ready gives the prior
(`from_calibration`).

The fit is weighted least squares over `step_evidence`, solved under non-negativity by `_nonnegative`. Residuals are
relative, so a 3 ms decode step counts as much as a 300 ms prefill. Outliers lose weight relative to the running median
error. A proximal term keeps directions that no step excites at their previous values, and the time of a step without
context has a floor.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from pagemill_protocol.report.state import StepTimeParams
from pagemill_protocol.report.step_evidence import GUESSED_STEPS, PRIOR_STEPS, StepEvidence, Vector

REFIT_EVERY = 16
"""Steps between two solutions of the normal equations."""
ERROR_WINDOW = 256
"""Steps over which error quantiles are taken."""
MAX_KNOTS = 14
FEW_TOKENS = (1, 4, 8, 9, 16, 32)
"""First knots. The native kernels compute up to 8 rows of activations twice as fast as 9 and more."""

COMPARED_TOKENS = (16, 512)
"""The sizes of steps by which two models are compared: of decodes, and with a prompt."""
LITTLE_CONTEXT = 0.25
"""Largest share of attention in a step's time for which the rest of the step is compared with the prior."""

FIXED_SHARE = 0.5
"""Smallest share of the shortest recent step that does not depend on its context."""

_CONTEXT_SCALE = 1e4
_PRODUCT_SCALE = 1e6
_SHORTEST_MS = 1e-6
_LONGEST_MS = 1e9
_PROXIMAL = 1e-3
_SMALLEST_OUTLIER = 0.1
_OUTLIER_MEDIANS = 5.0
_LOST = 0.4


class StepSample(NamedTuple):
    """One measured step."""

    num_tokens: int
    decode_context_tokens: int
    """Sum of the context tokens that the step's decodes read."""
    chunk_context_products: int
    """Sum over prefill chunks of chunk tokens x context tokens."""
    ms: float


class StepTimePieces(NamedTuple):
    """A model's numbers, for callers that evaluate many models in one loop."""

    inner_knots: Sequence[int]
    """Token counts where one piece ends and the next begins; `bisect_right` in them finds a piece."""
    values: Sequence[tuple[int, float, float]]
    """Start, time at the start and slope of each piece; the last piece has no end."""
    decode_context_ms: float
    chunk_context_ms: float


def in_rounds(params: StepTimeParams) -> StepTimeParams:
    """Return the times of rounds: all steps in flight, of which each has an equal part of the tokens.

    A request decodes once in a round of as many steps as there are stages; one alone passes them one after the other,
    with all tokens that it computes in one step.
    """
    if params.stages <= 1 or not params.knots_tokens:
        return params
    steps, alone_ms = params.stages, StepTimeModel.from_params(params).predict_ms(round(params.computed_per_decode))
    return msgspec.structs.replace(
        params,
        knots_tokens=[1, *(steps * knot for knot in params.knots_tokens)],
        knot_ms=[steps * max(ms, alone_ms) for ms in (params.knot_ms[0], *params.knot_ms)],
        stages=1,
    )


def default_knots(max_num_tokens: int) -> list[int]:
    """Return knots that are dense for few tokens, then powers of two up to `max_num_tokens`."""
    knots = list(FEW_TOKENS)
    while knots[-1] * 2 < max_num_tokens and len(knots) < MAX_KNOTS - 1:
        knots.append(knots[-1] * 2)
    return [knot for knot in knots if knot < max_num_tokens] + [max(1, max_num_tokens)]


class StepTimeModel:
    """Predicts a step's duration in milliseconds; `observe` refines it. Not thread-safe."""

    def __init__(self, max_num_tokens: int = 512, knots_tokens: Sequence[int] | None = None) -> None:
        """Make a model that predicts 0. `knots_tokens`: rising token counts; default
        `default_knots(max_num_tokens)`."""
        self._knots = list(knots_tokens) if knots_tokens is not None else default_knots(max_num_tokens)
        _check_knots(self._knots)
        self._knot_ms = [0.0] * len(self._knots)
        self.pieces = StepTimePieces(self._knots[:-1], _pieces(self._knots, self._knot_ms), 0.0, 0.0)
        """The numbers that predictions use."""
        self.tokens_per_decode = self.computed_per_decode = 1.0
        """Tokens that a decode samples and computes in a step, as the engine reported."""
        self.draft_ms = 0.0
        """Time of drafting behind a step with decodes, which predictions do not include, as the engine reported."""
        self.stages = 1
        """Stages that compute different steps at the same time. Predictions are of one stage."""
        self._error_p50 = 0.0
        self._error_p95 = 0.0
        self._num_observed = 0
        self._guessed = False
        # Weights: value at the first knot, rise to each further knot, then the two context coefficients.
        self._weights: Vector = np.zeros(len(self._knots) + 2)
        self._prior: list[StepSample] = []
        self._prior_weights = self._weights
        self._prior_steps = PRIOR_STEPS
        self._evidence: StepEvidence | None = None
        """None until the first step is observed: most models only predict."""
        self._errors: Vector = np.zeros(ERROR_WINDOW)
        self._num_errors = 0
        self._measured_ms = 0.0
        """Time of the smallest step in the measured prior, whatever its scale is now; 0 without one."""
        self._recent_ms: Vector = np.full(ERROR_WINDOW, math.inf)
        """Times of the latest steps of few tokens; infinite for others."""

    @classmethod
    def from_params(cls, params: StepTimeParams) -> StepTimeModel:
        """Return a model that predicts as `params` do and continues to learn from there.

        Values that no fit produces (negative, falling, not finite) are projected to the nearest valid ones. Raises
        `ValueError` if the knots are not rising or the counts differ.
        """
        if len(params.knots_tokens) != len(params.knot_ms):
            raise ValueError(
                f"step time: {len(params.knots_tokens)} knots_tokens but {len(params.knot_ms)} knot_ms; "
                "both lists must have one entry a knot"
            )
        model = cls(knots_tokens=params.knots_tokens or None)
        model._weights[: len(params.knot_ms)] = np.diff(_rising(params.knot_ms), prepend=0.0)
        model._weights[-2] = _finite(params.decode_context_ms) * _CONTEXT_SCALE
        model._weights[-1] = _finite(params.chunk_context_ms) * _PRODUCT_SCALE
        model._num_observed = max(0, params.num_steps_observed)
        model._error_p50 = _finite(params.error_p50)
        model._error_p95 = _finite(params.error_p95)
        model.tokens_per_decode = max(1.0, _finite(params.tokens_per_decode))
        model.computed_per_decode = max(1.0, _finite(params.computed_per_decode))
        model.draft_ms = _finite(params.draft_ms)
        model.stages = max(1, params.stages)
        model._publish()
        return model

    @classmethod
    def from_calibration(
        cls, samples: Iterable[StepSample], max_num_tokens: int | None = None, decode_ms: float = 0.0
    ) -> StepTimeModel:
        """Fit a sweep of measured steps, which becomes the prior of what is learned later.

        Knots are the sweep's token counts, so that every piece has evidence; with `max_num_tokens` they are the default
        knots, whose times are interpolated from the sweep where it has none. `decode_ms`: time that a decode takes
        beyond a prompt token of the sweep, added because steps of few tokens are mostly decodes. Raises `ValueError` if
        no sample is usable.
        """
        usable = [sample for sample in samples if _usable(sample)]
        if not usable:
            raise ValueError("step time: the calibration sweep has no usable sample (tokens > 0, finite ms > 0)")
        sizes = sorted({sample.num_tokens for sample in usable})
        model = cls(knots_tokens=_thin(sizes) if max_num_tokens is None else default_knots(max_num_tokens))
        model._prior = [
            sample._replace(ms=sample.ms + decode_ms * (sample.num_tokens - 1))
            if sample.num_tokens <= FEW_TOKENS[-1]
            else sample
            for sample in usable + _on_lines(usable, model._knots)
        ]
        model._fit_prior()
        model._num_observed = len(usable)
        return model

    @property
    def known(self) -> bool:
        """Whether anything was observed or given; until then predictions are 0."""
        return bool(self._weights.any())

    def predict_ms(self, num_tokens: int, decode_context_tokens: int = 0, chunk_context_products: int = 0) -> float:
        """Predict the milliseconds of a step with `num_tokens` in all; 0 for an empty step. Never negative."""
        if not num_tokens > 0:
            return 0.0
        knots, values, decode_context_ms, chunk_context_ms = self.pieces
        low, low_ms, slope_ms = values[bisect_right(knots, num_tokens)]
        ms = (
            low_ms
            + slope_ms * (num_tokens - low)
            + decode_context_ms * decode_context_tokens
            + chunk_context_ms * chunk_context_products
        )
        return ms if ms > 0 else 0.0

    def relative_to(self, other: StepTimeModel) -> float:
        """Return this model's step times as a multiple of `other`'s: the mean of a small step's and a large one's.

        1 where one of them predicts nothing.
        """
        ratios = [self.predict_ms(size) / ms for size in COMPARED_TOKENS if (ms := other.predict_ms(size)) > 0]
        return math.prod(ratios) ** (1 / len(ratios)) if ratios and self.known else 1.0

    def observe(self, num_tokens: int, decode_context_tokens: int, chunk_context_products: int, ms: float) -> None:
        """Learn from one finished step. Impossible measurements (NaN, zero, negative) are ignored."""
        sample = StepSample(num_tokens, decode_context_tokens, chunk_context_products, ms)
        if not _usable(sample):
            return
        if not self.known:
            self._guess(sample)
        if self._evidence is None:
            self._start_learning()
        predicted_ms = self.predict_ms(num_tokens, decode_context_tokens, chunk_context_products)
        self._recent_ms[self._num_observed % ERROR_WINDOW] = ms if num_tokens <= FEW_TOKENS[-1] else math.inf
        self._record_error(abs(predicted_ms - ms) / ms)
        limit = max(_SMALLEST_OUTLIER, _OUTLIER_MEDIANS * self._error_p50)
        # The more plausible of prediction and measurement scales the row, so that similar rows weigh the same.
        scale_ms = ms if ms > predicted_ms * (1 + limit) else predicted_ms
        features = self._row(sample)
        assert self._evidence is not None
        self._evidence.observe(
            (bisect_right(self._knots, num_tokens), chunk_context_products > 0),
            features / scale_ms,
            ms / scale_ms,
            _trust(abs(ms - predicted_ms) / scale_ms, limit),
        )
        _, _, decode_context_ms, chunk_context_ms = self.pieces
        context_ms = decode_context_ms * decode_context_tokens + chunk_context_ms * chunk_context_products
        if context_ms <= LITTLE_CONTEXT * predicted_ms:
            self._evidence.compare(max(ms - context_ms, ms / 2), float(features[:-2] @ self._prior_weights[:-2]))
        self._num_observed += 1
        if self._num_observed % REFIT_EVERY == 0 or self._num_observed <= REFIT_EVERY:
            self._refit()

    def params(
        self, tokens_per_decode: float = 1.0, computed_per_decode: float = 1.0, draft_ms: float = 0.0
    ) -> StepTimeParams:
        return StepTimeParams(
            knots_tokens=list(self._knots),
            knot_ms=list(self._knot_ms),
            decode_context_ms=self.pieces.decode_context_ms,
            chunk_context_ms=self.pieces.chunk_context_ms,
            num_steps_observed=self._num_observed,
            error_p50=self._error_p50,
            error_p95=self._error_p95,
            tokens_per_decode=tokens_per_decode,
            computed_per_decode=computed_per_decode,
            draft_ms=draft_ms,
            stages=self.stages,
        )

    def _row(self, sample: StepSample) -> Vector:
        """Return the features of one step: 1, its share of each piece, and its scaled context terms."""
        row = np.zeros(len(self._knots) + 2)
        within = bisect_right(self._knots, sample.num_tokens)
        row[: max(1, within)] = 1.0
        piece = min(within, len(self._knots) - 1)
        if piece > 0:
            low, high = self._knots[piece - 1], self._knots[piece]
            row[piece] = (sample.num_tokens - low) / (high - low)
        row[-2] = sample.decode_context_tokens / _CONTEXT_SCALE
        row[-1] = sample.chunk_context_products / _PRODUCT_SCALE
        return row

    def _guess(self, first: StepSample) -> None:
        """Make a prior from the first step: half of its time is a fixed cost, half grows with the tokens."""
        slope_ms = first.ms / (2 * max(first.num_tokens, 32))
        self._guessed, self._prior_steps = True, GUESSED_STEPS
        self._weights[0] = first.ms / 2
        self._weights[1:-2] = slope_ms * np.diff(self._knots)
        self._publish()

    def _start_learning(self) -> None:
        """Start the evidence; the prior is the measured sweep or, without one, the current predictions."""
        self._prior = self._prior or [
            StepSample(knot, 0, 0, ms) for knot, ms in zip(self._knots, self._knot_ms, strict=True) if ms > 0
        ]
        self._prior_weights = self._weights.copy()
        self._measured_ms = 0.0 if self._guessed else float(self._weights[0])
        self._evidence = self._without_steps()

    def _without_steps(self) -> StepEvidence:
        rows = np.array([self._row(sample) for sample in self._prior]).reshape(-1, self._weights.size)
        return StepEvidence(rows, np.array([sample.ms for sample in self._prior]), self._prior_steps)

    def _fit_prior(self) -> None:
        ms = np.array([sample.ms for sample in self._prior])
        rows = np.array([self._row(sample) for sample in self._prior]) / ms[:, None]
        normal = rows.T @ rows + np.diag(_PROXIMAL * np.square(rows).max(axis=0) + 1e-12)
        self._weights = _nonnegative(normal, rows.sum(axis=0), self._weights)
        self._publish()

    def _record_error(self, error: float) -> None:
        self._errors[self._num_errors % ERROR_WINDOW] = error
        self._num_errors += 1

    def _refit(self) -> None:
        assert self._evidence is not None
        anchor = _PROXIMAL * self._evidence.leverage
        anchor[anchor == 0.0] = 1.0
        normal, target = self._evidence.normal_equations()
        normal[np.diag_indices_from(normal)] += anchor
        self._weights = self._above_floor(normal, target + anchor * self._weights)
        self._publish()
        recent = np.sort(self._errors[: min(self._num_errors, ERROR_WINDOW)])
        self._error_p50 = float(recent[recent.size // 2])
        self._error_p95 = float(recent[min(recent.size - 1, recent.size * 95 // 100)])
        if recent.size >= REFIT_EVERY and (self._error_p50 > _LOST or self._guessed):
            self._forget()

    def _above_floor(self, normal: Vector, target: Vector) -> Vector:
        """Solve the normal equations with at least `FIXED_SHARE` of the shortest recent step as the fixed part.

        The prior's smallest step bounds the floor, where attention is most of every step. Without a floor, a prior
        whose sizes were measured while the machine was unevenly slow can push the fixed part to 0: contexts explain the
        steps as well, and then no step has the little context that would let it scale the prior.
        """
        shortest_ms = float(self._recent_ms.min())
        floor = np.zeros_like(self._weights)
        if math.isfinite(shortest_ms):
            floor[0] = FIXED_SHARE * min(shortest_ms, self._measured_ms)
        above = _nonnegative(normal, target - normal @ floor, np.maximum(self._weights - floor, 0.0))
        return above + floor

    def _forget(self) -> None:
        """Start the evidence anew, with the current weights as the start and the prior scaled to the engine.

        Called either when most predictions are far off, so that the evidence describes other behaviour, or when the
        evidence was scaled by a first guess, under which a much too short first step would outweigh hundreds of others.
        """
        assert self._evidence is not None
        scale = self._evidence.scale
        self._guessed, self._prior_steps = False, GUESSED_STEPS
        self._prior = [sample._replace(ms=sample.ms * scale) for sample in self._prior]
        self._prior_weights = self._prior_weights * scale
        self._evidence = self._without_steps()
        self._num_errors = 0

    def _publish(self) -> None:
        self._knot_ms = [float(ms) for ms in np.cumsum(self._weights[:-2])]
        self.pieces = StepTimePieces(
            self._knots[:-1],
            _pieces(self._knots, self._knot_ms),
            float(self._weights[-2]) / _CONTEXT_SCALE,
            float(self._weights[-1]) / _PRODUCT_SCALE,
        )


def _pieces(knots: Sequence[int], knot_ms: Sequence[float]) -> list[tuple[int, float, float]]:
    pieces = [(knots[0], knot_ms[0], 0.0)]
    for (low, high), (low_ms, high_ms) in zip(itertools.pairwise(knots), itertools.pairwise(knot_ms), strict=True):
        pieces.append((low, low_ms, (high_ms - low_ms) / (high - low)))
    return pieces


def _nonnegative(normal: Vector, target: Vector, start: Vector) -> Vector:
    """Minimize wᵀNw/2 - tᵀw over w >= 0, N positive definite, from a feasible start.

    The active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974, ch. 23) on normal equations.
    """
    weights = start.copy()
    free = weights > 0
    for _ in range(4 * weights.size):
        index = np.flatnonzero(free)
        trial = np.zeros_like(weights)
        if index.size:
            trial[index] = np.linalg.solve(normal[np.ix_(index, index)], target[index])
        blocked = index[trial[index] <= 0]
        if blocked.size:
            step = float(np.min(weights[blocked] / np.maximum(weights[blocked] - trial[blocked], 1e-300)))
            weights = np.maximum(weights + step * (trial - weights), 0.0)
            free &= weights > 1e-15
            weights[~free] = 0.0
            continue
        weights = trial
        gain = np.where(free, -np.inf, target - normal @ weights)
        best = int(np.argmax(gain))
        if gain[best] <= 1e-9 * (1.0 + abs(float(target[best]))):
            return weights
        free[best] = True
    return weights


def _trust(relative_residual: float, limit: float) -> float:
    """Return a step's weight: 1 up to `limit`, falling with the square beyond; `limit` is a multiple of the median
    error.

    If most recent steps disagree, the median itself rises, so a real change is followed.
    """
    return 1.0 if relative_residual <= limit else (limit / relative_residual) ** 2


def _usable(sample: StepSample) -> bool:
    return (
        sample.num_tokens > 0
        and _SHORTEST_MS <= sample.ms <= _LONGEST_MS
        and 0 <= sample.decode_context_tokens < math.inf
        and 0 <= sample.chunk_context_products < math.inf
    )


def _check_knots(knots: list[int]) -> None:
    rising = all(low < high for low, high in itertools.pairwise(knots))
    if not knots or knots[0] < 1 or not rising:
        raise ValueError(f"step time: knots_tokens must rise from at least 1, got {knots[:20]}")


def _thin(sizes: list[int]) -> list[int]:
    """Return at most `MAX_KNOTS` of the sorted sizes, including the first and the last."""
    if len(sizes) <= MAX_KNOTS:
        return sizes
    picks = np.unique(np.linspace(0, len(sizes) - 1, MAX_KNOTS).round().astype(int))
    return [sizes[pick] for pick in picks]


def _on_lines(samples: Sequence[StepSample], sizes: Iterable[int]) -> list[StepSample]:
    """Return samples of other sizes, interpolated between measured ones or extrapolated from the two largest."""
    by_size = {sample.num_tokens: sample.ms for sample in samples}
    known = sorted(by_size)
    slope_ms = by_size[known[-1]] / known[-1]
    if len(known) > 1:
        slope_ms = max(0.0, by_size[known[-1]] - by_size[known[-2]]) / (known[-1] - known[-2])
    return [
        StepSample(
            size,
            0,
            0,
            float(np.interp(size, known, [by_size[each] for each in known])) + slope_ms * max(0, size - known[-1]),
        )
        for size in sizes
        if size not in by_size
    ]


def _rising(values: Sequence[float]) -> Vector:
    return np.maximum.accumulate(np.array([_finite(value) for value in values], dtype=np.float64))


def _finite(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0
