"""The C structures of a step's rows in recurrent layers and of their operations. Mirrors cpu/src/abi.h.

`library` has all other structures, and declares the functions.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

_STATE_ROWS = (
    ("rows", c_void_p),
    ("starts", c_void_p),
    ("sources", c_void_p),
    ("num_logged", c_void_p),
    ("num_accepted", c_void_p),
    ("num_proposed", c_void_p),
    ("write_starts", c_void_p),
    ("write_blocks", c_void_p),
    ("write_slots", c_void_p),
    ("num_requests", c_int64),
    ("block_size", c_int64),
    ("slot_stride", c_int64),
    ("x_stride", c_int64),
    ("num_threads", c_int32),
    ("unused", c_int32),
)


class RecurrentRows(ctypes.Structure):
    _fields_ = _STATE_ROWS


class ConvolutionArgs(ctypes.Structure):
    _fields_ = (
        *_STATE_ROWS,
        ("x", c_void_p),
        ("taps", c_void_p),
        ("bias", c_void_p),
        ("windows", c_void_p),
        ("inputs", c_void_p),
        ("out", c_void_p),
        ("channels", c_int64),
        ("width", c_int64),
        ("input_stride", c_int64),
        ("activated", c_int32),
        ("padding", c_int32),
    )


class RecurrenceArgs(ctypes.Structure):
    _fields_ = (
        *_STATE_ROWS,
        ("queries", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("steps", c_void_p),
        ("rates", c_void_p),
        ("gates", c_void_p),
        ("decays", c_void_p),
        ("biases", c_void_p),
        ("skips", c_void_p),
        ("norm", c_void_p),
        ("states", c_void_p),
        ("log", c_void_p),
        ("out", c_void_p),
        ("step_stride", c_int64),
        ("rate_stride", c_int64),
        ("gate_stride", c_int64),
        ("log_stride", c_int64),
        ("log_values", c_int64),
        ("num_keys", c_int64),
        ("num_values", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("decay_values", c_int64),
        ("norm_size", c_int64),
        ("norm_stride", c_int64),
        ("eps", c_float),
        ("least_step", c_float),
        ("most_step", c_float),
        ("rate_scale", c_float),
        ("gates_first", c_int32),
        ("sigmoid_gates", c_int32),
    )


class StateCache(ctypes.Structure):
    _fields_ = (
        ("states", c_void_p),
        ("windows", c_void_p),
        ("log", c_void_p),
        ("inputs", c_void_p),
        ("state_stride", c_int64),
        ("window_stride", c_int64),
        ("log_stride", c_int64),
        ("input_stride", c_int64),
    )
