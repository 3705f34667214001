"""`make up-kubernetes` with kind: docker, kind, helm and kubectl are scripts that record their calls.

e2e/up_kubernetes runs the command on a real cluster.
"""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import WAIT_LIMIT_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "e2e" / "up_kubernetes"
FILE = ROOT / "examples" / "llmdeployment.yaml"
VIEW = json.dumps({"current-context": "kind-dev", "clusters": [], "contexts": []})
READY = json.dumps(
    {
        "metadata": {"generation": 1},
        "status": {"conditions": [{"type": "Ready", "status": "True", "observedGeneration": 1}]},
    }
)
KUBECTL = """
case "$*" in
"config view"*) cat view ;;
*"auth can-i"*) cat may; [ "$(cat may)" = yes ] ;;
*"get nodes"*) cat nodes ;;
*"get llmd/"*) cat ready ;;
*port-forward*) echo "Forwarding from 127.0.0.1:$(cat port) -> 8080"; exec sleep 600 ;;
esac
"""
HELM = """
case "$*" in
*" status "*) [ -e release ] && cat release ;;
*" upgrade "*) cat > values ;;
esac
"""
DOCKER = """
case "$*" in
"version"*) [ ! -e no-daemon ] ;;
"image inspect"*) false ;;
esac
"""
COMPONENTS = ("gateway", "operator", "engine-cpu")


class Answering(http.server.BaseHTTPRequestHandler):
    """Answers every chat with one short stream."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b'data: {"choices": [{"delta": {"content": "Paris."}}]}\n\ndata: [DONE]\n\n'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Path]:
    """Return a folder with the programs and their answers; `calls` has a line for each call."""
    for name, text in (("kubectl", KUBECTL), ("helm", HELM), ("docker", DOCKER), ("kind", "")):
        script(tmp_path / name, f'cd "$(dirname "$0")"\necho "{name} $*" >> calls\n{text}')
    for name in ("sh", "dirname", "cat", "sleep"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    for name, text in (("view", VIEW), ("may", "yes"), ("ready", READY), ("nodes", nodes())):
        (tmp_path / name).write_text(text)
    (tmp_path / "port").write_text(str(server.server_address[1]))
    yield tmp_path
    server.shutdown()
    server.server_close()
    thread.join()


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)


def nodes(*images: str) -> str:
    return json.dumps({"items": [{"status": {"images": [{"names": list(images)}], "allocatable": {}}}]})


def run(machine: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(PROGRAM), *arguments]
    env = {**os.environ, "PATH": str(machine)}
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=2 * WAIT_LIMIT_S)


def calls(machine: Path, start: str) -> list[str]:
    lines = (machine / "calls").read_text().splitlines() if (machine / "calls").exists() else []
    return [line for line in lines if line.startswith(start)]


def test_from_a_file_to_an_answer(machine: Path) -> None:
    done = run(machine, str(FILE))
    assert done.returncode == 0, done.stderr
    tag = json.loads((machine / "values").read_text())["image"]["gateway"]["tag"]
    images = [f"docker.io/pagemill/{each}:{tag}" for each in COMPONENTS]
    built = [
        f"docker build --target {each} --tag {image} {ROOT}" for each, image in zip(COMPONENTS, images, strict=True)
    ]
    assert calls(machine, "docker build") == built
    assert calls(machine, "kind") == [f"kind load docker-image {image} --name dev" for image in images]
    assert all("--context=kind-dev" in line for line in calls(machine, "kubectl --context="))
    assert "Paris." in done.stdout
    assert "kubectl --context=kind-dev --namespace pagemill-system port-forward" in done.stdout
    assert "make down-kubernetes" in done.stdout

    (machine / "calls").unlink()
    (machine / "nodes").write_text(nodes(*images))
    assert run(machine, str(FILE)).returncode == 0
    assert calls(machine, "docker build") + calls(machine, "kind") == [], "nothing has changed"


@pytest.mark.parametrize(
    ("lacks", "named"),
    [
        ("kind", "`kind` is not on PATH"),
        ("helm", "`helm` is not on PATH"),
        ("docker", "nothing can build images (no Docker)"),
        ("daemon", "its daemon does not answer"),
        ("rights", "may not do everything"),
        ("cluster", "does not answer: refused"),
        ("place", "that another command installed"),
    ],
)
def test_what_is_missing_is_named_before_anything_starts(machine: Path, lacks: str, named: str) -> None:
    match lacks:
        case "daemon":
            (machine / "no-daemon").touch()
        case "rights":
            (machine / "may").write_text("no")
        case "cluster":
            refusing = 'case "$*" in "config view"*) cat view ;; *) echo refused >&2; false ;; esac'
            script(machine / "kubectl", f'cd "$(dirname "$0")"\n{refusing}')
        case "place":
            (machine / "release").write_text(json.dumps({"info": {"description": "Install complete"}}))
        case program:
            (machine / program).unlink()
    done = run(machine, str(FILE))
    assert done.returncode == 1
    assert "nothing was changed:" in done.stderr
    assert named in done.stderr
    assert not [
        each for each in ("docker build", "kind", "helm --kube-context=kind-dev upgrade") if calls(machine, each)
    ]


def test_all_that_is_missing_is_named_at_once(machine: Path) -> None:
    for name in ("kind", "helm", "docker"):
        (machine / name).unlink()
    assert run(machine, str(FILE)).stderr.count("\n  - ") == 3


def test_files_that_ask_for_devices_which_no_node_has_are_refused(machine: Path, tmp_path: Path) -> None:
    file = tmp_path / "gpus.yaml"
    file.write_text(FILE.read_text().replace("gpus: 0", "gpus: 1"))
    done = run(machine, str(file))
    assert done.returncode == 1
    assert "spec.resources.gpus is 1, and the largest node offers 0" in done.stderr


def test_a_faulty_file_is_refused_with_its_line(machine: Path, tmp_path: Path) -> None:
    file = tmp_path / "faulty.yaml"
    file.write_text(FILE.read_text().replace("replicas: 2", "replicas: many"))
    done = run(machine, str(file))
    assert done.returncode == 1
    assert 'spec.replicas: must be an integer, not "many"' in done.stderr
    assert calls(machine, "docker build") == []


def test_down_removes_deployments_before_the_release_and_its_definitions(machine: Path) -> None:
    assert run(machine, "--down").returncode == 0
    removing = [line.split(" ", 2)[2] for line in calls(machine, "") if " delete " in line or "uninstall" in line]
    assert removing == [
        "delete loraadapters,llmdeployments --all --all-namespaces",
        "uninstall pagemill --namespace pagemill-system --wait --ignore-not-found",
        "delete --ignore-not-found crd/llmdeployments.pagemill.dev crd/loraadapters.pagemill.dev "
        "namespace/pagemill-system",
    ]


def test_down_leaves_what_another_command_installed(machine: Path) -> None:
    (machine / "release").write_text(json.dumps({"info": {"description": "Install complete"}}))
    done = run(machine, "--down")
    assert done.returncode == 1
    assert "that another command installed" in done.stderr
    assert not [line for line in calls(machine, "") if " delete " in line or "uninstall" in line]
