"""The specified random numbers: fixed values, uniformity, independence, and sampled frequencies."""

from __future__ import annotations

import math

import numpy as np
import torch

from pagemill_execution.sampling.rows import SamplingRows
from pagemill_execution.sampling.sampler import sample
from pagemill_execution.step import AdmittedSequence
from pagemill_kernels.sampling import arithmetic, randomness
from pagemill_protocol.request.sampling import SamplingParams

MASK64, MASK32 = 2**64 - 1, 2**32 - 1


def mix64(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def mix32(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK32
    return x ^ (x >> 16)


def specified_gumbel(seed: int, choice: int, position: int, token_id: int) -> float:
    """Compute the specification with plain integers."""
    golden = 0x9E3779B97F4A7C15
    key = mix64((seed + golden) & MASK64)
    key = mix64((key + choice + golden) & MASK64)
    key = mix64((key + position + golden) & MASK64)
    bits = mix32(mix32((token_id * 0x9E3779B1 + (key & MASK32)) & MASK32) ^ (key >> 32))
    u = min((bits + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -math.log(-math.log1p(-u))


def noise(seed: int, choice: int, position: int, token_ids: np.ndarray) -> np.ndarray:
    key = randomness.keys(np.array([seed], dtype=np.uint64), np.array([choice]), np.array([position]))
    return randomness.gumbel(key, token_ids)


def uniforms(gumbel: np.ndarray) -> np.ndarray:
    return np.exp(-np.exp(-gumbel.astype(np.float64)))


def test_the_noise_follows_the_specification() -> None:
    for seed, choice, position in [(0, 0, 0), (2**64 - 1, 127, 8191), (12345, 3, 17)]:
        tokens = np.array([0, 1, 2, 49151, 151935])
        expected = [specified_gumbel(seed, choice, position, int(token)) for token in tokens]
        np.testing.assert_allclose(noise(seed, choice, position, tokens), expected, rtol=2e-5, atol=2e-6)


def test_the_specification_never_changes() -> None:
    # Another version of the engine may continue a stream, so these values are part of the protocol.
    values = noise(42, 1, 7, np.arange(4))
    np.testing.assert_allclose(values, [specified_gumbel(42, 1, 7, token) for token in range(4)], rtol=2e-5)
    assert mix64(1) == 0x5692161D100B05E5
    assert mix32(1) == 0x514E28B7


def test_noise_is_uniform_within_a_row() -> None:
    values = uniforms(noise(1, 0, 0, np.arange(200_000)))
    counts, _ = np.histogram(values, bins=100, range=(0, 1))
    chi_square = float(((counts - 2000) ** 2 / 2000).sum())
    # 99 degrees of freedom: mean 99, standard deviation 14.
    assert 50 < chi_square < 165


def test_neighbouring_tokens_positions_seeds_and_choices_are_uncorrelated() -> None:
    tokens = np.arange(100_000)
    base = uniforms(noise(1, 0, 0, tokens))
    others = [
        base[np.roll(tokens, 1)],
        uniforms(noise(1, 0, 1, tokens)),
        uniforms(noise(2, 0, 0, tokens)),
        uniforms(noise(1, 1, 0, tokens)),
    ]
    for other in others:
        correlation = float(np.corrcoef(base, other)[0, 1])
        assert abs(correlation) < 5 / math.sqrt(len(tokens))


def test_noise_is_bounded() -> None:
    extremes = [-math.log(-math.log1p(-u)) for u in (0.5 * 2.0**-32, 1 - 2.0**-24)]
    assert abs(extremes[0]) + abs(extremes[1]) < arithmetic.REACH


def test_sampled_frequencies_equal_the_softmax() -> None:
    num_draws, temperature = 40_000, 0.8
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0, 1.5, 0.3, -0.2])
    rows = SamplingRows(1, len(logits))
    params = SamplingParams(temperature=temperature, seed=9)
    rows.admit(0, AdmittedSequence("r", [0], 1, 0, [], params, 0, 9))
    drawn = np.concatenate(
        [
            sample(
                logits.repeat(8000, 1).numpy(), rows, np.zeros(8000, dtype=np.int64), np.arange(start, start + 8000)
            ).token_ids
            for start in range(0, num_draws, 8000)
        ]
    )
    expected = (logits / temperature).softmax(-1).double().numpy() * num_draws
    counts = np.bincount(drawn, minlength=len(logits))
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    # 7 degrees of freedom: P(chi-square > 24.3) = 0.001.
    assert chi_square < 24.3
