"""`docs/reference/conditions.md` lists exactly the reasons that the code can set."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from observed_world import CONDITION_TYPES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "conditions.md"
OPERATOR = ROOT / "operator" / "pagemill_operator"
DECIDING = [
    OPERATOR / "status" / "conditions.py",
    OPERATOR / "plan" / "adapters.py",
    OPERATOR / "controller" / "reporting" / "adapter_statuses.py",
    *(OPERATOR / "backends" / "kubernetes" / "observe").glob("*.py"),
]
RAISING = [
    path
    for package in ("engine/pagemill_engine", "execution/pagemill_execution", "libs")
    for path in (ROOT / package).rglob("*.py")
]
ERRORS = (
    "AdapterError",
    "LoadError",
    "FetchError",
    "StartupError",
    "SourceError",
    "Fatal",
    "EngineFault",
    "ListenError",
)
CAMEL = re.compile(r"[A-Z][A-Za-z]*[a-z][A-Z][A-Za-z]*|OOMKilled")
OTHERS = {
    "Planned",
    "ModelLoaded",
    "ScalingActive",
    "SLOMet",
    "FieldsSupported",
    "ReplicaObservation",
    # Kubernetes' reasons, which the operator reads and does not set.
    "ErrImagePull",
    "ImagePullBackOff",
    "ImageInspectError",
    "RegistryUnavailable",
    "SignatureValidationFailed",
    "ErrImageNeverPull",
    "CreateContainerError",
    "RunContainerError",
    "PreCreateHookError",
    "PostStartHookError",
    "CreateContainerConfigError",
    "StartError",
    "ContainerCannotRun",
    "PodScheduled",
    "ContainersReady",
    "ReadinessGatesNotReady",
    "ReplicaFailure",
    "PersistentVolumeClaim",
    "LeaderWorkerSet",
    "RuntimeClass",
    "AlreadyExists",
    # Reasons of an engine that become CrashLoop or OOMKilled.
    "EngineDied",
    "EngineFailed",
    "ServerFailed",
    "OutOfMemory",
}


def _given() -> Iterator[str]:
    for path in DECIDING:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and CAMEL.fullmatch(node.value):
                yield node.value
    for path in RAISING:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ERRORS:
                yield from _reasons_of(node)
            if isinstance(node, ast.ClassDef):
                yield from _reason_of_class(node)


def _reason_of_class(node: ast.ClassDef) -> Iterator[str]:
    """Yield the reason of an error class whose instances all have the same one: `reason = "X"`."""
    for line in node.body:
        names = [each.id for each in line.targets if isinstance(each, ast.Name)] if isinstance(line, ast.Assign) else []
        if names == ["reason"] and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str):
            yield line.value.value


def _reasons_of(call: ast.Call) -> Iterator[str]:
    values = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "reason")]
    for value in values:
        if isinstance(value, ast.Constant) and isinstance(value.value, str) and CAMEL.fullmatch(value.value):
            yield value.value


@pytest.mark.slow
def test_the_page_lists_every_reason() -> None:
    listed = set(re.findall(r"`([A-Z][A-Za-z]+)`", PAGE.read_text()))
    assert set(_given()) - OTHERS - listed == set()


def test_the_page_lists_no_reason_that_is_never_set() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    listed = {reason for row in rows for reason in re.findall(r"`([A-Z][A-Za-z]+)`", row.split("|")[1])}
    plain = {"Unauthorized", "Unschedulable", "Forbidden", "Loading"}
    assert listed - set(CONDITION_TYPES) - plain - set(_given()) == set()
