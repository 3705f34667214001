"""`pagemill chat` with a canned server: one answer for a script, and a conversation in a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
from typing import Any

import pytest
from waiting import WAIT_LIMIT_S, wait_until

COMMAND = [sys.executable, "-m", "pagemill", "chat"]


def ask(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], input=stdin, capture_output=True, text=True, timeout=60)


def test_for_a_script_only_the_answer_is_printed_on_standard_output(canned_server: Any, answer_of: Any) -> None:
    canned_server.answers = [answer_of("The answer", " is ", "42.")]
    done = ask("--url", canned_server.url, "--system", "Be brief.", "--max-tokens", "9", "What", "is", "it?")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The answer is 42.\n"
    assert "3 tokens" in done.stderr
    assert "tok/s" in done.stderr
    assert "prompt 7 tokens" in done.stderr
    body = canned_server.requests[0]
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is it?"},
    ]
    assert body["model"] == "canned"
    assert body["max_tokens"] == 9
    assert body["stream_options"] == {"include_usage": True}


def test_an_answer_cannot_control_the_terminal(canned_server: Any, answer_of: Any) -> None:
    canned_server.answers = [answer_of("\x1b", "[2Jno\x9b31m\x07\tway\r\n", "ü")]
    done = subprocess.run([*COMMAND, "--url", canned_server.url, "hello"], capture_output=True, timeout=60)
    assert done.stdout.decode() == "[2Jno31m\tway\nü\n"
    canned_server.refusal = (404, "no \x1b]0;title\x07 here")
    assert "no ]0;title here" in ask("--url", canned_server.url, "hello").stderr


def test_without_a_prompt_standard_input_is_the_prompt(canned_server: Any, answer_of: Any) -> None:
    canned_server.answers = [answer_of("yes")]
    assert ask("--url", canned_server.url + "/v1", stdin="piped question\n").stdout == "yes\n"
    assert canned_server.requests[0]["messages"][-1]["content"] == "piped question"


def test_empty_standard_input_is_refused(canned_server: Any) -> None:
    done = ask("--url", canned_server.url, stdin="  \n")
    assert done.returncode == 1
    assert "no question" in done.stderr


def test_the_error_for_an_unreachable_server_says_how_to_start_one() -> None:
    done = ask("--url", "http://127.0.0.1:9", "hello")
    assert done.returncode == 1
    assert "No server answers at http://127.0.0.1:9" in done.stderr
    assert "pagemill up -f" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("url", ["nonsense", "http://", "ftp://x"])
def test_a_wrong_url_is_explained(url: str) -> None:
    done = ask("--url", url, "hello")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "pagemill chat:" in done.stderr


def test_a_refusal_shows_the_servers_message(canned_server: Any) -> None:
    canned_server.refusal = (404, "The model `x` does not exist here.")
    done = ask("--url", canned_server.url, "--model", "x", "hello")
    assert done.returncode == 1
    assert "(404): The model `x` does not exist here." in done.stderr


def test_a_missing_key_names_the_option(canned_server: Any) -> None:
    canned_server.refusal = (401, "Send a valid key.")
    assert "--api-key" in ask("--url", canned_server.url, "hello").stderr


def test_an_error_event_inside_the_stream_fails_the_call(canned_server: Any) -> None:
    canned_server.answers = [["Half an", {"error": {"message": "The engine died."}}]]
    done = ask("--url", canned_server.url, "hello")
    assert done.returncode == 1
    assert done.stdout == "Half an\n"
    assert "The engine died." in done.stderr


def test_a_stream_without_an_end_is_never_a_success(canned_server: Any) -> None:
    canned_server.answers = [["Half an"]]
    done = ask("--url", canned_server.url, "hello")
    assert done.returncode == 1
    assert "before the answer was complete" in done.stderr


def test_no_model_served_yet_is_explained(canned_server: Any) -> None:
    canned_server.models = []
    assert "serves no model yet" in ask("--url", canned_server.url, "hello").stderr


class Terminal:
    """A `pagemill chat` with a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        env = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(
            [*COMMAND, *arguments], stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True
        )
        os.close(slave)
        self.screen = ""

    def wait_for(self, text: str) -> None:
        """Read until `text` appears; drop what precedes it."""

        def is_shown() -> bool:
            if text not in self.screen and select.select([self.master], [], [], 0.1)[0]:
                self.screen += os.read(self.master, 65536).decode()
            return text in self.screen

        wait_until(is_shown, progress=lambda: self.screen, every_s=0.0)
        self.screen = self.screen.split(text, 1)[1]

    def type(self, line: str) -> None:
        os.write(self.master, line.encode() + b"\n")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


def test_a_conversation_keeps_its_history_and_supports_commands(canned_server: Any, answer_of: Any) -> None:
    canned_server.answers = [answer_of("First."), answer_of("Second."), answer_of("Third.")]
    terminal = Terminal("--url", canned_server.url)
    try:
        terminal.wait_for("> ")
        terminal.type("one")
        terminal.wait_for("First.")
        terminal.wait_for("> ")
        terminal.type("/system Be kind.")
        terminal.wait_for("system message is set")
        terminal.type("two")
        terminal.wait_for("Second.")
        terminal.wait_for("> ")
        terminal.type("/reset")
        terminal.wait_for("Started a new conversation")
        terminal.type("three")
        terminal.wait_for("Third.")
        terminal.wait_for("> ")
        terminal.type("/unknown")
        terminal.wait_for("There is no command /unknown")
        terminal.type("/quit")
        assert terminal.process.wait(WAIT_LIMIT_S) == 0
    finally:
        terminal.close()
    roles = [[message["role"] for message in body["messages"]] for body in canned_server.requests]
    assert roles == [["user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    assert canned_server.requests[1]["messages"][2]["content"] == "First."


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_not_the_program(canned_server: Any, answer_of: Any) -> None:
    canned_server.answers = [["Once upon", None], answer_of("Back again.")]
    terminal = Terminal("--url", canned_server.url)
    try:
        terminal.wait_for("> ")
        terminal.type("tell me")
        terminal.wait_for("Once upon")
        assert canned_server.hung.wait(WAIT_LIMIT_S)
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("interrupted")
        assert canned_server.left.wait(WAIT_LIMIT_S), "the server must notice that its client has left"
        terminal.type("go on")
        terminal.wait_for("Back again.")
        terminal.wait_for("> ")
        os.write(terminal.master, b"\x04")
        assert terminal.process.wait(WAIT_LIMIT_S) == 0
    finally:
        terminal.close()
    assert canned_server.requests[1]["messages"][1] == {"role": "assistant", "content": "Once upon"}


def test_a_failed_turn_leaves_the_conversation_usable(canned_server: Any, answer_of: Any) -> None:
    canned_server.answers = [[{"error": {"message": "Overloaded."}}], answer_of("Fine.")]
    terminal = Terminal("--url", canned_server.url)
    try:
        terminal.wait_for("> ")
        terminal.type("one")
        terminal.wait_for("Overloaded.")
        terminal.type("two")
        terminal.wait_for("Fine.")
    finally:
        terminal.close()
    assert [message["content"] for message in canned_server.requests[1]["messages"]] == ["two"]
