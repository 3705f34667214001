"""Decisions about one deployment as a ConfigMap beside it, and back.

The right to read the namespace is enough to ask why. The ConfigMap has no label that the watches select: nothing is
compared with it, and a change of it causes no reconcile.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagemill_operator.backends.kubernetes.render.names import child
from pagemill_operator.backends.kubernetes.snapshot import MANAGED_BY_LABEL, Manifest, Owner

RECORDS_FILE = "records.jsonl"


def records_name(name: str) -> str:
    """The ConfigMap's name for the deployment `name`."""
    return f"{name}-scaling"


def render_records(owner: Owner, lines: Sequence[str]) -> Manifest:
    """`lines`: records as `autoscaler.decision` encodes them, oldest first."""
    manifest = child(
        "v1",
        "ConfigMap",
        records_name(owner.name),
        owner,
        component="autoscaler",
        data={RECORDS_FILE: "".join(f"{line}\n" for line in lines)},
    )
    del manifest["metadata"]["labels"][MANAGED_BY_LABEL]
    return manifest


def lines_of(manifest: Manifest) -> list[str]:
    """What `render_records` put in."""
    text: str = (manifest.get("data") or {}).get(RECORDS_FILE, "")
    return text.splitlines()
