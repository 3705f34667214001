"""`pagemill up` from file to answer, with and without a terminal; no process or file remains, however it ends."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import yaml
from hung_processes import hang
from typer.testing import CliRunner
from waiting import START_LIMIT_S, WAIT_LIMIT_S, busy_factor, eventually, wait_until

from pagemill.main import app
from pagemill.up import session as session_module
from pagemill.up.loading import load_files
from pagemill.up.screen import PlainScreen, TerminalScreen
from pagemill.up.session import Session, UpRequest, run_up
from pagemill_operator.backends.local import LocalSettings
from pagemill_servers.auth import hash_key
from pagemill_servers.keys.file import check_keys_file

pytestmark = pytest.mark.slow

Run = Callable[..., subprocess.CompletedProcess[str]]
Write = Callable[..., Path]
Simulated = Callable[..., dict[str, Any]]

EXAMPLE = Path(__file__).parents[2] / "examples" / "llmdeployment.yaml"
BATCHES = Path(__file__).parents[2] / "docs" / "how-to" / "run-batches.md"
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A command with a pseudo-terminal."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self._master = master
        self.text = ""

    def until(self, word: str) -> str:
        """Wait until `word` appears in the output since the last call; return all output so far."""
        start = len(self.text)

        def is_shown() -> bool:
            self._read(0.1)
            return word in self.text[start:]

        self._wait_until(is_shown)
        return self.text

    def until_it_has_processes(self, count: int) -> list[psutil.Process]:
        """Wait until the command has this number of descendants; return them."""

        def processes() -> list[psutil.Process] | None:
            self._read(0.1)
            found = psutil.Process(self.process.pid).children(recursive=True)
            return found if len(found) >= count else None

        return self._wait_until(processes)

    def close(self) -> None:
        if self._master >= 0:
            os.close(self._master)
            self._master = -1

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def wait(self) -> int:
        def has_ended() -> bool:
            self._read(0.05)
            return self.process.poll() is not None

        self._wait_until(has_ended)
        return self.process.returncode

    def _wait_until(self, condition: Callable[[], Any]) -> Any:
        try:
            return wait_until(condition, progress=lambda: len(self.text), limit_s=START_LIMIT_S, every_s=0.0)
        except AssertionError as error:
            raise AssertionError(f"{error}; it shows:\n{self.text}") from error

    def _read(self, timeout_s: float) -> None:
        readable, _, _ = select.select([self._master], [], [], timeout_s)
        if not readable:
            return
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux: the other side was closed
            time.sleep(timeout_s)
            return
        self.text += ANSI.sub("", data.decode("utf-8", "replace")).replace("\r", "")


@contextmanager
def terminal(environment: dict[str, str], *arguments: str | Path) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, b"\x32\x00\xc8\x00\x00\x00\x00\x00")  # 50 rows, 200 columns
    process = subprocess.Popen(
        [sys.executable, "-m", "pagemill", *map(str, arguments)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**environment, "TERM": "xterm"},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(slave, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    shown = Terminal(process, master)
    try:
        yield shown
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        shown.close()


def family(pid: int) -> set[int]:
    return {child.pid for child in psutil.Process(pid).children(recursive=True)}


def assert_nothing_is_left(environment: dict[str, str], pids: set[int], port: int | None = None) -> None:
    wait_until(lambda: not any(map(_is_alive, pids)))  # the kernel ends a killed process a moment later
    assert list(Path(environment["XDG_RUNTIME_DIR"]).iterdir()) == []
    if port:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def base_port(text: str) -> int:
    return int(cast(re.Match[str], re.search(r"http://127\.0\.0\.1:(\d+)/v1", text)).group(1))


@pytest.mark.model
def test_without_a_terminal_the_first_example_answers_and_ends_and_its_logs_stay(
    pagemill: Run, environment: dict[str, str]
) -> None:
    for _ in range(5):  # an engine may be loaded between two looks at it
        result = pagemill("up", "-f", EXAMPLE, "--port", "0", timeout_s=240)
        assert result.returncode == 0, result.stdout + result.stderr
        if is_loading_shown := re.search(r"smollm2-[01]: loading .*\(\d+\.\d s\)", result.stdout):
            break
    assert is_loading_shown, result.stdout
    assert "Paris" in result.stdout
    assert re.search(r"first token after \d+ ms, answer in [\d.]+ s; [\d.]+ s from start to first token", result.stdout)
    assert result.stdout.count(": ready (") == 3
    assert result.stderr == ""
    assert_nothing_is_left(environment, set(), base_port(result.stdout))
    kept = Path(environment["XDG_STATE_HOME"]) / "pagemill" / "logs"
    assert f"at the end in {kept}" in result.stdout
    assert {"gateway.log", "smollm2-0.log"} <= {each.name for each in kept.iterdir()}


def test_in_a_terminal_edits_are_applied_and_ctrl_c_ends_the_command(
    write: Write, simulated: Simulated, environment: dict[str, str]
) -> None:
    file = write("sim.yaml", simulated())
    with terminal(environment, "up", "-f", file, "--port", "0") as shown:
        shown.until("from start to first token")
        shown.until("sim 1/1 ready")
        port = base_port(shown.text)

        file.write_text("kind: Service\n", "utf-8")
        shown.until("everything runs on unchanged")
        file.write_text(yaml.safe_dump(simulated(replicas=2)), "utf-8")
        shown.until("spec.replicas: 1 -> 2")
        shown.until("sim 2/2 ready")

        pids = family(shown.process.pid)
        assert len(pids) >= 3
        shown.press(b"\x03")
        assert shown.wait() == 0
    assert "Traceback" not in shown.text
    assert_nothing_is_left(environment, pids, port)


def test_a_second_ctrl_c_ends_processes_that_do_not_stop(
    write: Write, simulated: Simulated, environment: dict[str, str]
) -> None:
    """All processes are suspended, so the first one would wait for the time limit."""
    with terminal(environment, "up", "-f", write("sim.yaml", simulated()), "--port", "0") as shown:
        shown.until("sim 1/1 ready")
        pids = family(shown.process.pid)
        for pid in pids:
            hang(pid)
        shown.press(b"\x03")
        shown.until("Ctrl-C again")
        began_s = time.monotonic()
        shown.press(b"\x03")
        assert shown.wait() == 0
        duration_s = time.monotonic() - began_s
        assert duration_s < (LocalSettings().stop_timeout_s - 0.5) * busy_factor(), "not after the time limit"
    assert_nothing_is_left(environment, pids)


def test_an_engine_that_never_starts_is_given_up_with_its_last_lines(
    write: Write, simulated: Simulated, pagemill: Run, environment: dict[str, str]
) -> None:
    broken = simulated(engine={"env": [{"name": "PYTHONHOME", "value": "/nonexistent"}]})
    result = pagemill("up", "-f", write("sim.yaml", broken), "--port", "0")
    assert result.returncode == 1
    assert "warning: sim-0: Crashed: ended with exit code 1" in result.stdout
    assert "starting again in 0.5 s" in result.stdout
    assert result.stderr.startswith("error: sim-0: Crashed: ended with exit code 1: ")
    assert_nothing_is_left(environment, set())


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_killing_the_command_ends_every_process(
    write: Write, simulated: Simulated, environment: dict[str, str]
) -> None:
    file = write("sim.yaml", simulated())
    with terminal(environment, "up", "-f", file, "--port", "0") as shown:
        processes = shown.until_it_has_processes(2)
        shown.process.kill()
        shown.process.wait()
    _, alive = psutil.wait_procs(processes, timeout=WAIT_LIMIT_S)
    assert not alive


def test_an_interrupt_during_loading_stops_the_command_at_once(
    write: Write, simulated: Simulated, environment: dict[str, str]
) -> None:
    file = write("sim.yaml", simulated(replicas=2))
    with terminal(environment, "up", "-f", file, "--port", "0") as shown:
        shown.until("waiting for")
        pids = family(shown.process.pid)
        shown.press(b"\x03")
        assert shown.wait() == 130
    assert "Traceback" not in shown.text
    assert_nothing_is_left(environment, pids)


def test_a_closed_output_ends_the_command_without_remains(
    write: Write, simulated: Simulated, environment: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "pagemill", "up", "-f", str(write("sim.yaml", simulated())), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment, text=True
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.readline()
        pids = family(process.pid)
        process.stdout.close()
        assert process.wait(60) != 0
        assert "Traceback" not in process.stderr.read()
    assert_nothing_is_left(environment, pids)


def test_the_shown_request_and_the_batch_of_the_how_to_work_until_the_terminal_closes(
    write: Write, simulated: Simulated, environment: dict[str, str], tmp_path: Path
) -> None:
    file = write("sim.yaml", simulated())
    with terminal(environment, "up", "-f", file, "--port", "0", "--batches-directory", tmp_path / "batches") as shown:
        shown.until("sim 1/1 ready")
        _try_what_is_shown(shown)
        _run_the_batch(f"http://127.0.0.1:{base_port(shown.text)}", tmp_path)
        pids = family(shown.process.pid)
        shown.close()
        shown.process.wait(WAIT_LIMIT_S)
    assert_nothing_is_left(environment, pids, base_port(shown.text))


def test_a_gpu_that_is_not_there_is_named_at_once(
    write: Write, simulated: Simulated, pagemill: Run, environment: dict[str, str]
) -> None:
    file = write("gpu.yaml", simulated(resources={"gpus": 1}))
    environment["CUDA_VISIBLE_DEVICES"] = ""
    result = pagemill("up", "-f", file, "--port", "0")
    assert result.returncode == 2
    assert "spec.resources.gpus asks for GPUs, but this machine has no NVIDIA GPU" in result.stderr


def test_what_a_terminal_shows_is_what_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    TerminalScreen().line("curl http://a \\")
    TerminalScreen().warn("[red]x[/red] \\")
    assert capsys.readouterr().out == "curl http://a \\\nwarning: [red]x[/red] \\\n"


def _try_what_is_shown(shown: Terminal) -> None:
    command = cast(re.Match[str], re.search(r"Try +(curl .*\n.*)\n", shown.text)).group(1)
    answered = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=WAIT_LIMIT_S)
    assert json.loads(answered.stdout)["choices"], answered.stderr
    body = json.loads(cast(re.Match[str], re.search("-d '(.*)'", command)).group(1))
    logs = Path(cast(re.Match[str], re.search(r"Logs +(\S+)/\*\.log", shown.text)).group(1))
    assert [each.name for each in sorted(logs.glob("*.log"))] == ["gateway.log", "sim-0.log"]
    status = cast(re.Match[str], re.search(r"http://\S+/status", shown.text)).group(0)
    file = Path(cast(re.Match[str], re.search(r"Control token +(\S+)", shown.text)).group(1))
    assert file.stat().st_mode & 0o777 == 0o600
    headers = {"Authorization": f"Bearer {file.read_text().strip()}"}
    with urllib.request.urlopen(urllib.request.Request(status, headers=headers), timeout=WAIT_LIMIT_S) as answer:
        assert json.loads(answer.read())["models"][0]["name"] == body["model"] == "sim"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(status, timeout=WAIT_LIMIT_S)


def _run_the_batch(url: str, folder: Path) -> None:
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", BATCHES.read_text(), re.MULTILINE | re.DOTALL)
    code = snippet.replace("http://127.0.0.1:8080", url).replace('"smollm2"', '"sim"')
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=WAIT_LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    assert sorted(line.split()[0] for line in done.stdout.splitlines()) == ["q0", "q1"]


def test_an_error_for_a_port_in_use_names_the_flag(
    write: Write, simulated: Simulated, pagemill: Run, environment: dict[str, str]
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        result = pagemill("up", "-f", write("sim.yaml", simulated()), "--port", str(port))
    assert result.returncode == 1
    assert (
        f"error: port {port} of 127.0.0.1 is in use by another process; choose another one with --port" in result.stderr
    )
    assert_nothing_is_left(environment, set())


async def test_an_unexpected_error_while_serving_is_one_line_and_exit_code_1(
    write: Write, simulated: Simulated, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail(session: Session) -> None:
        raise ValueError("no such thing\nand more")

    monkeypatch.setattr(Session, "run", Session._serve)
    monkeypatch.setattr(Session, "_follow_files", fail)
    file = write("sim.yaml", simulated())
    request = UpRequest([file], keep=True, started_at_s=0.0, settings=LocalSettings(port=0))
    assert await run_up(request, load_files([file]).loaded, PlainScreen()) == 1
    assert capsys.readouterr().err == (
        "error: unexpected ValueError: no such thing; everything was stopped, start it again\n"
    )


class RememberedWarnings(PlainScreen):
    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


async def test_each_fault_of_the_keys_file_is_shown_once_while_serving(
    write: Write, simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, good = write("sim.yaml", simulated()), f"{hash_key('sk-1')} tenant=a\n"
    keys, screen = write("keys.txt", good), RememberedWarnings()
    looks: list[str] = []

    def check(path: Path) -> None:
        looks.append(path.read_text() if path.exists() else "")
        check_keys_file(path)

    async def shown_after(lines: str) -> list[str]:
        """Return the warnings while the file has these lines: after the second look, nothing is repeated."""
        before = len(screen.warnings)
        write("keys.new", lines).replace(keys)
        await eventually(lambda: serving.done() or looks[-2:] == [lines, lines])
        assert not serving.done(), serving.exception()
        return screen.warnings[before:]

    monkeypatch.setattr(session_module, "check_keys_file", check)
    request = UpRequest([file], keep=True, started_at_s=0.0, settings=LocalSettings(port=0, api_keys_file=keys))
    serving = asyncio.create_task(Session(request, load_files([file]).loaded, screen)._serve())
    try:
        (plain,) = await shown_after(good + "sk-secret\n")
        assert await shown_after(good) == []
        assert await shown_after(good + "sk-secret\n") == [plain]
        (unknown,) = await shown_after(good + f"{hash_key('sk-2')} colour=red\n")
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    assert plain.startswith(f"line 2 of {keys} ")
    assert plain.endswith("; the keys known before stay in use")
    assert "sk-secret" not in plain
    assert "colour" in unknown


def test_an_open_address_requires_keys(write: Write, simulated: Simulated) -> None:
    result = CliRunner().invoke(app, ["up", "-f", str(write("sim.yaml", simulated())), "--host", "0.0.0.0"])
    assert result.exit_code == 2
    assert "--api-keys" in result.stderr


def _up_to(lines: Iterator[str], word: str) -> Iterator[str]:
    for line in lines:
        yield line
        if word in line:
            return
    raise AssertionError(f"the command ended before it printed {word!r}")


def test_with_keep_the_command_serves_until_sigterm_and_why_replays_its_decisions(
    write: Write, simulated: Simulated, pagemill: Run, environment: dict[str, str]
) -> None:
    autoscaling = {"minReplicas": 0, "maxReplicas": 2, "scaleToZeroAfter": "1s"}
    environment["KUBECONFIG"] = "/nonexistent"
    file = write("sim.yaml", simulated(autoscaling=autoscaling))
    command = [sys.executable, "-m", "pagemill", "up", "-f", str(file), "--port", "0", "--keep"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment, text=True
    ) as process:
        assert process.stdout
        lines = iter(process.stdout.readline, "")
        said = list(_up_to(lines, "Ctrl-C stops everything"))
        said += _up_to(lines, "scaled to 0 replicas from 1")
        result = pagemill("why", "sim", "--replay", "-o", "json")
        other = pagemill("why", "other")
        pids = family(process.pid)
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait(WAIT_LIMIT_S) == 0
    assert rest.endswith("stopped\n")
    assert result.returncode == 0, result.stderr
    body = json.loads(result.stdout)
    assert body["recordedBy"] == f"`pagemill up` (process {process.pid})"
    assert "ScaledToZero" in [record["decision"]["reason"] for record in body["records"]]
    assert all(each["same"] for each in body["replays"])
    assert "it serves default/sim" in other.stderr
    assert_nothing_is_left(environment, pids, base_port("".join(said)))
