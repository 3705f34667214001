"""Measures a device's memory: the host's (`runner.memory`) for the CPU, its own for a GPU."""

from __future__ import annotations

import torch

from pagemill_engine.runner import memory
from pagemill_engine.runner.memory import MemoryState


def measure_device(device: torch.device) -> MemoryState:
    if device.type == "cpu":
        return memory.measure_memory()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return MemoryState(total_bytes, free_bytes, torch.cuda.memory_reserved(device), is_gpu=True)
