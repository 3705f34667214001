"""An LLMDeployment that is being written, and what of the original it does not say.

`vllm`, `kserve` and `kubeai` fill it; the command prints it. It knows no other platform.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pagemill_crds import API_VERSION, KIND


class ConvertError(Exception):
    """The original cannot be read; the message names it, the value and the remedy."""


class Note(NamedTuple):
    """A part of the original without an equal one."""

    what: str
    meaning: str
    """What holds instead, or what to do."""


class Draft:
    """The document; fields are set by their path below `spec`."""

    def __init__(self, name: str) -> None:
        self.metadata: dict[str, Any] = {"name": name}
        self.spec: dict[str, Any] = {}
        self.notes: list[Note] = []

    def set(self, path: str, value: Any) -> None:
        """Set a field such as `engine.maxModelLen`; `None` sets nothing."""
        if value is None:
            return
        *parents, last = path.split(".")
        section = self.spec
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value

    def get(self, path: str) -> Any:
        found: Any = self.spec
        for part in path.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def note(self, what: str, meaning: str) -> None:
        self.notes.append(Note(what, meaning))

    def note_rest(self, where: str, given: Mapping[str, Any], known: Mapping[str, str]) -> None:
        """Note each key that nothing has read; `known` says what holds instead of some."""
        for key in given:
            self.note(f"{where}{key}", known.get(key, "Has no equal field; see `pagemill explain LLMDeployment.spec`."))

    def document(self) -> dict[str, Any]:
        return {"apiVersion": API_VERSION, "kind": KIND, "metadata": self.metadata, "spec": self.spec}


def model_source(name: str) -> str:
    """Return the source of a model that others name without a scheme: a repository of Hugging Face."""
    return name if "://" in name else f"hf://{name}"


def resource_name(text: str) -> str:
    """Return a name that Kubernetes takes, made from a model's."""
    kept = "".join(each if each.isascii() and (each.isalnum() or each == "-") else "-" for each in text.lower())
    return kept.strip("-")[:40].strip("-") or "model"
