"""The device: how long runs take on it, and its measured limits, copy bandwidth and bfloat16 matmul rate."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from pagemill_kernels.gpu import launch

NUM_RUNS = 20
FLUSH_BYTES = 256 << 20
"""More than any level-2 cache holds: written before each run, so that inputs come from memory."""
HEAD_START_CYCLES = 2_000_000
"""About a millisecond in which the device waits before each run: launches are queued by then, so that the device's time
is measured and not the host's.
"""


class Device:
    """The device. With `tiny`, shapes are small enough for the interpreter, and the figures mean nothing.

    With `is_dry_run`, launches compute nothing either: what is compared or timed otherwise is only run.
    """

    def __init__(self, tiny: bool, dtype: torch.dtype | None = None, *, is_dry_run: bool = False) -> None:
        """`dtype` is the type of floats; None: bfloat16, or float32 in the interpreter."""
        absent = launch.unavailable_reason()
        if absent is not None:
            raise SystemExit(f"bench/gpu: {absent}; TRITON_INTERPRET=1 with --sizes tiny runs it without a device")
        self.tiny, self.is_dry_run = tiny, is_dry_run
        self.device = launch.device()
        self.on_gpu = self.device.type == "cuda"
        if not (tiny or self.on_gpu):
            raise SystemExit("bench/gpu: Triton's interpreter would take days for full sizes; use --sizes tiny")
        self.name = torch.cuda.get_device_name(self.device) if self.on_gpu else "Triton's interpreter"
        self.dtype = dtype or (torch.bfloat16 if self.on_gpu else torch.float32)

    def random(self, *shape: int, dtype: torch.dtype | None = None, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=self.device).to(dtype or self.dtype)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Release the memory that torch caches, because engines measure what is free; that of other processes, too."""
        self.__dict__.pop("_flush", None)
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the median seconds of several runs, compiled and warm, with cold caches; of one run on tiny shapes."""
        if self.tiny:
            return self._once(run)
        run()
        times = sorted(self._once(run) for _ in range(NUM_RUNS))
        return times[len(times) // 2]

    def _once(self, run: Callable[[], object]) -> float:
        if not self.on_gpu:
            begin_s = time.perf_counter()
            run()
            return max(time.perf_counter() - begin_s, 1e-9)
        cuda: Any = torch.cuda
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        cuda._sleep(HEAD_START_CYCLES)
        begin.record()
        run()
        end.record()
        end.synchronize()
        elapsed_ms: float = begin.elapsed_time(end)
        return elapsed_ms / 1000

    @cached_property
    def _flush(self) -> torch.Tensor:
        return torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)

    @cached_property
    def bytes_per_s(self) -> float:
        """Read and written bytes per second of a large copy."""
        source = torch.zeros(1024 if self.tiny else 2 << 30, dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.seconds(lambda: target.copy_(source))

    @cached_property
    def flops(self) -> float:
        """Operations per second of a large matmul of bfloat16 matrices."""
        size = 16 if self.tiny else 8192
        a, b = self.random(size, size), self.random(size, size, seed=1)
        return 2 * size**3 / self.seconds(lambda: a @ b)
