"""Stores the autoscaler's decisions on one deployment in a ConfigMap beside it, and reads them back.

Read access to the namespace is enough to see them. The ConfigMap lacks the label that the watches select, so it is not
compared with a rendered manifest and its changes cause no reconcile.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagemill_operator.backends.kubernetes.render.names import child
from pagemill_operator.backends.kubernetes.snapshot import MANAGED_BY_LABEL, Manifest, Owner

RECORDS_FILE = "records.jsonl"


def records_name(name: str) -> str:
    """Return the ConfigMap's name for the deployment `name`."""
    return f"{name}-scaling"


def render_records(owner: Owner, lines: Sequence[str]) -> Manifest:
    """Render the ConfigMap; `lines` are records as `autoscaler.decision` encodes them, oldest first."""
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
    """Return the lines that `render_records` wrote."""
    text: str = (manifest.get("data") or {}).get(RECORDS_FILE, "")
    return text.splitlines()
