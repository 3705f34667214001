"""Tokens that a device has sampled and the host has not read yet."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pagemill_kernels.gpu import launch
from pagemill_kernels.sampling.batch import Logprobs, SampledTokens

Report = tuple[Tensor, Tensor]
"""As `triton_launch.report` gives it."""


class Drawn(NamedTuple):
    """On the device, or on its way from there."""

    tokens: Tensor
    """int64 [rows], -1 where the raw logits are not finite."""
    report: Report | None

    def download(self) -> Drawn:
        """To be read once the device has come so far."""
        return Drawn(launch.download(self.tokens), None if self.report is None else download_report(self.report))

    def read(self) -> SampledTokens:
        """The tensors on the host."""
        token_ids: NDArray[np.int64] = self.tokens.numpy()
        finite = token_ids >= 0
        logprobs = None if self.report is None else read_report(self.report)
        return SampledTokens(np.where(finite, token_ids, 0), finite, logprobs)


def download_report(report: Report) -> Report:
    """As `Drawn.download`."""
    return launch.download(report[0]), launch.download(report[1])


def read_report(report: Report) -> Logprobs:
    """From the tensors on the host."""
    values, ids = report[0].numpy(), report[1].numpy().astype(np.int64)
    return Logprobs(values[:, 0], ids[:, 0], values[:, 1:], ids[:, 1:])
