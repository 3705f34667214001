"""The checks of clients that are programs built here: each runs the program with the base URL and the check's name."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

from checks import base_url, check, report_all

CHECKS: dict[str, str] = {
    "models": "models, all and one",
    "chat": "chat",
    "stream": "chat, streamed with usage",
    "tools": "a tool's call and its result",
    "embeddings": "embeddings",
    "errors": "errors by status, code and field",
}
"""Names of the program's checks, and what they check; `client_catalogue` reads them here."""


def report() -> None:
    for name, about in CHECKS.items():
        check(about)(_run_of(name))
    report_all()


def _run_of(name: str) -> Callable[[], None]:
    def run() -> None:
        argv = [os.environ["PAGEMILL_PROGRAM"], base_url(), name]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr

    return run
