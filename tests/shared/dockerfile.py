"""The stages of the repository's Dockerfile."""

from __future__ import annotations

import re
from pathlib import Path

PATH = Path(__file__).resolve().parents[2] / "Dockerfile"
IMAGES = ("gateway", "operator", "engine-cpu", "engine")
"""The targets, each named like its image."""
CODE = {image: f"{image.partition('-')[0]}-code" for image in IMAGES}
"""The stage of each image that builds the packages of this repository."""


def text() -> str:
    """Return the Dockerfile with one line per instruction."""
    return PATH.read_text().replace("\\\n", " ")


def stages() -> dict[str, tuple[str, str]]:
    """Return the base and the instructions of each stage, by its name."""
    parts = re.split(r"^FROM (\S+) AS (\S+)$", text(), flags=re.MULTILINE)[1:]
    return {name: (base, body) for base, name, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True)}


def whole(stage: str) -> str:
    """Return the instructions of a stage and of those on which it is based."""
    found = stages()
    base, body = found[stage]
    return (whole(base) if base in found else "") + body
