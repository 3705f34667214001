"""Server logs: each line is a JSON object with time, level, and the id of its request."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

LOGGED = """
import logging
from pagemill_servers.process import logs
logs.configure("INFO", process="server")
try:
    raise ValueError("no")
except ValueError:
    logging.getLogger("a.b").exception("a request failed", extra={"request_id": "r-1"})
logging.getLogger("a.c").info("two\\nlines")
"""


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    """Return the log lines of a new process, because logging is global."""
    done = subprocess.run([sys.executable, "-c", LOGGED], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_a_line_has_time_level_logger_and_request(lines: list[dict[str, Any]]) -> None:
    failed = lines[0]
    assert (failed["level"], failed["process"], failed["logger"]) == ("error", "server", "a.b")
    assert (failed["message"], failed["request_id"]) == ("a request failed", "r-1")
    assert failed["exception"].endswith("ValueError: no")
    assert len(failed["time"]) == len("2026-01-01T00:00:00")


def test_a_message_of_several_lines_is_one_log_line(lines: list[dict[str, Any]]) -> None:
    assert lines[1]["message"] == "two\nlines"
    assert "request_id" not in lines[1]
    assert len(lines) == 2
