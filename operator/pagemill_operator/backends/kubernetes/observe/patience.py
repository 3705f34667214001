"""What is given time before it counts as a fault. Pure: the caller gives the time.

Neighbour: `observation`, which also says when time alone makes another observation.
"""

from __future__ import annotations

from datetime import datetime

from pagemill_operator.backends.kubernetes.snapshot import Manifest

VOLUME_S = 30.0
"""Until a claim's volume is there, in the usual course of things."""
LOADER_POD_S = 15.0
"""Until a Job has its pod."""


def left_s(manifest: Manifest, patience_s: float, now: datetime | None) -> float:
    """Seconds until it has existed for so long; 0 when it has, and where a time is not known."""
    created = manifest["metadata"].get("creationTimestamp")
    if created is None or now is None:
        return 0.0
    age_s = (now - datetime.fromisoformat(created)).total_seconds()
    # A clock that was set back must not hide a fault for ever.
    return patience_s - age_s if 0 <= age_s < patience_s else 0.0
