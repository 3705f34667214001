"""Collects the objects, events and logs of every pod of a failed case in one folder, whose path is printed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from support.kubectl import Kubectl

EVERYTHING = (
    "llmdeployments.pagemill.dev,loraadapters.pagemill.dev,deployments.apps,replicasets.apps,pods,services,endpointslices.discovery.k8s.io,"
    "persistentvolumeclaims,jobs.batch,poddisruptionbudgets.policy,leases.coordination.k8s.io"
)


def folder_of(root: Path, test: str) -> Path:
    """Create an empty folder for the logs of one test."""
    folder = root / re.sub(r"[^\w.-]+", "_", test)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def collect(kubectl: Kubectl, namespaces: list[str], folder: Path) -> None:
    """Write the objects, events and logs of these namespaces; a file contains the error if something cannot be read."""
    for namespace in namespaces:
        here = kubectl.within(namespace)
        _write(here, folder / f"{namespace}-objects.yaml", "get", EVERYTHING, "-o", "yaml")
        _write(here, folder / f"{namespace}-objects.txt", "get", EVERYTHING, "-o", "wide")
        _write(here, folder / f"{namespace}-describe.txt", "describe", "pods")
        _write(here, folder / f"{namespace}-events.txt", "get", "events", "--sort-by=.lastTimestamp")
        for pod in here.run("get", "pods", "-o", "name").stdout.split():
            name = pod.removeprefix("pod/")
            _write(here, folder / f"{namespace}-{name}.log", "logs", pod, "--all-containers", "--timestamps")
            _write(here, folder / f"{namespace}-{name}-previous.log", "logs", pod, "--all-containers", "--previous")
    print(f"logs of the failed case: {folder}")


def _write(kubectl: Kubectl, path: Path, *arguments: str) -> None:
    done = kubectl.run(*arguments)
    text = done.stdout + done.stderr
    if not (path.name.endswith("-previous.log") and done.returncode != 0):
        path.write_text(text)
