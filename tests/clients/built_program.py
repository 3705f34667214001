"""Runs one check of a client that is a program built here: its arguments are the base URL and the check's name."""

from __future__ import annotations

import os
import subprocess

from checks import base_url


def run(name: str) -> None:
    argv = [os.environ["PAGEMILL_PROGRAM"], base_url(), name]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
