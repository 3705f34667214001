"""All experts of a layer in one C++ call: rows are sorted by expert, and each expert's weights are read once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from pagemill_kernels import arrays
from pagemill_kernels.adapters.native import NativeAdapterRows
from pagemill_kernels.arrays import Array, address, optional_address
from pagemill_kernels.cpu import launch, library
from pagemill_kernels.experts.parts import Gate, Gating
from pagemill_kernels.linear.native import NativeLinear


class NativeExperts:
    def __init__(self, ups: Sequence[NativeLinear], downs: Sequence[NativeLinear], gate: Gate) -> None:
        self._kept = ups, downs
        """Keeps the objects alive that the addresses below point to."""
        self._hidden_size = ups[0].in_features
        self._num_experts = len(ups)
        self._addresses = (
            launch.addresses(each.address for each in ups),
            launch.addresses(each.bias_address for each in ups),
            launch.addresses(each.address for each in downs),
            launch.addresses(each.bias_address for each in downs),
        )
        self._activation = library.ACTIVATIONS.index(gate.activation)
        self._limit = gate.limit or 0.0
        self._gated = gate.gated
        self._call = launch.native().pagemill_experts

    def weights(
        self, router: NativeLinear, top_k: int, renormalized: bool, gating: library.GroupChoice | None = None
    ) -> library.ExpertsWeights:
        """Return the C structure for layer.cpp, with the router.

        Its addresses are those of this object, of `router` and of `gating`.
        """
        ups, up_biases, downs, down_biases = (ctypes.addressof(each) for each in self._addresses)
        return library.ExpertsWeights(
            router=router.address,
            router_bias=router.bias_address,
            ups=ups,
            up_biases=up_biases,
            downs=downs,
            down_biases=down_biases,
            num_experts=self._num_experts,
            top_k=top_k,
            renormalized=renormalized,
            activation=self._activation,
            limit=self._limit,
            gated=self._gated,
            gating=None if gating is None else ctypes.addressof(gating),
        )

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for linears in self._kept for each in linears)

    def add_to(
        self,
        out: Array,
        x: Array,
        chosen: Array,
        weights: Array,
        adapters: NativeAdapterRows | None = None,
        first_linear: int = 0,
    ) -> None:
        """Add the experts' outputs. `adapters`: of the tokens. `first_linear`: number of the first expert's `up`."""
        num_tokens, top_k = chosen.shape
        if x.shape != (num_tokens, self._hidden_size) or x.dtype != np.float32 or x.strides[1] != x.itemsize:
            raise ValueError(
                f"experts: x is {x.dtype} {list(x.shape)}, float32 [tokens, {self._hidden_size}] is needed"
            )
        chosen, weights = np.ascontiguousarray(chosen), np.ascontiguousarray(weights)
        self._call(
            *self._addresses,
            self._num_experts,
            address(x),
            num_tokens,
            launch.row_stride(x),
            address(chosen),
            address(weights),
            top_k,
            self._activation,
            self._gated,
            self._limit,
            0 if adapters is None else adapters.address,
            first_linear,
            address(out),
            launch.num_threads(),
        )


def gating_of(gating: Gating, bias: Array | None) -> library.GroupChoice:
    """Return the C structure, which has the address of `bias`, float32 [experts]."""
    return library.GroupChoice(
        bias=optional_address(bias),
        num_groups=gating.num_groups,
        top_groups=gating.top_groups,
        best_of_group=gating.best_of_group,
        scale=gating.scale,
        sigmoid=gating.scores == "sigmoid",
    )


def route_by_groups(
    logits: Array, top_k: int, renormalized: bool, gating: Gating, bias: Array | None
) -> tuple[Array, Array]:
    """Compute `reference.route_by_groups`, with the same choice among equal scores."""
    logits = np.ascontiguousarray(arrays.widened(logits))
    num_tokens, num_experts = logits.shape
    chosen, weights = np.empty((num_tokens, top_k), dtype=np.int64), np.empty((num_tokens, top_k), dtype=np.float32)
    launch.native().pagemill_route_by_groups(
        address(logits),
        num_tokens,
        num_experts,
        top_k,
        renormalized,
        gating_of(gating, bias),
        address(chosen),
        address(weights),
    )
    return chosen, weights


def add_gated(out: Array, x: Array, gates: Array) -> None:
    """Add x * sigmoid(gates) to out in place. All float32; x, out: contiguous [tokens, hidden]; gates: [tokens, 1]."""
    gates = np.ascontiguousarray(gates)
    launch.native().pagemill_add_gated(address(x), *x.shape, address(gates), address(out), launch.num_threads())


def route(logits: Array, top_k: int, renormalized: bool) -> tuple[Array, Array]:
    """Compute `reference.route`, with the same choice among equal logits."""
    logits = np.ascontiguousarray(arrays.widened(logits))
    num_tokens, num_experts = logits.shape
    chosen, weights = np.empty((num_tokens, top_k), dtype=np.int64), np.empty((num_tokens, top_k), dtype=np.float32)
    launch.native().pagemill_route(
        address(logits), num_tokens, num_experts, top_k, renormalized, address(chosen), address(weights)
    )
    return chosen, weights
