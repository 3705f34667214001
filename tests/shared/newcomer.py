"""A newcomer: pastes the commands of a page, in order, into bash on a terminal, in a new folder and an empty home.

Each newcomer has a network of its own, so the ports of the pages are free. A command that serves stays in the
foreground of a terminal of its own, until the next one that serves; all others are pasted into one terminal.
`house/test_pages_in_order` names the pages.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import signal
import subprocess
import tempfile
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from waiting import START_LIMIT_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[=>])")
PROMPT = re.compile(r"\[(\d+):(\d+)\] ")
"""The prompt of each terminal: the number of commands so far, and the last exit status that was not 0."""
BASHRC = "failed=0; trap 'failed=$?' ERR; PROMPT_COMMAND='((++number))'; PS1='[$number:$failed] '\n"
SERVING = {
    r"^make up$": "Ctrl-C stops everything",
    r"pagemill up ": "Ctrl-C stops everything",
    r"pagemill serve ": "Ready after",
    r"pagemill gateway ": '"event":"listening"',
}
"""Commands that serve until Ctrl-C, and what they show when they do."""
IN_FRONT = "--engine http"
"""The option of a gateway that stands in front of the engine that is served already."""
NO_IS_AN_ANSWER = "pagemill plan "
"""A command that ends with 1 where this machine is too slow for the load, as its page says."""
TALKS = re.compile(r"^(make|\S*pagemill) chat")
QUESTION = "Say hello."
INTERRUPTED_MAKE = 2
PASTE_BEGINS, PASTE_ENDS = "\x1b[200~", "\x1b[201~"


class Step(NamedTuple):
    """A block of a page: commands for bash, or a Python program."""

    page: str
    language: str
    text: str


def steps_of(page: Path) -> list[Step]:
    """Return the blocks of bash and Python of a page, in order."""
    found = re.findall(r"^```(bash|sh|python)\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [Step(str(page.relative_to(ROOT)), "python" if kind == "python" else "bash", text) for kind, text in found]


def ready_words(text: str) -> str | None:
    """Return what a command that serves shows when it does; None for commands that end."""
    return next((shown for begin, shown in SERVING.items() if re.search(begin, text.strip())), None)


def can_have_networks() -> bool:
    """Whether this user may create network namespaces."""
    programs = [shutil.which(name) for name in ("unshare", "nsenter", "ip")]
    return None not in programs and subprocess.run([*_network(), "true"], capture_output=True).returncode == 0


def _network() -> list[str]:
    return ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"])]


class Terminal:
    """bash on a pseudo-terminal; its output is read all the time, so that no program waits for a reader."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str]) -> None:
        self.text = ""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, b"\x32\x00\x50\x00\x00\x00\x00\x00")  # 50 rows, 80 columns
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(slave, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.number = self._until_prompt(0)[0]

    def paste(self, text: str) -> None:
        """Paste as terminals do: all lines at once, then Enter."""
        os.write(self._master, f"{PASTE_BEGINS}{text.rstrip()}{PASTE_ENDS}\r".encode())

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def run(self, text: str) -> int:
        """Paste commands, and wait for the next prompt. Returns the last exit status that was not 0."""
        self.paste(text)
        return self.until_prompt()

    def forget_failures(self) -> None:
        """Let the prompt show 0 again, after an exit status that a page explains."""
        self.run("failed=0")

    def until_prompt(self) -> int:
        self.number, status = self._until_prompt(self.number)
        return status

    def until(self, words: str, since: int = 0) -> None:
        self.until_matches(re.escape(words), since)

    def until_matches(self, pattern: str, since: int) -> None:
        """Wait until this appears after the first `since` characters, or a prompt does, which is an error."""
        self._wait(lambda: re.search(pattern, self.text[since:]) or self._prompt(self.number))
        assert re.search(pattern, self.text[since:]), f"{pattern} did not appear:\n{self.text[since:]}"

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGHUP)
            self.process.wait()
        self._reader.join(START_LIMIT_S)
        os.close(self._master)

    def _until_prompt(self, number: int) -> tuple[int, int]:
        found: tuple[int, int] = self._wait(lambda: self._prompt(number))
        return found

    def _prompt(self, number: int) -> tuple[int, int] | None:
        """Return the prompt at the end of the output if it is a later one."""
        shown = list(PROMPT.finditer(self.text[-200:]))
        if not shown or self.text[-200:][shown[-1].end() :].strip() or int(shown[-1][1]) <= number:
            return None
        return int(shown[-1][1]), int(shown[-1][2])

    def _wait(self, condition: Callable[[], Any]) -> Any:
        # A status line that is drawn again is no progress; complete lines are.
        try:
            return wait_until(condition, progress=lambda: self.text.count("\n"), limit_s=START_LIMIT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; the terminal shows:\n{self.text[-4000:]}") from error

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # Linux: the other side was closed
                return
            self.text += ESCAPES.sub("", data.decode("utf-8", "replace")).replace("\r", "")


class Newcomer:
    """Two terminals of one user in one folder."""

    def __init__(self, folder: Path, environment: dict[str, str], stack: ExitStack) -> None:
        self.folder = folder
        self._environment = environment
        self._stack = stack
        self._asking = self._open([*_network(), *self._bash()])
        assert self._asking.run("ip link set lo up") == 0, self._asking.text
        self._serving: list[Terminal] = []
        self._num_programs = 0

    def take(self, step: Step) -> None:
        """Do what a block says; fails when a command does."""
        text = step.text if step.language == "bash" else self._program(step.text)
        if (ready := ready_words(text)) is not None:
            self._serve(text, ready)
        elif TALKS.match(text):
            self._talk(text)
        else:
            began = len(self._asking.text)
            status = self._asking.run(text)
            is_answered = status == 0 or (
                NO_IS_AN_ANSWER in text and "No number of replicas" in self._asking.text[began:]
            )
            assert is_answered, f"{step.page}: exit status {status}:\n{self._asking.text[began:]}"
            self._asking.forget_failures()

    def stop(self) -> None:
        """Press Ctrl-C where something is served; the last one first."""
        while self._serving:
            terminal = self._serving.pop()
            terminal.press("\x03")
            terminal.until_prompt()

    def _serve(self, text: str, ready: str) -> None:
        if IN_FRONT not in text:
            self.stop()
        joined = ["nsenter", f"--target={self._asking.process.pid}", "--net"]
        if os.geteuid() != 0:
            joined += ["--user", "--preserve-credentials"]
        terminal = self._open([*joined, *self._bash()])
        self._serving.append(terminal)
        terminal.paste(text)
        terminal.until(ready)

    def _talk(self, text: str) -> None:
        """Ask something, stop the answer once it begins, and quit."""
        terminal, began = self._asking, len(self._asking.text)
        terminal.paste(text)
        terminal.until("\n> ", began)
        began = len(terminal.text)
        terminal.press(f"{QUESTION}\n")
        terminal.until_matches(rf"{QUESTION}\n\s*\S", began)
        terminal.press("\x03")
        terminal.until("\n> ", began)
        terminal.press("/quit\n")
        # `make` has got the Ctrl-C as well, and ends with it.
        assert terminal.until_prompt() in (0, 130, INTERRUPTED_MAKE), terminal.text[began:]
        terminal.forget_failures()

    def _program(self, text: str) -> str:
        """Return the command that runs a Python program of the page, which is saved as a file."""
        self._num_programs += 1
        file = f"program_{self._num_programs}.py"
        (self.folder / file).write_text(text, "utf-8")
        return f".venv/bin/python {file}"

    def _bash(self) -> list[str]:
        return ["bash", "--rcfile", f"{self.folder.parent / 'bashrc'}", "-i"]

    def _open(self, command: list[str]) -> Terminal:
        terminal = Terminal(command, self.folder, self._environment)
        self._stack.callback(terminal.close)
        return terminal


@contextmanager
def newcomer() -> Iterator[Newcomer]:
    """Give a newcomer a checkout whose environment is installed, and an empty home; both are removed at the end."""
    with tempfile.TemporaryDirectory(prefix="pm-new-") as place, ExitStack() as stack:
        folder, home, runtime = (Path(place) / name for name in ("pagemill", "home", "run"))
        for each in (folder, home, runtime):
            each.mkdir(mode=0o700)
        (Path(place) / "bashrc").write_text(BASHRC, "utf-8")
        _check_out(folder)
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "SSL_CERT_FILE") if name in os.environ}
        environment = {**kept, "HOME": str(home), "XDG_RUNTIME_DIR": str(runtime), "TERM": "xterm"}
        them = Newcomer(folder, environment, stack)
        yield them
        them.stop()


def _check_out(folder: Path) -> None:
    """Link the repository's entries and the installed environment; copy the examples, which users edit."""
    for entry in ROOT.iterdir():
        if entry.name == "examples":
            shutil.copytree(entry, folder / entry.name)
        elif entry.name not in (".git", ".venv", ".uv", ".pagemill"):
            (folder / entry.name).symlink_to(entry)
    (folder / ".venv").mkdir()
    for entry in (ROOT / ".venv").iterdir():
        (folder / ".venv" / entry.name).symlink_to(entry)
    (folder / ".uv" / "bin").mkdir(parents=True)
    # `make up` installs nothing: its mark is newer than all that it is made of.
    for mark in (folder / ".uv" / "bin" / "uv", folder / ".venv" / ".runnable"):
        mark.unlink(missing_ok=True)
        mark.touch()
