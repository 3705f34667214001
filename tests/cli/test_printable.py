"""The text of a model is shown without control characters that could change the terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.printable import printable
from pagemill.up.screen import PlainScreen, Screen, TerminalScreen, report_errors

HOSTILE = "a\x1b[2J\x1b]0;title\x07b\x9b31mc\x7f\r\x08\x00d\te\n"
HARMLESS = "a[2J]0;titleb31mcd\te\n"


@given(st.text())
def test_of_control_characters_only_line_feeds_and_tabs_are_kept(text: str) -> None:
    kept = [letter for letter in text if letter in "\n\t" or unicodedata.category(letter) != "Cc"]
    assert printable(text) == "".join(kept)


@pytest.mark.parametrize("kind", [PlainScreen, TerminalScreen])
def test_pagemill_up_shows_no_control_characters(
    kind: Callable[[], Screen], capsys: pytest.CaptureFixture[str]
) -> None:
    screen = kind()
    screen.stream(HOSTILE)
    assert capsys.readouterr().out.expandtabs() == HARMLESS.expandtabs()
    screen.line(HOSTILE)
    screen.warn(HOSTILE)
    report_errors([HOSTILE])
    shown = capsys.readouterr()
    assert not set(shown.out + shown.err) & set("\x1b\x9b\x07\x7f\r\x08\x00")
