"""Recurrent layers over native kernels, in float32. Shapes are those of `reference.py` and `state_space.py`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pagemill_kernels import arrays
from pagemill_kernels.arrays import Array, address, optional_address
from pagemill_kernels.cpu import launch
from pagemill_kernels.cpu.state_structures import ConvolutionArgs, RecurrenceArgs, RecurrentRows
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
        for name, counts in (("num_accepted", batch.num_accepted), ("num_proposed", batch.num_proposed)):
            if counts is not None:
                self._arrays[name] = counts
        self._addresses = {name: address(array) for name, array in self._arrays.items()}

    @property
    def step_rows(self) -> RecurrentRows:
        """Return the rows for the call of all layers, which adds what a layer has of its own."""
        own = {"num_requests": self.num_requests, "block_size": self.block_size, "num_threads": launch.num_threads()}
        return RecurrentRows(**self._addresses, **own)

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
        input_stride=launch.row_stride(inputs),
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
    rate_scale: float,
    states: Array,
    log: Array,
    rows: NativeStates,
) -> Array:
    x, rates = launch.rows(x), np.ascontiguousarray(rates)
    num_values, _, value_dim = states.shape[1:]
    of_keys = (x.shape[1] - num_values * value_dim) // 2
    return _recurrence(
        (x[:, :of_keys], x[:, of_keys : 2 * of_keys], x[:, 2 * of_keys :]),
        rates[:, num_values:],
        gates,
        states,
        log,
        rows,
        rates=address(rates),
        rate_stride=launch.row_stride(rates),
        decays=address(decays),
        biases=address(biases),
        decay_values=1,
        norm=address(norm),
        norm_size=value_dim,
        eps=eps,
        most_step=np.inf,
        rate_scale=rate_scale,
    )


def channel_delta_rule(
    x: Array,
    rates: Array,
    steps: Array,
    gates: Array,
    decays: Array,
    biases: Array,
    norm: Array,
    eps: float,
    rate_scale: float,
    states: Array,
    log: Array,
    rows: NativeStates,
) -> Array:
    x, rates = launch.rows(x), launch.rows(rates)
    num_values, key_dim, value_dim = states.shape[1:]
    of_keys = num_values * key_dim
    return _recurrence(
        (x[:, :of_keys], x[:, of_keys : 2 * of_keys], x[:, 2 * of_keys :]),
        launch.rows(steps),
        gates,
        states,
        log,
        rows,
        rates=address(rates),
        rate_stride=launch.row_stride(rates),
        decays=address(decays),
        biases=address(biases),
        decay_values=key_dim,
        norm=address(norm),
        norm_size=value_dim,
        eps=eps,
        most_step=np.inf,
        rate_scale=rate_scale,
        sigmoid_gates=True,
    )


def state_space(
    x: Array,
    steps: Array,
    gates: Array | None,
    decays: Array,
    biases: Array,
    skips: Array,
    norm: Array | None,
    norm_size: int,
    eps: float,
    gates_first: bool,
    step_limits: tuple[float, float],
    states: Array,
    log: Array,
    rows: NativeStates,
) -> Array:
    x = launch.rows(x)
    num_values, _, value_dim = states.shape[1:]
    of_values = num_values * value_dim
    of_keys = (x.shape[1] - of_values) // 2
    return _recurrence(
        (x[:, of_values + of_keys :], x[:, of_values : of_values + of_keys], x[:, :of_values]),
        launch.rows(steps),
        gates,
        states,
        log,
        rows,
        decays=address(decays),
        biases=address(biases),
        decay_values=1,
        skips=address(skips),
        norm=optional_address(norm),
        norm_size=norm_size,
        norm_stride=norm_size,
        eps=eps,
        least_step=step_limits[0],
        most_step=step_limits[1],
        gates_first=gates_first,
    )


def _recurrence(
    x: tuple[Array, Array, Array],
    steps: Array,
    gates: Array | None,
    states: Array,
    log: Array,
    rows: NativeStates,
    **others: float,
) -> Array:
    """Compute a recurrence. `x`: queries, keys and values, which are parts of the same rows."""
    queries, keys, values = x
    gates = None if gates is None else launch.rows(gates)
    num_values, key_dim, value_dim = states.shape[1:]
    out = arrays.empty((len(values), num_values, value_dim))
    arguments = RecurrenceArgs(
        queries=address(queries),
        keys=address(keys),
        values=address(values),
        steps=address(steps),
        gates=optional_address(gates),
        states=address(states),
        log=address(log),
        out=address(out),
        step_stride=launch.row_stride(steps),
        gate_stride=0 if gates is None else launch.row_stride(gates),
        log_stride=launch.row_stride(log),
        log_values=log.shape[2],
        num_keys=queries.shape[1] // key_dim,
        num_values=num_values,
        key_dim=key_dim,
        value_dim=value_dim,
        **others,
        **rows.arguments(values, states),
    )
    launch.native().pagemill_recurrence(arguments)
    return out
