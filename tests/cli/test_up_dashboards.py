"""`pagemill up --dashboards`: the started programs, their configuration, and the message for a missing program."""

from __future__ import annotations

import json
import re
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import yaml
from prometheus import Prometheus, program
from waiting import WAIT_LIMIT_S, wait_until

from pagemill.up.dashboards import Dashboards
from pagemill.up.screen import Screen
from pagemill_operator.backends.deployment_metrics import DEPLOYMENT_METRICS
from pagemill_operator.backends.local import LocalBackend, LocalSettings
from pagemill_protocol.metrics import Metrics, Scrape

PAGES = {"pagemill-autoscaling", "pagemill-fleet", "pagemill-gateway", "pagemill-model", "pagemill-operator"}
SLEEPER = '#!/bin/sh\n/usr/bin/env > {folder}/environment\necho "$@" > {folder}/arguments\nexec {sleep} 600\n'


class Recorded:
    """Records the lines of the screen."""

    interactive = False

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    warn = stream = status = line


class Backend:
    """The part of a backend that dashboards need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gateway = SimpleNamespace(base_url="http://127.0.0.1:1")

    def scrape(self, accept: str) -> Scrape:
        return Metrics(DEPLOYMENT_METRICS).scrape(accept)


def install(folder: Path, name: str) -> Path:
    """Install a program in a PATH of `folder` that records its arguments; return the folder of its records."""
    written = folder / f"{name}-started"
    written.mkdir()
    sleep = subprocess.run(["which", "sleep"], capture_output=True, text=True, check=True).stdout.strip()
    path = folder / name
    path.write_text(SLEEPER.format(folder=written, sleep=sleep))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return written


def uids(folder: str) -> set[str]:
    return {json.loads(path.read_text())["uid"] for path in Path(folder).glob("*.json")}


@asynccontextmanager
async def started(folder: Path, programs: Path) -> AsyncIterator[list[str]]:
    """Start the dashboards; yield the shown lines."""
    screen = Recorded()
    settings = LocalSettings(environment={"PATH": f"{programs}"})
    backend = cast(LocalBackend, Backend(folder))
    dashboards = Dashboards(backend, settings, cast(Screen, screen))
    try:
        await dashboards.start()
        yield screen.lines
    finally:
        await dashboards.stop()


async def test_without_prometheus_the_message_says_what_to_install(tmp_path: Path) -> None:
    async with started(tmp_path, tmp_path) as lines:
        (line,) = lines
        assert "prometheus is not on the PATH" in line
        assert "apt-get install prometheus" in line


async def test_without_grafana_prometheus_runs_and_the_message_says_what_to_install(tmp_path: Path) -> None:
    install(tmp_path, "prometheus")
    async with started(tmp_path, tmp_path) as (prometheus, missing):
        assert prometheus.startswith("Prometheus        http://127.0.0.1:")
        assert "https://grafana.com/grafana/download" in missing
        found = re.search(r"files of (\S+) into", missing)
        assert found is not None
        assert uids(found.group(1)) == PAGES


async def test_grafana_has_prometheus_and_all_dashboards(tmp_path: Path) -> None:
    install(tmp_path, "prometheus")
    written = install(tmp_path, "grafana")
    async with started(tmp_path, tmp_path) as lines:
        url, grafana = lines[0].split()[1], lines[1].split()[1]
        wait_until(lambda: (written / "arguments").is_file() and (written / "arguments").read_text())
        environment = dict(line.split("=", 1) for line in (written / "environment").read_text().splitlines() if line)
    assert (written / "arguments").read_text().split()[0] == "server"
    assert grafana == f"http://127.0.0.1:{environment['GF_SERVER_HTTP_PORT']}/dashboards"
    provisioning = Path(environment["GF_PATHS_PROVISIONING"])
    (source,) = yaml.safe_load((provisioning / "datasources" / "pagemill.yaml").read_text())["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", url, True)
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "pagemill.yaml").read_text())["providers"]
    assert uids(provider["options"]["path"]) == PAGES


async def test_a_program_that_exits_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "prometheus"
    path.write_text("#!/bin/sh\necho no such disk\nexit 3\n")
    path.chmod(0o755)
    screen = Recorded()
    backend = cast(LocalBackend, Backend(tmp_path))
    dashboards = Dashboards(backend, LocalSettings(environment={"PATH": f"{tmp_path}"}), cast(Screen, screen))
    await dashboards.start()
    (watch,) = dashboards._watches
    await watch
    await dashboards.stop()
    assert "prometheus ended with exit code 3: no such disk" in screen.lines[-1]


@pytest.mark.slow
def test_a_real_prometheus_scrapes_all_processes_and_ends_with_them(
    write: Callable[..., Path], simulated: Callable[..., dict[str, Any]], environment: dict[str, str]
) -> None:
    program("prometheus")
    file = write("sim.yaml", simulated())
    command = [sys.executable, "-m", "pagemill", "up", "-f", str(file), "--port", "0", "--keep", "--dashboards"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment, text=True
    ) as process:
        assert process.stdout
        shown = ""
        for line in process.stdout:
            shown += line
            if "Ctrl-C stops everything" in line:
                break
        children = psutil.Process(process.pid).children(recursive=True)
        targets = Path(cast(re.Match[str], re.search(r"Logs +(\S+)/\*", shown)).group(1)) / "targets.json"
        jobs = {each["labels"]["job"] for each in json.loads(targets.read_text())}
        assert jobs == {"pagemill-operator", "pagemill-gateway", "pagemill-engine"}, "all that the built-in one scrapes"
        try:
            found = re.search(r"Prometheus +(http://\S+)", shown)
            assert found is not None, shown
            assert_everything_is_recorded(Prometheus(found.group(1)))
        finally:
            process.send_signal(signal.SIGTERM)
            process.stdout.read()
            process.wait(WAIT_LIMIT_S)
    wait_until(lambda: not any(map(_is_prometheus, children)))


def _is_prometheus(process: psutil.Process) -> bool:
    try:
        return process.name() == "prometheus" and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_everything_is_recorded(server: Prometheus) -> None:
    wanted = {
        "up": 3,
        'pagemill_engine_ready{job="pagemill-engine",variant="default/sim"} == 1': 1,
        'vllm:kv_cache_usage_perc{pod="sim-0"}': 1,
        'pagemill_gateway_endpoints{job="pagemill-gateway",variant="default/sim",phase="ready"} == 1': 1,
        'pagemill_deployment_ready_replicas{job="pagemill-operator",variant="default/sim"} == 1': 1,
    }
    wait_until(lambda: all(len(server.query(query)) == count for query, count in wanted.items()), every_s=0.5)
    rules = [rule for group in server.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 20
    assert [rule["name"] for rule in rules if rule.get("lastError")] == []
