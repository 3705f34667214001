"""Cuts off the load stream: operators receive no gateway reports any more, and everything else continues."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from support.dropping import dropping

CONTROL_PORT = 8081
"""The gateways' control port, by the chart's default."""


def cut(pods: Iterable[dict[str, Any]], program: str = "pagemill_operator") -> AbstractContextManager[None]:
    """Drop what these pods send to the control port of any gateway while the block runs."""
    return dropping(pods, program, sent=f"tcp dport {CONTROL_PORT}")
