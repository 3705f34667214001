"""The runner of `make clients`: its reading of scripts, and the failures of a run. It needs no client and no server."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import client_catalogue
import pytest
import run_clients

SCRIPT = """
# /// script
# dependencies = ["some-client[extra]==1.2.3", "other==4"]
# ///
'''Some client.'''
from checks import check, report_all

@check("passes")
def passes() -> None: ...

{checks}

if __name__ == "__main__":
    print("a line of the client's own")
    {end}
"""
LIMITED = """
@check("has a limit", limit="not here", shows="the expected word")
def has_a_limit() -> None:
    {body}
"""


@pytest.fixture
def errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs a script of checks with this interpreter and returns the reports' errors by name."""

    def errors(checks: str = "", end: str = "report_all()") -> dict[str, str]:
        script = tmp_path / "check_some.py"
        script.write_text(SCRIPT.format(checks=checks, end=end))
        monkeypatch.setattr(client_catalogue, "FOLDER", tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(Path(run_clients.__file__).parent))
        (client,) = client_catalogue.clients()
        assert (client.name, client.package, client.version) == ("some", "some-client", "1.2.3")
        reports = run_clients.run(client, [sys.executable, str(script), "http://127.0.0.1:1/v1"])
        return {report["name"]: report["error"] for report in reports}

    return errors


AGENT = """
# /// script
# dependencies = ["pydantic"]
# [tool.pagemill]
# npm = "@some/agent-code@2.1.332"
# ///
'''Some agent.'''
from typing import Any

ANSWERS: list[list[Any]] = [["I call.", {"name": "Bash", "arguments": {"command": "ls"}}], ["Done."]]
"""


def test_an_agent_of_npm_has_a_model_that_says_its_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "check_some_agent.py").write_text(AGENT)
    monkeypatch.setattr(client_catalogue, "FOLDER", tmp_path)
    (client,) = client_catalogue.clients()
    assert (client.package, client.version, client.language) == ("@some/agent-code", "2.1.332", "npm")
    assert client.answers == (("I call.", client_catalogue.Call("Bash", '{"command": "ls"}')), ("Done.",))
    said: list[str] = []
    monkeypatch.setattr(run_clients, "write_scripted_model", lambda folder, answers: said.extend(answers))
    run_clients.write_agent_folder(tmp_path, client)
    assert said == ['I call.\n<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}\n</tool_call>', "Done."]


def test_a_passing_check_has_no_error(errors) -> None:
    assert errors() == {"passes": ""}


def test_a_failing_check_shows_its_traceback(errors) -> None:
    found = errors('@check("fails")\ndef fails() -> None:\n    assert 1 == 2, "the reason"')
    assert "the reason" in found["fails"]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("raise ValueError('the expected word')", "^$"),
        ("raise ValueError('another')", "another"),
        ("pass", "It works now; remove its `limit`"),
    ],
)
def test_a_check_with_a_limit_must_fail_with_the_declared_error(body: str, error: str, errors) -> None:
    assert re.search(error, errors(LIMITED.format(body=body))["has a limit"])


@pytest.mark.parametrize(
    ("end", "error"), [("raise SystemExit('broken import')", "broken import"), ("pass", "did not")]
)
def test_a_script_that_does_not_finish_fails(end: str, error: str, errors) -> None:
    assert error in errors(end=end)["the script comes to its end"]


def test_every_script_has_checks_with_unique_names() -> None:
    for client in client_catalogue.clients():
        names = [each.name for each in client.checks]
        assert names, client.name
        assert len(names) == len(set(names)), client.name


def test_the_clients_of_ci_exist() -> None:
    chosen = re.search(r'make clients CLIENTS="([^"]+)"', (run_clients.ROOT / ".ci/run").read_text())
    assert chosen is not None
    assert set(chosen[1].split()) <= {client.name for client in client_catalogue.clients()}
