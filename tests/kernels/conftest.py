"""Runs the kernel tests in one thread."""

from __future__ import annotations

import pytest
import torch

from pagemill_kernels.cpu import launch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Use one thread: tiny tensors gain nothing from threads, which lose much time on a busy machine."""
    torch.set_num_threads(1)
    launch.set_num_threads(1)
