"""The real programs `prometheus` and `promtool`, from Debian's package `prometheus`.

Without them, tests are skipped with a visible reason; in CI (`CI` is set) they fail.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from waiting import WAIT_LIMIT_S, wait_until

from pagemill_operator.backends.local.ports import free_port


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        reason = f"there is no {name}: install Debian's package prometheus"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [program("promtool"), *map(str, arguments)]
    # Garbage collection takes a fifth of its time and frees little.
    environment = {**os.environ, "GOGC": "400"}
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_LIMIT_S, env=environment)


class Prometheus:
    """A running Prometheus server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of a response; raise `AssertionError` with the cause if an expression cannot be evaluated."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=WAIT_LIMIT_S) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=WAIT_LIMIT_S):
                return True
        except OSError:
            return False


@contextmanager
def prometheus(folder: Path, targets: list[dict[str, Any]], rules: Path) -> Iterator[Prometheus]:
    """Run a server that scrapes `targets` (scrape configurations) every second and evaluates `rules`."""
    executable, port = program("prometheus"), free_port()
    intervals = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    settings = {"global": intervals, "rule_files": [str(rules)], "scrape_configs": targets}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
    command = [executable, f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
    server = Prometheus(f"http://127.0.0.1:{port}")

    def is_up() -> bool:
        assert process.poll() is None, (folder / "prometheus.log").read_text()
        return server.is_ready()

    try:
        wait_until(is_up)
        yield server
    finally:
        process.kill()
        process.wait()
