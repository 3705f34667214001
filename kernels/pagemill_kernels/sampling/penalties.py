"""The penalties of sampling, which change the logits of tokens that occur in a row's prompt or output."""

from __future__ import annotations

import numpy as np

from pagemill_kernels.sampling.arithmetic import Floats
from pagemill_kernels.sampling.batch import Penalties
from pagemill_kernels.sampling.columns import Column, Columns

PENALTIES = Columns(
    repetition_penalty=Column(np.float32, neutral=1.0),
    frequency_penalty=Column(np.float32, neutral=0.0),
    presence_penalty=Column(np.float32, neutral=0.0),
)
"""The parameters of penalties. The C++ and Triton samplers name the columns that they read."""


def apply_penalties(logits: Floats, penalties: Penalties) -> None:
    """Apply penalties. Repetition as in CTRL (arXiv 1909.05858) divides positive logits and multiplies others."""
    picked = logits[penalties.rows]
    counts = penalties.in_output[penalties.count_rows]
    settings = penalties.settings
    repetition = settings["repetition_penalty"][:, None]
    seen = penalties.in_prompt[penalties.count_rows] | (counts > 0)
    repeated = np.where(picked > 0, picked / repetition, picked * repetition)
    picked = np.where(seen, repeated, picked)
    picked -= settings["frequency_penalty"][:, None] * counts.astype(np.float32)
    picked -= settings["presence_penalty"][:, None] * (counts > 0)
    logits[penalties.rows] = picked
