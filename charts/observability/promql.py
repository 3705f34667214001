"""Parts of PromQL expressions that rules and dashboards share: which engines count, and one label for the model."""

from __future__ import annotations

SERVES = "(pagemill_engine_ready == 1)"


def by_model(expression: str) -> str:
    """Return the sum of engines' series per model, under the label `model` that gateways and the operator use."""
    return f'sum by (model) (label_replace({expression}, "model", "$1", "model_name", "(.+)"))'


def serving(series: str) -> str:
    """Limit a series to engines that accept requests: one that loads or sleeps has no capacity."""
    return f"({series} and on (instance, model_name) {SERVES})"


def rate(series: str, window: str) -> str:
    return f"rate({series}[{window}])"
