"""One child process: its end is bounded and complete, and the reason of its death is reported."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from waiting import WAIT_LIMIT_S, eventually

from pagemill_engine.failure import Termination, write_termination
from pagemill_operator.backends.local.child import Child, Exit, explain_exit, older, tail


async def start(code: str, log: Path) -> Child:
    return await Child.start([sys.executable, "-c", textwrap.dedent(code)], os.environ, log)


async def said(log: Path, word: str) -> list[str]:
    """Return the log's lines once `word` is among them."""
    await eventually(lambda: any(word in line for line in tail(log)))
    return tail(log)


async def test_the_termination_message_is_the_reason(tmp_path: Path) -> None:
    child = await start(
        """
        import sys
        print("loading")
        print('{"reason": "ModelNotFound", "message": "no file x"}', file=sys.stderr)
        sys.exit(1)
        """,
        tmp_path / "log",
    )
    ended = await child.wait()
    assert (ended.reason, ended.message, ended.is_permanent) == ("ModelNotFound", "no file x", False)


@pytest.mark.parametrize(("reason", "is_permanent"), [("ModelTooLarge", True), ("PortInUse", False)])
def test_an_engine_says_whether_another_start_would_fail_as_well(
    reason: str, is_permanent: bool, tmp_path: Path
) -> None:
    (log := tmp_path / "log").write_text(write_termination(Termination(reason, "The message."), None))
    assert explain_exit(1, log) == Exit(reason, "The message.", is_permanent)


async def test_without_a_termination_message_the_last_lines_and_the_exit_code_are_the_reason(tmp_path: Path) -> None:
    child = await start("import sys; sys.exit('out of luck')", tmp_path / "log")
    ended = await child.wait()
    assert ended.reason == "Crashed"
    assert ended.message == "ended with exit code 1: out of luck"


def test_for_a_kill_by_the_kernel_the_message_suggests_memory(tmp_path: Path) -> None:
    ended = explain_exit(-signal.SIGKILL, tmp_path / "missing")
    assert ended.reason == "Killed"
    assert "SIGKILL (the machine may be out of memory)" in ended.message


def test_the_message_of_a_kill_quotes_the_last_lines(tmp_path: Path) -> None:
    (log := tmp_path / "log").write_text("started\nloading weights\nbudget: 3 GiB\n\nallocating the KV cache\n")
    message = explain_exit(-signal.SIGKILL, log).message
    assert message.endswith(": loading weights | budget: 3 GiB | allocating the KV cache")


async def test_a_child_that_ignores_sigterm_is_killed_with_its_own_children(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = await start(
        """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("grandchild", grandchild.pid, flush=True)
        time.sleep(600)
        """,
        log,
    )
    grandchild = int((await said(log, "grandchild"))[0].split()[1])
    began_s = time.monotonic()
    await child.end(timeout_s=0.2)
    assert 0.2 <= time.monotonic() - began_s < WAIT_LIMIT_S
    assert not child.running
    await _gone(grandchild)


async def test_a_crash_ends_the_rest_of_its_session(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = await start(
        """
        import subprocess, sys
        grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("grandchild", grandchild.pid, flush=True)
        sys.exit(3)
        """,
        log,
    )
    await child.wait()
    await _gone(int((await said(log, "grandchild"))[0].split()[1]))


async def test_ending_a_dead_or_ended_process_has_no_effect(tmp_path: Path) -> None:
    child = await start("pass", tmp_path / "log")
    await child.wait()
    await child.end(0.1)
    await child.end(0.1)


def test_logs_are_private(tmp_path: Path) -> None:
    async def run() -> None:
        await (await start("pass", tmp_path / "log")).wait()

    asyncio.run(run())
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_child_dies_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    code = f"""
    import asyncio, os, sys
    from pathlib import Path
    from pagemill_operator.backends.local.child import Child
    async def main():
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        child = await Child.start(command, os.environ, Path({str(tmp_path / "log")!r}))
        print(child.pid, flush=True)
        await child.wait()
    asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.kill()
    asyncio.run(_gone(pid))


async def _gone(pid: int) -> None:
    await eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


async def test_a_log_stays_bounded_while_its_process_writes(tmp_path: Path) -> None:
    log, may_end = tmp_path / "log", tmp_path / "may end"
    child = await start(
        f"""
        import time
        from pathlib import Path
        for _ in range(1000):
            print("x" * 99, flush=True)
        print("half", flush=True)
        while not Path({str(may_end)!r}).exists():
            time.sleep(0.01)
        print("end", flush=True)
        """,
        log,
    )
    await said(log, "half")
    child.bound_log(max_bytes=200_000)
    assert log.stat().st_size > 100_000
    child.bound_log(max_bytes=10_000)
    may_end.touch()
    await child.wait()
    assert log.read_text() == "end\n"
    assert older(log).read_text().splitlines() == ["x" * 99] * 1000 + ["half"]


async def test_the_log_of_the_previous_process_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for word in ("first", "second", "third"):
        await (await start(f"print({word!r})", log)).wait()
    assert (older(log).read_text(), log.read_text()) == ("second\n", "third\n")


async def test_an_explanation_ends_with_the_message_of_a_json_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = {"message": "cannot go on", "level": "error"}, {"message": "m", "exception": "Trace:\nValueError: no"}
    said = []
    for line in lines:
        child = await start(f"print({json.dumps(line)!r}); raise SystemExit(3)", log)
        said.append((await child.wait()).message)
    assert said == ["ended with exit code 3: cannot go on", "ended with exit code 3: ValueError: no"]


async def test_an_ended_child_is_never_signalled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signalled: list[int] = []
    child = await start("pass", tmp_path / "log")
    monkeypatch.setattr(os, "killpg", lambda pid, number: signalled.append(pid))
    await child.wait()
    await child.end(0.1)
    assert signalled == [child.pid], "its process id may have been reused"
