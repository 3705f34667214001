"""Sums over ranks inside the native layers' call, which finds them behind a C function pointer."""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np

from pagemill_kernels.arrays import Array
from pagemill_kernels.ranks.group import RankGroup

REDUCE = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_float), ctypes.c_int64, ctypes.c_int32, ctypes.c_int32
)


class NativeReduce(Protocol):
    """The members `reduce` and `context` of the C struct StepHooks."""

    function: int
    context: int

    def check(self) -> None:
        """Raise what went wrong in the sums since the last call: the native call itself returns no error."""
        ...


class CalledReduce:
    """Sums by any group, called back from the native layers."""

    context = 0

    def __init__(self, group: RankGroup[Array]) -> None:
        self._group = group
        self._error: BaseException | None = None
        self._kept = REDUCE(self._reduce)
        function = ctypes.cast(self._kept, ctypes.c_void_p).value
        assert function is not None
        self.function = function

    def check(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _reduce(self, _: object, partial: ctypes._Pointer[ctypes.c_float], count: int, layer: int, cut: int) -> None:
        if self._error is not None:
            return  # the rest of the step is lost
        try:
            self._group.all_reduce(np.ctypeslib.as_array(partial, (count,)))
        except BaseException as error:
            self._error = error
            self._group.abort(f"rank {self._group.rank} at cut {cut} of layer {layer}: {error}")
