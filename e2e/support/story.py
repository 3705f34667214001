"""Records when things happened in a namespace by this machine's clock: the first sign of a fault, and its report.

It uses a watch, as the operator does, instead of polling, so the times are those of the changes.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import IO

from support.kubectl import Kubectl
from support.objects import Document

DEPLOYMENT = "pagemill.dev/deployment"
TROUBLED = {
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
}
"""Waiting reasons of a container that time alone does not resolve."""


@dataclass
class Story:
    """Monotonic times in seconds, by name of the LLMDeployment."""

    applied_s: dict[str, float] = field(default_factory=dict)
    shown_s: dict[str, float] = field(default_factory=dict)
    """The time of the first pod or ReplicaSet with a fault."""
    reported_s: dict[tuple[str, str], float] = field(default_factory=dict)
    """The time of the report, by name and reason of the condition Ready."""

    def lag_s(self, name: str, reason: str, *, is_own_fault: bool) -> float:
        """Return the seconds from the first sign of the fault to the status with `reason`.

        With `is_own_fault`, the sign is the change of the spec.
        """
        signs = self.applied_s if is_own_fault else self.shown_s
        return self.reported_s[name, reason] - signs[name]

    def note(self, found: Document) -> None:
        now = time.monotonic()
        if found["kind"] == "LLMDeployment":
            name = found["metadata"]["name"]
            self.applied_s.setdefault(name, now)
            if reason := _ready_reason(found):
                self.reported_s.setdefault((name, reason), now)
        elif _in_trouble(found):
            self.shown_s.setdefault(found["metadata"]["labels"][DEPLOYMENT], now)


@contextmanager
def watched(kubectl: Kubectl) -> Iterator[Story]:
    """Record what happens in the namespace of `kubectl` while the block runs."""
    story = Story()
    with ExitStack() as stack:
        for kinds, selector in (("llmd", ""), ("pods", DEPLOYMENT), ("replicasets", DEPLOYMENT)):
            stack.enter_context(_watch(kubectl, story, kinds, selector))
        yield story


@contextmanager
def _watch(kubectl: Kubectl, story: Story, kind: str, selector: str) -> Iterator[None]:
    argv = kubectl.argv("get", kind, "--watch", "-o", "json", "--selector", selector)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        reader = threading.Thread(target=_read, args=(process.stdout, story), name=f"watch:{kind}")
        reader.start()
        try:
            yield
        finally:
            process.terminate()
            reader.join()


def _read(output: IO[str], story: Story) -> None:
    """Read kubectl's objects, each of which ends with a brace on its own line."""
    lines: list[str] = []
    for line in output:
        lines.append(line)
        if line == "}\n":
            story.note(json.loads("".join(lines)))
            lines.clear()


def _ready_reason(found: Document) -> str:
    conditions = found.get("status", {}).get("conditions", [])
    return next((each["reason"] for each in conditions if each["type"] == "Ready"), "")


def _in_trouble(found: Document) -> bool:
    status = found.get("status", {})
    if found["kind"] == "ReplicaSet":
        return any(each["type"] == "ReplicaFailure" for each in status.get("conditions", []))
    if any(each.get("reason") == "Unschedulable" for each in status.get("conditions", [])):
        return True
    return any(map(_is_stopped, status.get("containerStatuses", [])))


def _is_stopped(container: Document) -> bool:
    state = container.get("state", {})
    waits_in_vain = state.get("waiting", {}).get("reason") in TROUBLED
    return waits_in_vain or "terminated" in state or "terminated" in container.get("lastState", {})
