"""What a pod was told about sleep, so that one that sleeps is not taken for one that fails to be ready. Pure.

Gateways hear at once whether an engine sleeps, and the kubelet sees it late; where gateways tell nothing, as to an
operator that has just begun to lead, this counts.
"""

from __future__ import annotations

from typing import Literal

from pagemill_operator.backends.kubernetes.render.names import REST_ANNOTATION
from pagemill_operator.backends.kubernetes.snapshot import Manifest

Rest = Literal["asleep", "waking"]


def told_rest(pod: Manifest) -> Rest | None:
    """None: nothing, or it was ready since."""
    told = (pod["metadata"].get("annotations") or {}).get(REST_ANNOTATION)
    return told if told in ("asleep", "waking") else None
