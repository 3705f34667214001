"""The device that Triton launches on, copies to it, and the checks of all launchers."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill_kernels.gpu.building import build_problem
from pagemill_kernels.gpu.driver import device_problem

OLDEST_CAPABILITY = (8, 0)
"""The first capability with bfloat16 and asynchronous copies, which the kernels need."""
FP8_CAPABILITY = (8, 9)
"""The first capability with tensor cores and conversions for e4m3."""
INTERPRETED_MULTIPROCESSORS = 1
"""The interpreter runs one program at a time."""
INTERPRETED_SHARED_BYTES = 99 * 1024
"""The smallest shared memory of the supported devices."""
FLOAT_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def interpreted() -> bool:
    """Whether Triton's interpreter replaces the device: kernels run as Python on the CPU."""
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def unavailable_reason() -> str | None:
    """Return why no kernel can be launched here, and the remedy; None if kernels can be launched."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; install it"
    if interpreted():
        return None
    if not torch.cuda.is_available():
        return device_problem()
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST_CAPABILITY:
        name = torch.cuda.get_device_name()
        has = f"{name} has compute capability {capability[0]}.{capability[1]}"
        return f"{has}, 8.0 is the oldest supported; take another GPU"
    return build_problem()


def fp8_problem() -> str | None:
    """Return why e4m3 is not supported here, or None. Call this only if `unavailable_reason` returns None."""
    if interpreted():
        return None
    capability = torch.cuda.get_device_capability()
    if capability >= FP8_CAPABILITY:
        return None
    name = torch.cuda.get_device_name()
    return f"{name} has compute capability {capability[0]}.{capability[1]}, fp8 needs 8.9 (L4, H100 and later)"


def device() -> torch.device:
    """Return the device of the Triton backend's tensors."""
    return torch.device("cpu") if interpreted() else torch.device("cuda", torch.cuda.current_device())


@cache
def num_multiprocessors() -> int:
    if interpreted():
        return INTERPRETED_MULTIPROCESSORS
    count: int = torch.cuda.get_device_properties(device()).multi_processor_count
    return count


@cache
def capability() -> tuple[int, int]:
    return OLDEST_CAPABILITY if interpreted() else torch.cuda.get_device_capability(device())


@cache
def shared_bytes() -> int:
    """Return the shared memory that one program may have, in bytes."""
    if interpreted():
        return INTERPRETED_SHARED_BYTES
    size: int = torch.cuda.get_device_properties(device()).shared_memory_per_block_optin
    return size


@cache
def _side_stream(on: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(on, priority=-1)  # type: ignore[no-untyped-call]


@contextmanager
def forked(on: torch.device) -> Iterator[AbstractContextManager[object]]:
    """Fork the current stream: launches inside the yielded context run concurrently with launches outside of it.

    Memory is reused in the order of the current stream. So tensors that are used on both streams are created before the
    fork and dropped after its end, where the current stream waits for the other one: no other tensor gets their memory
    sooner. The two waits are events, through which a CUDA graph that is being recorded includes both streams.
    """
    if on.type != "cuda":
        yield nullcontext()
        return
    here, side = torch.cuda.current_stream(on), _side_stream(on)
    side.wait_stream(here)
    try:
        yield torch.cuda.stream(side)
    finally:
        here.wait_stream(side)


def to_device(x: Tensor) -> Tensor:
    """Return a copy in torch's own memory, with the interpreter too."""
    return x.to(device(), copy=True)


def upload(array: NDArray[np.generic], to: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy a step's array to a device behind all queued work, without waiting.

    The pinned copy is a new one each time, so no later step overwrites the array while it is read.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    host = host if dtype is None else host.to(dtype)
    return host if to.type == "cpu" else host.pin_memory().to(to, non_blocking=True)


def download(x: Tensor) -> Tensor:
    """Copy to the host without waiting; the copy is valid once the device has reached it."""
    return (
        x if x.device.type == "cpu" else torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
    )


def check_floats(operation: str, **tensors: Tensor) -> None:
    """Raise ValueError for a tensor that is not a float, or is on another device than the first."""
    _check_types(operation, FLOAT_TYPES, "bfloat16, float16 or float32 are computed", tensors)


def check_types(operation: str, wanted: torch.dtype, **tensors: Tensor) -> None:
    """Raise ValueError for a tensor of another type, or on another device than the first."""
    _check_types(operation, (wanted,), f"{wanted} is needed", tensors)


def _check_types(operation: str, accepted: Collection[torch.dtype], needed: str, tensors: Mapping[str, Tensor]) -> None:
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        if tensor.dtype not in accepted:
            raise ValueError(f"{operation}: {name} is {tensor.dtype}; {needed}")
        if tensor.device != first.device:
            raise ValueError(f"{operation}: {name} lies on {tensor.device}, the other tensors on {first.device}")


def check_shape(operation: str, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{operation}: {name} is {list(tensor.shape)}, {list(shape)} is needed")


def check_contiguous(operation: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{operation}: {name} has strides {list(tensor.stride())}; it must be contiguous")


def check_blocks(operation: str, cache: Tensor) -> None:
    """Check that each block of a layer's cache, [blocks, heads, block_size, width], is contiguous."""
    _, _, block_size, width = cache.shape
    if cache.stride()[1:] != (block_size * width, width, 1):
        raise ValueError(
            f"{operation}: cache has strides {list(cache.stride())} and shape {list(cache.shape)}; each block must be "
            "contiguous"
        )
