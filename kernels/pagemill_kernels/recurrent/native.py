"""Recurrent layers over native kernels, in float32. Shapes are those of `reference.py`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pagemill_kernels import arrays
from pagemill_kernels.arrays import Array, address, optional_address
from pagemill_kernels.cpu import launch
from pagemill_kernels.cpu.library import ConvolutionArgs, DeltaRuleArgs
from pagemill_kernels.recurrent.batch import StateBatch


class NativeStates:
    """The rows of a step in the form of the kernels."""

    def __init__(self, batch: StateBatch) -> None:
        self.block_size, self.num_requests = batch.block_size, len(batch.rows)
        blocks, slots = np.ascontiguousarray(batch.writes[:, 1:].T)
        self._arrays = {
            "rows": batch.rows,
            "starts": batch.query_start_loc,
            "sources": batch.sources,
            "num_logged": batch.num_logged,
            "write_starts": batch.write_starts,
            "write_blocks": blocks,
            "write_slots": slots,
        }
        self._addresses = {name: address(array) for name, array in self._arrays.items()}

    def arguments(self, x: Array, slots: Array) -> Mapping[str, int]:
        """Return the arguments of a layer whose states, or windows, are `slots`."""
        return {
            **self._addresses,
            "num_requests": self.num_requests,
            "block_size": self.block_size,
            "slot_stride": launch.row_stride(slots),
            "x_stride": launch.row_stride(x),
            "num_threads": launch.num_threads(),
        }


def causal_convolution(
    x: Array, taps: Array, bias: Array | None, activated: bool, windows: Array, inputs: Array, rows: NativeStates
) -> Array:
    x = launch.rows(x)
    out = arrays.empty(x.shape)
    arguments = ConvolutionArgs(
        x=address(x),
        taps=address(taps),
        bias=optional_address(bias),
        activated=activated,
        windows=address(windows),
        inputs=address(inputs),
        out=address(out),
        channels=x.shape[1],
        width=len(taps),
        **rows.arguments(x, windows),
    )
    launch.native().pagemill_causal_convolution(arguments)
    return out


def delta_rule(
    x: Array,
    rates: Array,
    gates: Array,
    decays: Array,
    biases: Array,
    norm: Array,
    eps: float,
    states: Array,
    log: Array,
    rows: NativeStates,
) -> Array:
    x, gates, rates = launch.rows(x), launch.rows(gates), np.ascontiguousarray(rates)
    num_values, key_dim, value_dim = states.shape[1:]
    out = arrays.empty((len(x), num_values, value_dim))
    arguments = DeltaRuleArgs(
        x=address(x),
        rates=address(rates),
        gates=address(gates),
        decays=address(decays),
        biases=address(biases),
        norm=address(norm),
        states=address(states),
        log=address(log),
        out=address(out),
        gate_stride=launch.row_stride(gates),
        log_stride=launch.row_stride(log),
        log_values=log.shape[2],
        num_keys=(x.shape[1] - num_values * value_dim) // (2 * key_dim),
        num_values=num_values,
        key_dim=key_dim,
        value_dim=value_dim,
        eps=eps,
        **rows.arguments(x, states),
    )
    launch.native().pagemill_delta_rule(arguments)
    return out
