"""Runs the commands of the README and docs/ with the real model and one server.

The ports of the pages are replaced by the server's. tests/cli tests `make up` and `pagemill up`.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from encoder_models import ENCODERS, write_encoder, write_wordpiece
from waiting import WAIT_LIMIT_S

from pagemill_operator.backends.local.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = ["SmolLM2-135M-Instruct", "smollm2"]
READY_TIMEOUT_S = 120.0
FOLDER = '"FOLDER"'
"""Replaces a folder of the user in snippets."""
SEPARATOR = "-- next snippet --"

pytestmark = [pytest.mark.model]


def fenced(language: str) -> list[str]:
    pattern = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [block for page in PAGES for block in pattern.findall(page.read_text())]


def commands(start: str) -> list[str]:
    lines = "\n".join(fenced("bash")).replace("\\\n", " ").splitlines()
    return sorted({" ".join(line.split()) for line in lines if line.startswith(start)})


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Start `pagemill serve` like the pages, on free ports and with the names that the pages use."""
    (documented,) = commands(".venv/bin/pagemill serve")
    port = free_port()
    words = shlex.split(documented.replace("--port 8000", f"--port {port}"))[1:]
    argv = [sys.executable, "-m", "pagemill", *words, "--control-port", "0", "--max-model-len", "1024"]
    argv += [word for name in NAMES for word in ("--served-name", name)]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_until_ready(process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(WAIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    """Return at the server's ready line, and continue to read its output, so that it never blocks."""
    lines: list[str] = []
    settled = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                lines.append(line)
                if "Ready after" in line:
                    settled.set()
        settled.set()

    threading.Thread(target=read, daemon=True).start()
    assert settled.wait(READY_TIMEOUT_S), f"not ready: {''.join(lines)}"
    assert process.poll() is None, f"the server ended: {''.join(lines)}"


def at(server: str, text: str) -> str:
    """Return the text with the server's address, and with answers of 8 tokens in place of 60."""
    return re.sub(r"(max_tokens\"?[:=] ?)60\b", r"\g<1>8", re.sub(r"http://127\.0\.0\.1:80[08]0", server, text))


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("line", commands("curl"))
def test_curl_commands_get_an_answer(server: str, line: str) -> None:
    done = subprocess.run([*shlex.split(at(server, line)), "-sf"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if " -d " in line:
        assert json.loads(done.stdout)["usage"]["completion_tokens"] > 0


def test_chat_commands_get_an_answer(server: str) -> None:
    (line,) = commands(".venv/bin/pagemill chat")
    words = shlex.split(at(server, line))[1:]
    argv = [sys.executable, "-m", "pagemill", *words, "--max-tokens", "8", "Say hello."]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    # The answer is sampled and may end before the limit.
    assert re.search(r"^[1-8] tokens?, [\d.]+ tok/s", done.stderr, re.MULTILINE), done.stderr


@pytest.mark.slow
def test_bench_commands_print_a_report(server: str, tmp_path: Path) -> None:
    """Comparisons read what was saved before."""
    lines = sorted(commands(".venv/bin/pagemill bench"), key=lambda line: "--compare" in line)
    assert len(lines) >= 6
    for line in lines:
        words = shlex.split(line)[1:]
        if "--compare" not in words:
            words += ["--url", server, "--requests", "8", "--output-tokens", "2", "--max-seconds", "60"]
        argv = [sys.executable, "-m", "pagemill", *words]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout.splitlines()[-1])
        if "--compare" not in words and "--sweep" not in words:
            assert report["completion_tokens"] == 16
    assert (tmp_path / "sweep.svg").is_file()


WITH_CLIENT = re.compile(r"^(?:import|from) (?:openai|anthropic)", re.MULTILINE)


def is_for_an_engine(block: str) -> bool:
    """Whether the block works with an engine; batches need a gateway, and tests/cli/test_up_session.py runs them."""
    return WITH_CLIENT.search(block) is not None and "client.batches" not in block


@pytest.mark.slow
def test_snippets_with_a_client_run(server: str) -> None:
    """Each snippet prints something. All run in one process, because imports take most of their time."""
    snippets = [at(server, block) for block in fenced("python") if is_for_an_engine(block)]
    assert len(snippets) >= 5
    done = run_python(f"\nprint({SEPARATOR!r})\n".join(snippets))
    assert done.returncode == 0, done.stderr
    assert all(part.strip() for part in done.stdout.split(SEPARATOR)), done.stdout


@pytest.mark.slow
def test_offline_snippets_run(tmp_path: Path) -> None:
    """A tiny encoder replaces the user's model."""
    blocks = fenced("python")
    (with_folder,) = (block for block in blocks if FOLDER in block)
    snippets = [block for block in blocks if "from pagemill import LLM" in block and block != with_folder]
    assert len(snippets) >= 3
    name, config = ENCODERS["bert"]
    write_encoder(name, config, tmp_path)
    write_wordpiece(tmp_path)
    tail = f"print({SEPARATOR!r}, len(vectors), len(vectors[0]), len(scores))"
    code = "".join(in_one_engine(snippets)) + with_folder.replace(FOLDER, f'"{tmp_path}"') + tail
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert done.stdout.split(SEPARATOR)[1].split() == ["2", str(config["hidden_size"]), "1"]


def in_one_engine(snippets: list[str]) -> Iterator[str]:
    """Return the snippets such that those that load a model by the same line share the first one's engine."""
    made: dict[str, list[str]] = {}
    for block in snippets:
        (line,) = re.findall(r"^(?:llm = LLM\(.*?\)|with LLM\(.*)$", block, re.MULTILINE | re.DOTALL)[:1]
        made.setdefault(line, []).append(block)
    for line, blocks in made.items():
        yield "\n".join([blocks[0], *(block.replace(line, "") for block in blocks[1:])])
        yield "\nllm.close()\n"


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
