"""Sampling on the CPU: by native code if available, else by the reference, which specifies both."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagemill_kernels.cpu import library
from pagemill_kernels.sampling import native, reference
from pagemill_kernels.sampling.batch import Logprobs, Reports, SampledTokens, SamplingBatch


class HostSampler(Protocol):
    def sample_tokens(self, logits: NDArray[np.float32], batch: SamplingBatch) -> SampledTokens:
        """Sample one token for each row of logits, contiguous [rows, vocab], which may be overwritten."""
        ...

    def report(self, raw_logits: NDArray[np.float32], token_ids: NDArray[np.int64], reports: Reports) -> Logprobs:
        """Return log probabilities.

        raw_logits: contiguous, of the reports' rows, may be overwritten; token_ids: of the whole batch.
        """
        ...


def host_sampler() -> HostSampler:
    return native if library.load() is not None and native.is_current() else reference
