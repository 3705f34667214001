"""Sampled tokens on a device that the host has not read yet."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pagemill_kernels.gpu import launch
from pagemill_kernels.sampling.batch import Logprobs, SampledTokens

Report = tuple[Tensor, Tensor]
"""The result of `triton_launch.report`."""


class DeviceSample(NamedTuple):
    """Sampled tokens on the device, or being copied from it."""

    tokens: Tensor
    """int64 [rows], -1 where the raw logits are not finite."""
    report: Report | None

    def download(self) -> DeviceSample:
        """Copy the tensors to the host without waiting; read them once the device has finished."""
        return DeviceSample(launch.download(self.tokens), None if self.report is None else download_report(self.report))

    def read(self) -> SampledTokens:
        """Return the result from tensors on the host."""
        token_ids: NDArray[np.int64] = self.tokens.numpy()
        finite = token_ids >= 0
        logprobs = None if self.report is None else read_report(self.report)
        return SampledTokens(np.where(finite, token_ids, 0), finite, logprobs)


def download_report(report: Report) -> Report:
    """Copy a report to the host without waiting, like `DeviceSample.download`."""
    return launch.download(report[0]), launch.download(report[1])


def read_report(report: Report) -> Logprobs:
    """Return log probabilities from tensors on the host."""
    values, ids = report[0].numpy(), report[1].numpy().astype(np.int64)
    return Logprobs(values[:, 0], ids[:, 0], values[:, 1:], ids[:, 1:])
