"""Launches the kernels of recurrent layers: one launch for a step of one token for each request, four for others.

The rows of a step are tensors on the device, so that recorded launches serve every step of the same shape. Logs and
last inputs are rings there (`triton_body`), and need room for at least one proposed token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from pagemill_kernels.gpu import launch
from pagemill_kernels.recurrent import triton_body
from pagemill_kernels.recurrent.batch import StateBatch
from pagemill_kernels.recurrent.chunks import triton_body as chunks_body
from pagemill_kernels.recurrent.device_batch import StepStates
from pagemill_kernels.recurrent.reference import Convolution, DeltaHeads
from pagemill_kernels.recurrent.state_space import StateSpaceHeads

CHANNEL_BLOCK, TOKEN_BLOCK = 128, 16
STEP_KEYS, CHUNK_VALUES = 32, 32
"""Channels of keys, or values of a head, that a program holds of a state at a time."""


class TritonStates(NamedTuple):
    """The rows of a step."""

    query_start_loc: Tensor
    """int32 [requests + 1]."""
    states: StepStates
    token_requests: Tensor
    """int32 [tokens]: request of each token."""
    is_step: bool
    """Whether no request has more than one token."""

    def arguments(self) -> dict[str, Any]:
        states = self.states
        return {
            "query_start_ptr": self.query_start_loc,
            "requests_ptr": states.requests,
            "num_requests": states.requests.shape[1],
            "write_starts_ptr": states.write_starts,
            "writes_ptr": states.writes,
        }


def plan_states(batch: StateBatch) -> TritonStates:
    """Upload the rows of a step."""
    if batch.num_computed is None:
        raise ValueError("recurrent layers: the number of computed tokens of each row is needed on a device")
    starts, on = batch.query_start_loc, launch.device()
    num_tokens, num_requests = int(starts[-1]), len(batch.rows)
    states = StepStates.empty(num_requests, len(batch.writes), on)
    states.fill(batch)
    uploaded = launch.upload(starts.astype(np.int32), on)
    longest = int(np.diff(starts).max(initial=0))
    return plan_on_device(uploaded, states, num_tokens, longest, batch.block_size)


def plan_on_device(starts: Tensor, states: StepStates, num_tokens: int, longest: int, block_size: int) -> TritonStates:
    """Return the plan of a step. starts: int32 [requests + 1]. `longest`: tokens of the request that has most."""
    if block_size != triton_body.GROUP.value:
        raise ValueError(f"recurrent layers: blocks of {block_size} tokens; {triton_body.GROUP.value} are needed")
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=starts.device)
    requests = tokens
    if longest > 1:
        requests = torch.searchsorted(starts[1:], tokens, right=True, out_int32=True)
    return TritonStates(starts, states, requests, longest <= 1)


def causal_convolution(x: Tensor, kernel: Convolution, windows: Tensor, inputs: Tensor, plan: TritonStates) -> Tensor:
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if not plan.is_step:
        _convolve(out, x, kernel, windows, inputs, plan)
    _keep(out, x, kernel, windows, inputs, None, plan)
    return out


def convolved_rule(
    rule: str,
    x: Tensor,
    kernel: Convolution,
    others: tuple[Any, ...],
    caches: tuple[Tensor, Tensor, Tensor, Tensor],
    plan: TritonStates,
) -> Tensor:
    """Return the outputs of a rule over convolved inputs, which are `activated`.

    `rule`, `others`: the name of the operation, and its arguments between x and its states. caches: states, windows,
    log and last inputs.
    """
    states, windows, log, inputs = caches
    of_rule = _RULES[rule](x, others, states)
    out = torch.empty(len(x), *states.shape[1::2], dtype=torch.float32, device=x.device)
    if not len(x):
        return out
    _check(x, kernel, windows, inputs)
    num_requests, value_dim = len(plan.query_start_loc) - 1, states.shape[3]
    common = {
        **of_rule.arguments,
        **_state_arguments(states, log),
        **plan.arguments(),
        "out_ptr": out,
        "CHANNELS": x.shape[1],
        "enable_fp_fusion": True,
    }
    finishes = plan.is_step and of_rule.part_size == value_dim
    if plan.is_step:
        triton_body.step[num_requests, states.shape[1]](
            **_convolution_arguments(x, kernel, windows, inputs),
            **common,
            **of_rule.finish,
            VALUE_PAD=triton.next_power_of_2(value_dim),
            KEY_BLOCK=STEP_KEYS,
            FINISHES=finishes,
            num_warps=4,
        )
    else:
        convolved = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        key_pad = max(16, triton.next_power_of_2(states.shape[2]))
        _convolve(convolved, x, kernel, windows, inputs, plan)
        chunks_body.chunk[num_requests, states.shape[1], triton.cdiv(value_dim, CHUNK_VALUES)](
            x_ptr=convolved,
            **common,
            KEY_PAD=key_pad,
            VALUE_BLOCK=CHUNK_VALUES,
            num_warps=8,
        )
        _keep(convolved, x, kernel, windows, inputs, (log, common), plan)
    if not finishes:
        _finish(out, of_rule)
    return out


def _finish(out: Tensor, of_rule: _Rule) -> None:
    """Gate and normalise outputs, [tokens, heads, values], in place."""
    size, pad = of_rule.part_size, triton.next_power_of_2(of_rule.part_size)
    num_parts = out.shape[1] * out.shape[2] // size
    if not of_rule.finish["HAS_GATES"]:
        return
    chunks_body.finish_parts[len(out), num_parts](
        out_ptr=out,
        **of_rule.finish,
        NUM_PARTS=num_parts,
        SIZE=size,
        PAD=pad,
        enable_fp_fusion=True,
        num_warps=min(16, max(1, pad // 512)),
    )


class _Rule(NamedTuple):
    arguments: dict[str, Any]
    finish: dict[str, Any]
    """Of gates and norms."""
    part_size: int
    """Values that are normalised together. A step of one token does so in its launch if these are one head's."""


def _delta_rule(x: Tensor, others: tuple[Any, ...], states: Tensor) -> _Rule:
    rates, gates, heads = others
    return _of_delta(x, rates, rates[:, states.shape[1] :], gates, heads, states, by_channel=False)


def _channel_delta_rule(x: Tensor, others: tuple[Any, ...], states: Tensor) -> _Rule:
    rates, steps, gates, heads = others
    return _of_delta(x, rates, steps, gates, heads, states, by_channel=True)


def _of_delta(
    x: Tensor, rates: Tensor, steps: Tensor, gates: Tensor, heads: DeltaHeads, states: Tensor, *, by_channel: bool
) -> _Rule:
    num_values, key_dim, value_dim = states.shape[1:]
    of_keys = (x.shape[1] - num_values * value_dim) // 2
    arguments = {
        **_inputs_of(rates, steps),
        "decays_ptr": heads.decays,
        "biases_ptr": heads.biases,
        "skips_ptr": heads.decays,
        "rate_scale": heads.rate_scale,
        "least_step": 0.0,
        "most_step": float("inf"),
        "QUERY_AT": 0,
        "KEY_AT": of_keys,
        "VALUE_AT": 2 * of_keys,
        "NUM_KEYS": of_keys // key_dim,
        "DELTA": True,
        "BY_CHANNEL": by_channel,
    }
    finish = _finish_of(gates, heads.norm, 0, heads.eps, sigmoid_gates=by_channel, gates_first=False)
    return _Rule(arguments, finish, value_dim)


def _state_space(x: Tensor, others: tuple[Any, ...], states: Tensor) -> _Rule:
    steps, gates, heads = others
    assert isinstance(heads, StateSpaceHeads)
    num_values, key_dim, value_dim = states.shape[1:]
    of_values = num_values * value_dim
    of_keys = (x.shape[1] - of_values) // 2
    arguments = {
        **_inputs_of(steps, steps),
        "decays_ptr": heads.decays,
        "biases_ptr": heads.biases,
        "skips_ptr": heads.skips,
        "rate_scale": 1.0,
        "least_step": heads.step_limits[0],
        "most_step": heads.step_limits[1],
        "QUERY_AT": of_values + of_keys,
        "KEY_AT": of_values,
        "VALUE_AT": 0,
        "NUM_KEYS": of_keys // key_dim,
        "DELTA": False,
        "BY_CHANNEL": False,
    }
    norm = None if gates is None else heads.norm
    size = value_dim if norm is None else heads.norm_size
    finish = _finish_of(gates, norm, size, heads.eps, sigmoid_gates=False, gates_first=heads.gates_first)
    return _Rule(arguments, finish, size)


def _finish_of(
    gates: Tensor | None, norm: Tensor | None, norm_stride: int, eps: float, *, sigmoid_gates: bool, gates_first: bool
) -> dict[str, Any]:
    """`norm_stride`: from the weights of one part to those of the next; 0: parts share them."""
    if gates is not None:
        _check_rows(gates=gates)
    given = gates if gates is not None else norm
    return {
        "gates_ptr": given if gates is None else gates,
        "gate_stride": 0 if gates is None else gates.stride(0),
        "norm_ptr": given if norm is None else norm,
        "norm_stride": norm_stride,
        "eps": eps,
        "HAS_GATES": gates is not None,
        "SIGMOID_GATES": sigmoid_gates,
        "GATES_FIRST": gates_first,
        "HAS_NORM": norm is not None,
    }


_RULES = {"delta_rule": _delta_rule, "channel_delta_rule": _channel_delta_rule, "state_space": _state_space}


def _inputs_of(rates: Tensor, steps: Tensor) -> dict[str, Any]:
    _check_rows(rates=rates, steps=steps)
    return {
        "rates_ptr": rates,
        "rate_stride": rates.stride(0),
        "steps_ptr": steps,
        "step_stride": steps.stride(0),
    }


def _check_rows(**given: Tensor) -> None:
    launch.check_floats("recurrent layers", **given)
    for name, tensor in given.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"recurrent layers: {name} has strides {list(tensor.stride())}; values must be adjacent")


def _state_arguments(states: Tensor, log: Tensor) -> dict[str, Any]:
    launch.check_types("recurrent layers", torch.float32, states=states, log=log)
    launch.check_contiguous("recurrent layers", log=log, state=states[0])
    num_values, key_dim, value_dim = states.shape[1:]
    return {
        "states_ptr": states,
        "state_stride": states.stride(0),
        "log_ptr": log,
        "NUM_VALUES": num_values,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "log_places": log.shape[1],
        "LOG_VALUES": log.shape[2],
    }


def _check(x: Tensor, kernel: Convolution, windows: Tensor, inputs: Tensor) -> None:
    width, channels = kernel.taps.shape
    launch.check_floats("recurrent layers", x=x)
    floats = {"taps": kernel.taps, "windows": windows, "inputs": inputs}
    launch.check_types("recurrent layers", torch.float32, **floats)
    launch.check_contiguous("recurrent layers", taps=kernel.taps, inputs=inputs, window=windows[0])
    launch.check_shape("recurrent layers", "x", x, (len(x), channels))
    if x.stride(1) != 1 or inputs.shape[1] < width:
        raise ValueError(
            f"recurrent layers: x has strides {list(x.stride())} and rows keep {inputs.shape[1]} inputs; adjacent "
            f"values and {width} inputs are needed"
        )


def _convolution_arguments(x: Tensor, kernel: Convolution, windows: Tensor, inputs: Tensor) -> dict[str, Any]:
    return {
        "x_ptr": x,
        "x_stride": x.stride(0),
        "taps_ptr": kernel.taps,
        "bias_ptr": kernel.taps if kernel.bias is None else kernel.bias,
        "windows_ptr": windows,
        "window_stride": windows.stride(0),
        "inputs_ptr": inputs,
        "WIDTH": len(kernel.taps),
        "ring_places": inputs.shape[1],
        "HAS_BIAS": kernel.bias is not None,
    }


def _convolve(out: Tensor, x: Tensor, kernel: Convolution, windows: Tensor, inputs: Tensor, plan: TritonStates) -> None:
    channels = x.shape[1]
    _check(x, kernel, windows, inputs)
    chunks_body.convolve[(triton.cdiv(len(x), TOKEN_BLOCK), triton.cdiv(channels, CHANNEL_BLOCK))](
        **_convolution_arguments(x, kernel, windows, inputs),
        out_ptr=out,
        num_tokens=len(x),
        token_requests_ptr=plan.token_requests,
        query_start_ptr=plan.query_start_loc,
        requests_ptr=plan.states.requests,
        num_requests=plan.states.requests.shape[1],
        CHANNELS=channels,
        ACTIVATED=kernel.activated,
        TOKENS=TOKEN_BLOCK,
        BLOCK=CHANNEL_BLOCK,
        enable_fp_fusion=True,
        num_warps=4,
    )


def _keep(
    out: Tensor,
    x: Tensor,
    kernel: Convolution,
    windows: Tensor,
    inputs: Tensor,
    logged: tuple[Tensor, dict[str, Any]] | None,
    plan: TritonStates,
) -> None:
    """Write what a step leaves to the next one. `logged`: a log and the arguments of its rule."""
    channels = x.shape[1]
    _check(x, kernel, windows, inputs)
    log, rule = (inputs, dict.fromkeys(("NUM_KEYS", "KEY_AT"), 0)) if logged is None else logged
    num_blocks = triton.cdiv(channels, CHANNEL_BLOCK)
    chunks_body.keep[(len(plan.query_start_loc) - 1, num_blocks + rule["NUM_KEYS"])](
        **_convolution_arguments(x, kernel, windows, inputs),
        **plan.arguments(),
        convolved_ptr=out,
        log_ptr=log,
        CHANNELS=channels,
        BLOCK=CHANNEL_BLOCK,
        NUM_BLOCKS=num_blocks,
        ACTIVATED=kernel.activated,
        CONVOLVES=plan.is_step,
        NUM_KEYS=rule["NUM_KEYS"],
        KEY_AT=rule["KEY_AT"],
        KEY_DIM=rule.get("KEY_DIM", 1),
        KEY_PAD=triton.next_power_of_2(rule.get("KEY_DIM", 1)),
        log_places=log.shape[1],
        LOG_VALUES=log.shape[2],
        DELTA=rule.get("DELTA", False),
        enable_fp_fusion=True,
        num_warps=4,
    )
