"""`pvc://`: files on a PersistentVolumeClaim, which only the pods of a cluster can mount."""

from __future__ import annotations

import re
from pathlib import Path

from pagemill_models.sources.base import SourceKind
from pagemill_protocol.source_errors import SourceError

_CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class VolumeClaim(SourceKind):
    scheme = "pvc"
    where = "cluster"
    form = "pvc://CLAIM/PATH"
    about = "A folder or a `.gguf` file on a claim in the LLMDeployment's namespace, mounted read-only."

    def fault(self, source: str) -> str | None:
        claim, _, path = source.removeprefix("pvc://").partition("/")
        remedy = "write pvc://CLAIM/PATH, the path as inside the volume"
        if not _CLAIM.fullmatch(claim):
            return f"{claim[:80]!r} is not the name of a PersistentVolumeClaim; {remedy}"
        return f"the path leaves the volume; {remedy}" if ".." in path.split("/") else None

    def find(self, source: str, field: str) -> Path | None:
        raise SourceError(
            field,
            f"`{source}`: `pvc://` names a volume of a cluster, so it cannot be read here. "
            "Copy the model to this machine and give its path or `file:///path`.",
            reason="SourceUnavailable",
        )
