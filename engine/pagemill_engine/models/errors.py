"""What is wrong with a model or its weights; the runner turns these into load failures."""

from __future__ import annotations


class UnsupportedModelError(ValueError):
    """An architecture or a variant that no definition here computes."""


class WeightsError(ValueError):
    """Tensors that are missing, unexpected, or of the wrong shape; the message names them."""
