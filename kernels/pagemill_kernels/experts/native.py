"""All experts of a layer in one C++ call: rows sorted by expert, each expert's weights read once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from pagemill_kernels.cpu import launch, library
from pagemill_kernels.experts.parts import ExpertParts, FusedExperts, Gate
from pagemill_kernels.experts.reference import PlainExperts
from pagemill_kernels.linear.native import NativeLinear


class NativeExperts:
    def __init__(self, ups: Sequence[NativeLinear], downs: Sequence[NativeLinear], gate: Gate) -> None:
        self._kept = ups, downs
        """What the addresses below point to."""
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
        self._call = launch.native().pagemill_experts

    def weights(self, router: NativeLinear, top_k: int, renormalized: bool) -> library.ExpertsWeights:
        """With their router, as layer.cpp takes them; addresses are those of this object and of `router`."""
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
        )

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for linears in self._kept for each in linears)

    def add_to(self, out: Tensor, x: Tensor, chosen: Tensor, weights: Tensor) -> None:
        num_tokens, top_k = chosen.shape
        if x.shape != (num_tokens, self._hidden_size) or x.dtype != torch.float32 or x.stride(1) != 1:
            raise ValueError(
                f"experts: x is {x.dtype} {list(x.shape)}, float32 [tokens, {self._hidden_size}] is needed"
            )
        chosen, weights = chosen.contiguous(), weights.contiguous()
        self._call(
            *self._addresses,
            self._num_experts,
            x.data_ptr(),
            num_tokens,
            x.stride(0),
            chosen.data_ptr(),
            weights.data_ptr(),
            top_k,
            self._activation,
            self._limit,
            out.data_ptr(),
            launch.num_threads(),
        )


def route(logits: Tensor, top_k: int, renormalized: bool) -> tuple[Tensor, Tensor]:
    """As in `reference`, also where logits are equal."""
    logits = logits.float().contiguous()
    num_tokens, num_experts = logits.shape
    chosen, weights = torch.empty(num_tokens, top_k, dtype=torch.int64), torch.empty(num_tokens, top_k)
    launch.native().pagemill_route(
        logits.data_ptr(), num_tokens, num_experts, top_k, renormalized, chosen.data_ptr(), weights.data_ptr()
    )
    return chosen, weights


def pack_experts(experts: Sequence[ExpertParts], gate: Gate) -> FusedExperts:
    """The reference, where the weights are not our own."""
    ups = [each.up for each in experts if isinstance(each.up, NativeLinear)]
    downs = [each.down for each in experts if isinstance(each.down, NativeLinear)]
    if not len(ups) == len(downs) == len(experts):
        return PlainExperts(experts, gate)
    return NativeExperts(ups, downs, gate)
