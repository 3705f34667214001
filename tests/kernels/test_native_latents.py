"""Attention over latents in the native layers' call equals its formula, for many heads, sizes and types of caches."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from pagemill_kernels import arrays
from pagemill_kernels.adapters.native import NativeAdapterRows, NativeAdapters, PackedAdapter, PartOfB
from pagemill_kernels.cpu import launch, library
from pagemill_kernels.decoder_layer.native import CacheAddresses, NativeLayers
from pagemill_kernels.decoder_layer.parts import LatentParts, LayerParts, MLPParts, NormParts
from pagemill_kernels.kv_store import kinds
from pagemill_kernels.linear.native import pack_linear
from pagemill_kernels.paged_attention.batch import AttentionBatch
from pagemill_kernels.paged_attention.native import plan_attention, plan_invariant_attention

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")

HIDDEN, BLOCK_SIZE, EPS = 32, 16, 1e-6
LATENT_UP = 2
"""Number of the linear layer from latents to keys and values, where queries are not compressed."""


class Sizes(NamedTuple):
    heads: int
    latent: int
    shared: int
    key: int
    value: int


SMALL, ODD, WIDE = Sizes(4, 32, 16, 16, 16), Sizes(3, 24, 6, 10, 7), Sizes(64, 512, 64, 24, 20)


class Case:
    """Random weights and hidden states of one request."""

    def __init__(self, sizes: Sizes, num_tokens: int) -> None:
        rng, s = np.random.default_rng(3), sizes

        def drawn(rows: int, columns: int) -> Any:
            return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(columns**-0.5)

        self.sizes, self.num_tokens = sizes, num_tokens
        self.hidden = rng.standard_normal((num_tokens, HIDDEN), dtype=np.float32)
        self.query, self.down = drawn(s.heads * (s.key + s.shared), HIDDEN), drawn(s.latent + s.shared, HIDDEN)
        self.up = drawn(s.heads * (s.key + s.value), s.latent).reshape(s.heads, -1, s.latent)
        self.output, self.norm = drawn(HIDDEN, s.heads * s.value), rng.random(s.latent, dtype=np.float32) + 1
        angles = np.outer(np.arange(num_tokens), 0.3 ** np.arange(s.shared // 2)).astype(np.float32)
        self.cos, self.sin = np.cos(angles), np.sin(angles)

    @property
    def scale(self) -> float:
        return float((self.sizes.key + self.sizes.shared) ** -0.5) * 2

    def parts(self) -> LayerParts:
        s, nothing = self.sizes, np.zeros((2 * HIDDEN, HIDDEN), dtype=np.float32)
        latent = LatentParts(
            query_down=None,
            query_norm=None,
            query=pack_linear(self.query, None),
            down=pack_linear(self.down, None),
            latent_norm=NormParts(self.norm, None, EPS, centered=False),
            keys=tuple(pack_linear(head[: s.key].T, None) for head in self.up),
            values=tuple(pack_linear(head[s.key :], None) for head in self.up),
            shared_size=s.shared,
        )
        return LayerParts(
            qkv=latent,
            output=pack_linear(self.output, None),
            mlp=MLPParts(pack_linear(nothing, None), pack_linear(nothing[:HIDDEN], None), "silu", True, None),
            num_heads=s.heads,
            num_kv_heads=1,
            head_dim=s.latent + s.shared,
            scale=self.scale,
            attention_norm=None,
            mlp_norm=None,
            rotation=0,
            first_mlp=4,
        )

    def expected(self, delta: Any = 0.0) -> Any:
        """Compute keys and values of all heads and attend with them. `delta`: added to `up`."""
        s, n = self.sizes, self.num_tokens
        queries = (self.hidden @ self.query.T).reshape(n, s.heads, -1)
        plain, turning = queries[..., : s.key], self._rotated(queries[..., s.key :])
        latents, shared = np.split(self.hidden @ self.down.T, [s.latent], axis=1)
        latents = latents / np.sqrt(np.square(latents).mean(1, keepdims=True) + EPS) * self.norm
        both = np.einsum("tl,hkl->thk", latents, self.up + delta)
        scores = np.einsum("qhk,thk->hqt", plain, both[..., : s.key])
        scores += np.einsum("qhk,tk->hqt", turning, self._rotated(shared[:, None])[:, 0])
        scores = np.where(np.tri(n, dtype=bool), scores * self.scale, -np.inf)
        weights = np.exp(scores - scores.max(2, keepdims=True))
        weights /= weights.sum(2, keepdims=True)
        values = np.einsum("hqt,thv->qhv", weights, both[..., s.key :])
        return self.hidden + values.reshape(n, -1) @ self.output.T

    def _rotated(self, x: Any) -> Any:
        first, second = np.split(x, 2, axis=-1)
        cos, sin = self.cos[:, None], self.sin[:, None]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def computed(
        self,
        counts: list[int],
        kind: kinds.KVType = "float32",
        plan: Any = plan_attention,
        adapters: NativeAdapters | None = None,
    ) -> Any:
        """Compute the request's tokens in chunks of these sizes."""
        s, layers, found, start = self.sizes, NativeLayers([self.parts()]), [], 0
        num_blocks = -(-self.num_tokens // BLOCK_SIZE)
        shape = (num_blocks + 3, 1, BLOCK_SIZE, kinds.token_width(kind, s.latent + s.shared))
        cache = np.zeros(shape, dtype=kinds.NUMPY_TYPES[kind])
        table = np.arange(num_blocks, dtype=np.int32)[::-1].copy()
        for count in counts:
            at = np.arange(start, start + count)
            batch = AttentionBatch(np.array([0, count]), np.array([start + count]), table[None], BLOCK_SIZE, num_blocks)
            slots = table[at // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + at % BLOCK_SIZE
            hidden = self.hidden[at].copy()
            rows: NativeAdapterRows | None = None if adapters is None else adapters.rows(np.zeros(count, np.int32))
            turns = [(np.ascontiguousarray(self.cos[at]), np.ascontiguousarray(self.sin[at]))]
            layers(hidden, {None: plan(batch, None)}, turns, CacheAddresses.of([cache]), {None: slots}, rows)
            found.append(hidden)
            start += count
        return np.concatenate(found)


@pytest.mark.parametrize(
    ("sizes", "counts"), [(SMALL, [70, 1, 1, 9]), (ODD, [1, 40, 3]), (WIDE, [70, 1])], ids=("small", "odd", "wide")
)
@pytest.mark.parametrize("threads", [1, 3])
def test_attention_over_latents_equals_that_over_their_keys_and_values(
    sizes: Sizes, counts: list[int], threads: int
) -> None:
    case = Case(sizes, sum(counts))
    before = launch.num_threads()
    launch.set_num_threads(threads)
    try:
        found = case.computed(counts)
    finally:
        launch.set_num_threads(before)
    np.testing.assert_allclose(found, case.expected(), atol=2e-5)


@pytest.mark.parametrize(("kind", "tolerance"), [("bfloat16", 0.02), ("int8", 0.1)])
@pytest.mark.parametrize("sizes", [SMALL, ODD], ids=("small", "odd"))
def test_smaller_types_of_cache_stay_close(kind: kinds.KVType, tolerance: float, sizes: Sizes) -> None:
    case = Case(sizes, 45)
    expected = case.expected()
    found = case.computed([40, 5], kind)
    assert 1e-5 < np.abs(found - expected).max() < tolerance


def test_a_token_has_the_same_bits_in_any_chunk() -> None:
    case = Case(SMALL, 60)
    whole = case.computed([60], plan=plan_invariant_attention)
    for counts in ([1] * 60, [7, 53], [50, 1, 9]):
        assert np.array_equal(case.computed(counts, plan=plan_invariant_attention), whole)


def test_an_adapter_of_keys_and_values_adds_what_its_product_does() -> None:
    case, rng = Case(ODD, 30), np.random.default_rng(8)
    s = case.sizes
    rows = s.heads * (s.key + s.value)

    def rounded(*shape: int) -> Any:
        return arrays.widened(arrays.rounded(rng.standard_normal(shape, dtype=np.float32) * np.float32(0.3)))

    a, b = rounded(5, s.latent), rounded(rows, 5)
    adapters = NativeAdapters({0: {LATENT_UP: PackedAdapter(a, [PartOfB(0, 0, b)])}}, 8)
    delta = (b @ a).reshape(s.heads, -1, s.latent)
    np.testing.assert_allclose(case.computed([25, 5], adapters=adapters), case.expected(delta), atol=2e-5)
    assert np.abs(case.expected(delta) - case.expected()).max() > 0.01
