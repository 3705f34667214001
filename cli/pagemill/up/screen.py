"""The output of `pagemill up`: colours and a live status line on a terminal, otherwise plain lines.

Errors go to stderr, everything else to stdout.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from pagemill.printable import printable


class Screen(Protocol):
    interactive: bool
    """Whether the output is a terminal with a user."""

    def line(self, text: str) -> None:
        """Show a complete line."""

    def warn(self, text: str) -> None:
        """Show a complete line as a warning."""

    def stream(self, text: str) -> None:
        """Show a piece of text without a line break."""

    def status(self, text: str) -> None:
        """Replace the status line; an empty text removes it."""


class PlainScreen:
    """Plain lines. A status is not shown, because the events behind it are printed as lines."""

    interactive = False

    def line(self, text: str) -> None:
        _write(f"{text}\n")

    def warn(self, text: str) -> None:
        _write(f"warning: {text}\n")

    def stream(self, text: str) -> None:
        _write(text)

    def status(self, text: str) -> None:
        return


class TerminalScreen:
    """Lines with colours, and a status line at the bottom."""

    interactive = True

    def __init__(self) -> None:
        # Text is shown unchanged: `:name:` does not become an emoji, and long lines get no breaks, for copying.
        self._console = Console(highlight=False, emoji=False, soft_wrap=True)
        self._live: Live | None = None

    def line(self, text: str) -> None:
        self._console.print(Text(printable(text)))

    def warn(self, text: str) -> None:
        self._console.print(Text.assemble(("warning:", "yellow"), " ", printable(text)))

    def stream(self, text: str) -> None:
        self.status("")
        self._console.print(Text(printable(text)), end="")

    def status(self, text: str) -> None:
        if not text:
            self._end_live()
            return
        line = Spinner("dots", Text(printable(text), style="cyan", no_wrap=True, overflow="ellipsis"))
        if self._live is None:
            self._live = Live(line, console=self._console, refresh_per_second=8, transient=True)
            self._live.start()
        else:
            self._live.update(line)

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def make_screen() -> Screen:
    return TerminalScreen() if sys.stdout.isatty() and sys.stdin.isatty() else PlainScreen()


def report_errors(lines: Iterable[str]) -> None:
    """Write one line for each error to stderr."""
    for line in lines:
        sys.stderr.write(f"error: {printable(line)}\n")
    sys.stderr.flush()


def _write(text: str) -> None:
    sys.stdout.write(printable(text))
    sys.stdout.flush()
