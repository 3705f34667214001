"""Kernel tests run on one thread."""

from __future__ import annotations

import pytest
import torch

from pagemill_kernels.cpu import launch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny tensors gain nothing from threads, and threads that wait for each other lose much on a busy machine."""
    torch.set_num_threads(1)
    launch.set_num_threads(1)
