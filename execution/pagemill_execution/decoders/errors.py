"""Errors of a model or its weights, which runners turn into load errors."""

from __future__ import annotations


class UnsupportedModelError(ValueError):
    """No definition in this package computes the architecture or variant."""


class WeightsError(ValueError):
    """Tensors are missing, unexpected or of the wrong shape; the message names them."""
