"""Tokens that a device has sampled and the host has not read yet."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pagemill_kernels.gpu import launch
from pagemill_kernels.sampling.batch import Logprobs, SampledTokens


class Drawn(NamedTuple):
    """On the device, or on its way from there."""

    tokens: Tensor
    """int64 [rows], -1 where the raw logits are not finite."""
    report: tuple[Tensor, Tensor] | None
    """As `triton_launch.report` gives it."""

    def download(self) -> Drawn:
        """To be read once the device has come so far."""
        report = None if self.report is None else (launch.download(self.report[0]), launch.download(self.report[1]))
        return Drawn(launch.download(self.tokens), report)

    def read(self) -> SampledTokens:
        """The tensors on the host."""
        token_ids: NDArray[np.int64] = self.tokens.numpy()
        finite = token_ids >= 0
        return SampledTokens(np.where(finite, token_ids, 0), finite, self._logprobs())

    def _logprobs(self) -> Logprobs | None:
        if self.report is None:
            return None
        values, ids = self.report[0].numpy(), self.report[1].numpy().astype(np.int64)
        return Logprobs(values[:, 0], ids[:, 0], values[:, 1:], ids[:, 1:])
