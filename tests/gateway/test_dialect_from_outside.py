"""The dialect of docs/how-to/add-a-dialect.md works as a package of its own, through a gateway and its engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from light_model import light_model
from packages import write_package
from waiting import event_in, wait_until

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "add-a-dialect.md"
TOKEN = "internal-secret"

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the page's package as an installer does; return its folder."""
    text, site = PAGE.read_text(), tmp_path_factory.mktemp("site")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    ((group, name, target),) = re.findall(r'entry-points\."([^"]+)"\]\n(\w+) = "([^"]+)"', text)
    write_package(site, "plain", code, group, f"{name} = {target}")
    return site


@pytest.fixture(scope="module")
def url(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the URL of a gateway in front of one simulated engine."""
    folder = tmp_path_factory.mktemp("servers")
    processes: list[subprocess.Popen[bytes]] = []

    def start(module: str, settings: dict[str, Any]) -> dict[str, Any]:
        path, log = folder / f"{module}.json", folder / f"{module}.log"
        path.write_text(json.dumps(settings))
        environment = {**os.environ, "PYTHONPATH": str(site)}
        with log.open("wb") as output:
            argv = [sys.executable, "-m", module, "--settings", str(path)]
            processes.append(subprocess.Popen(argv, stdout=output, stderr=output, env=environment))
        return event_in(log, "listening", processes[-1])

    try:
        engine = {"model": light_model(), "null_runner": True, "num_kv_blocks": 64, "max_model_len": 512}
        ports = start(
            "pagemill_engine.server",
            {"engine": engine, "server": {"port": 0, "control_port": 0, "internal_token": TOKEN}},
        )
        data, control = (f"http://127.0.0.1:{ports[name]}" for name in ("port", "control_port"))
        endpoint = {"id": "one", "data_url": data, "control_url": control}
        catalog = {"models": [{"deployment": "d", "name": "m", "engine_token": TOKEN, "endpoints": [endpoint]}]}
        url = start("pagemill_gateway", {"port": 0, "control_port": 0, "catalog": catalog})["url"]
        wait_until(lambda: _status(f"{url}/readyz") == 200)
        yield url
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def ask(url: str, **fields: Any) -> tuple[int, bytes]:
    body = json.dumps({"model": "m", "text": "Once upon a time", "max_words": 5, **fields}).encode()
    request = urllib.request.Request(f"{url}/v1/plain", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.slow
def test_the_dialect_answers_whole_and_streamed(url: str) -> None:
    status, body = ask(url)
    answer = json.loads(body)
    assert (status, 1 <= answer["words"] <= 5) == (200, True)
    status, stream = ask(url, stream=True)
    events = [event.split("\n") for event in stream.decode().split("\n\n")[:-1]]
    assert (status, {name for name, _ in events}) == (200, {"event: text", "event: end"})
    assert events[-1][0] == "event: end"


def test_errors_have_the_shape_of_the_dialect(url: str) -> None:
    assert ask(url, text=7) == (400, b'{"failed": "`text` must be a string, got 7.", "field": "text"}')
    status, body = ask(url, model="other")
    assert (status, json.loads(body)["field"]) == (404, "model")
