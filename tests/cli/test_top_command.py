"""`pagemill top`: values from two readings of an engine, on this machine and in a cluster."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from click.testing import Result
from typer.testing import CliRunner
from waiting import WAIT_LIMIT_S

from pagemill.main import app
from pagemill.top.display import as_table
from pagemill.top.reading import ClientsView, PodRow, Reading, clients_of, row_of
from pagemill.top.sources import GATEWAYS
from pagemill_operator.backends.local.state_dir import StateDir
from pagemill_protocol import metrics

PODS = "/api/v1/pods"


def scraped(*, generated: int = 0, first_tokens: tuple[float, ...] = (), ready: bool = True, kv: float = 0.25) -> str:
    """Return an engine's metrics."""
    made = metrics.Metrics(metrics.ENGINE_METRICS, model_name="tiny", engine="0")
    made.gauge(metrics.ENGINE_READY).set(ready)
    made.gauge(metrics.KV_CACHE_USAGE).set(kv)
    made.gauge(metrics.NUM_REQUESTS_RUNNING).set(3)
    made.gauge(metrics.NUM_REQUESTS_WAITING).set(2)
    made.counter(metrics.GENERATION_TOKENS).inc(generated)
    for seconds in first_tokens:
        made.histogram(metrics.TIME_TO_FIRST_TOKEN).observe(seconds)
    return made.render().decode()


def reading(text: str, at_s: float) -> Reading:
    return Reading("chat-0", "default/chat", at_s, text)


def test_rates_are_those_between_two_readings() -> None:
    before = reading(scraped(generated=100, first_tokens=(9.0,)), 10.0)
    row = row_of(before, reading(scraped(generated=160, first_tokens=(9.0, 0.1, 0.3)), 12.0))
    assert (row.tokens_per_s, row.ttft_ms) == (30.0, pytest.approx(200.0))
    assert (row.phase, row.model, row.kv, row.running, row.waiting) == ("ready", "tiny", 0.25, 3, 2)


def test_the_share_of_proposed_tokens_that_were_sampled_is_shown() -> None:
    def proposed(num_proposed: int, num_accepted: int) -> str:
        made = metrics.Metrics(metrics.ENGINE_METRICS, model_name="tiny", engine="0")
        made.counter(metrics.SPEC_DRAFT_TOKENS).inc(num_proposed)
        made.counter(metrics.SPEC_ACCEPTED).inc(num_accepted)
        return made.render().decode()

    row = row_of(reading(proposed(10, 1), 1.0), reading(proposed(30, 16), 2.0))
    assert row.accepted == 0.75
    assert "75%" in as_table("here", [row]).splitlines()[-1]
    assert row_of(reading(proposed(30, 16), 2.0), reading(proposed(30, 16), 3.0)).accepted is None


def test_the_ranks_of_an_engine_are_shown() -> None:
    def info(**labels: str) -> str:
        made = metrics.Metrics(metrics.ENGINE_METRICS, model_name="tiny", engine="0")
        rest = dict.fromkeys(set(metrics.ENGINE_INFO.labels) - labels.keys() - {"model_name", "engine"}, "a")
        made.gauge(metrics.ENGINE_INFO, **labels, **rest).set(1)
        return made.render().decode()

    assert row_of(None, reading(info(ranks="1", nodes="1"), 1.0)).ranks == ""
    assert row_of(None, reading(info(ranks="2", nodes="1"), 1.0)).ranks == "2 ranks"
    row = row_of(None, reading(info(ranks="4", nodes="2"), 1.0))
    assert as_table("here", [row]).endswith("  tiny (4 ranks on 2 nodes)")
    assert row_of(None, reading(scraped(), 1.0)).ranks == ""


def test_an_unknown_value_is_not_shown_as_zero() -> None:
    row = row_of(None, reading(scraped(generated=100), 1.0))
    assert (row.tokens_per_s, row.ttft_ms) == (None, None)
    again = row_of(reading(scraped(generated=100), 1.0), reading(scraped(generated=100), 2.0))
    assert (again.tokens_per_s, again.ttft_ms) == (0.0, None), "no first token arrived"
    assert "-" in as_table("here", [row]).splitlines()[-1].split()


def test_a_restarted_engine_counts_from_zero() -> None:
    row = row_of(reading(scraped(generated=1000), 1.0), reading(scraped(generated=20), 2.0))
    assert row.tokens_per_s == 20.0


def test_the_phase_explains_why_an_engine_accepts_no_requests() -> None:
    assert row_of(None, reading(scraped(ready=False), 1.0)).phase == "starting"
    assert row_of(None, Reading("chat-0", "default/chat", 1.0, fault="refused")) == PodRow(
        "default/chat", "chat-0", "", "unreachable", fault="refused"
    )


def top(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["top", "--interval", "0.2", *map(str, arguments)])


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which `pagemill up` would store its state; there is no cluster either."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    return tmp_path


@pytest.fixture
def up(alone: Path, answers: Any) -> Iterator[StateDir]:
    """Create the state of a running `pagemill up` with an engine and a gateway."""
    folder = StateDir(alone)
    answers.by_path["/metrics"] = scraped(generated=5)
    engine = {"job": "pagemill-engine", "pod": "sim-0", "variant": "default/sim"}
    folder.write_targets(
        [
            {"targets": [answers.address], "labels": engine},
            {"targets": ["127.0.0.1:9"], "labels": {**engine, "pod": "sim-1"}},
            {"targets": [answers.address], "labels": {"job": "pagemill-gateway"}},
        ]
    )
    yield folder
    folder.remove()


def test_engines_of_this_machine_are_shown_once_without_a_terminal(up: StateDir) -> None:
    result = top()
    assert result.exit_code == 0, result.output
    head, clients, _, columns, first, second = result.stdout.splitlines()
    assert clients == "clients: 0 waiting in gateways"
    assert head.startswith("`pagemill up` on this machine: 2 engines, 0 tokens/s, 2 waiting in engines")
    assert columns.split()[:4] == ["DEPLOYMENT", "POD", "PHASE", "KV"]
    assert first.split() == ["default/sim", "sim-0", "ready", "25%", "3", "2", "0", "-", "-", "tiny"]
    assert second.split()[:3] == ["default/sim", "sim-1", "unreachable"]


def test_a_namespace_selects_engines_of_this_machine_too(up: StateDir) -> None:
    assert "namespace default: 2 engines" in top("-n", "default").stdout
    assert "namespace other: 0 engines" in top("-n", "other").stdout


def test_json_has_the_same_values_as_numbers(up: StateDir) -> None:
    body = json.loads(top("-o", "json").stdout)
    assert body["readFrom"] == "`pagemill up` on this machine"
    first, second = body["engines"]
    assert (first["pod"], first["kv"], first["tokens_per_s"], first["ttft_ms"]) == ("sim-0", 0.25, 0.0, None)
    assert (second["phase"], second["kv"]) == ("unreachable", None)


def test_without_up_and_cluster_an_error_says_so(alone: Path) -> None:
    result = top()
    assert result.exit_code == 2
    assert "no `pagemill up` runs on this machine, and no cluster is configured here" in result.stderr


def pod(name: str, *, port: str = "control", phase: str = "Running") -> dict[str, Any]:
    labels = {"pagemill.dev/deployment": "chat"}
    container = {"ports": [{"name": port, "containerPort": 9000}]}
    metadata = {"namespace": "prod", "name": name, "labels": labels}
    return {"metadata": metadata, "spec": {"containers": [container]}, "status": {"phase": phase}}


def test_pods_of_a_cluster_are_read_through_its_api_server(answers: Any, kubeconfig: Path) -> None:
    answers.by_path[PODS] = {"items": [pod("chat-a"), pod("load", port="http"), pod("chat-b", phase="Pending")]}
    answers.by_path["/api/v1/namespaces/prod/pods/chat-a:9000/proxy/metrics"] = scraped(generated=7)
    result = top("--kubeconfig", kubeconfig, "--once")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0].startswith("context here: 1 engine,")
    assert result.stdout.splitlines()[3].split()[:4] == ["prod/chat", "chat-a", "ready", "25%"]
    assert "/api/v1/pods?labelSelector=pagemill.dev/deployment" in answers.asked


def test_gateways_and_engines_without_a_node_are_shown_in_a_cluster(answers: Any, kubeconfig: Path) -> None:
    made = metrics.Metrics(metrics.GATEWAY_METRICS)
    made.gauge(metrics.GATEWAY_QUEUE_REQUESTS, model="tiny").set(32)
    gateway = pod("gateway-a")
    gateway["metadata"] |= {"namespace": "pagemill-system", "labels": {"app.kubernetes.io/component": "gateway"}}
    without = pod("chat-c", phase="Pending")
    why = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    without["status"]["conditions"] = [{"type": "PodScheduled", "reason": "Unschedulable", "message": why}]
    answers.by_path[PODS] = {"items": [pod("chat-a"), without]}
    answers.by_path[f"{PODS}?labelSelector={quote(GATEWAYS, safe='/,')}"] = {"items": [gateway]}
    answers.by_path["/api/v1/namespaces/prod/pods/chat-a:9000/proxy/metrics"] = scraped()
    path = "/api/v1/namespaces/pagemill-system/pods/gateway-a:9000/proxy/metrics"
    answers.by_path[path] = made.render().decode()
    shown = top("--kubeconfig", kubeconfig, "--once").stdout.splitlines()
    assert shown[1] == "clients: 32 waiting in gateways"
    assert shown[-2].split()[:4] == ["prod/chat", "chat-a", "ready", "25%"]
    assert shown[-1].split() == ["prod/chat", "chat-c", "pending", *"------", "InsufficientGPU"]


def test_a_missing_right_is_named(answers: Any, kubeconfig: Path) -> None:
    answers.by_path[PODS] = {"items": [pod("chat-a")]}
    answers.statuses["/api/v1/namespaces/prod/pods/chat-a:9000/proxy/metrics"] = 403
    assert "you need the right to get pods/proxy" in top("--kubeconfig", kubeconfig).stdout
    answers.statuses[PODS] = 403
    result = top("--kubeconfig", kubeconfig)
    assert result.exit_code == 2
    assert "name a namespace with --namespace" in result.stderr


def test_a_namespace_restricts_the_list(answers: Any, kubeconfig: Path) -> None:
    answers.by_path["/api/v1/namespaces/prod/pods"] = {"items": []}
    result = top("--kubeconfig", kubeconfig, "-n", "prod")
    assert result.exit_code == 0, result.output
    assert "context here, namespace prod: 0 engines" in result.stdout


def test_on_a_terminal_the_table_is_updated_until_interrupted(up: StateDir, alone: Path) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "pagemill", "top", "--interval", "0.2"]
    environment = {**os.environ, "COLUMNS": "200", "LINES": "20", "TERM": "xterm"}
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        shown = b""
        while shown.count(b"DEPLOYMENT") < 2:
            shown += os.read(master, 4096)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):
            while os.read(master, 4096):
                pass
        assert process.wait(WAIT_LIMIT_S) == 0
    os.close(master)


def test_what_is_shown_once_fits_a_terminal_of_80_columns(up: StateDir, alone: Path) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "pagemill", "top", "--once", "--interval", "0.2"]
    environment = {**os.environ, "COLUMNS": "80"}
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        shown = b""
        with contextlib.suppress(OSError):
            while data := os.read(master, 4096):
                shown += data
        assert process.wait(WAIT_LIMIT_S) == 0
    os.close(master)
    lines = shown.decode().splitlines()
    assert " sim-1 " in lines[-1]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_table_fits_the_terminal(width: int) -> None:
    row = PodRow(
        "default/a-deployment", "a-deployment-engine-7d9f5c-abcde", "SmolLM2-135M-Instruct", "ready", 0.5, 3, 2
    )
    lines = as_table("here", [row], width).splitlines()
    assert max(map(len, lines[1:])) <= width
    assert "abcde" in lines[-1]
    assert ("a-deployment-engine-7d9f5c-abcde" in lines[-1]) == (width == 200)


def test_the_table_shows_what_waits_in_gateways_and_when_clients_get_their_first_tokens() -> None:
    made = metrics.Metrics(metrics.GATEWAY_METRICS)
    made.gauge(metrics.GATEWAY_QUEUE_REQUESTS, model="tiny").set(32)
    before = Reading("", "", 1.0, made.render().decode())
    for seconds in (20.0, 28.0):
        made.histogram(metrics.GATEWAY_TTFT_SECONDS, model="tiny", variant="default/chat").observe(seconds)
    seen = clients_of(before, Reading("", "", 2.0, made.render().decode()))
    assert seen == ClientsView(32.0, 24000.0)
    assert clients_of(before, Reading("", "", 2.0, fault="refused")) is None
    shown = as_table("here", [], clients=[seen])
    assert "clients: 32 waiting in gateways, first tokens after 24000 ms on average" in shown
