"""`pagemill bench` and the client that it shares with `chat` refuse invalid addresses before they send a request."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from pagemill.main import app


@pytest.mark.parametrize("command", [["bench"], ["chat", "Hello"]])
@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("localhost:8000", "http://localhost:8000"),
        ("ftp://127.0.0.1", "http://127.0.0.1"),
    ],
)
def test_an_address_without_a_scheme_is_refused_with_the_remedy(command: list[str], url: str, remedy: str) -> None:
    done = CliRunner().invoke(app, [*command, "--url", url])
    assert done.exit_code == 1
    assert f"`{url}` does not begin with http:// or https://. Write {remedy}" in done.stderr
