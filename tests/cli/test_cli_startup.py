"""The command starts fast and imports only what it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pagemill.main import COMMANDS, app

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "llmdeployment.yaml"
Run = Callable[..., subprocess.CompletedProcess[str]]


def test_help_lists_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for name in COMMANDS:
        assert name in result.output


def test_listing_commands_imports_none_of_them() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from pagemill.main import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "loaded = {name for name in sys.modules if name.startswith('pagemill')}\n"
        "assert loaded == {'pagemill', 'pagemill.command', 'pagemill.main'}, loaded\n"
        "assert not {'torch', 'pydantic', 'aiohttp', 'fastapi', 'yaml'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_up_imports_neither_torch_nor_the_engine() -> None:
    code = (
        "import sys, pagemill.commands.up, pagemill.up.session, pagemill.up.loading\n"
        "assert not {'torch', 'transformers', 'pagemill_engine', 'pagemill_gateway', 'kopf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_a_help_text(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage" in result.output


def test_the_version_is_that_of_the_distribution() -> None:
    assert CliRunner().invoke(app, ["--version"]).output.startswith("pagemill 0.")


def test_explain_describes_a_field_and_refuses_an_unknown_one() -> None:
    found = CliRunner().invoke(app, ["explain", "llmdeployment.spec.engine.maxModelLen"])
    assert found.exit_code == 0
    assert "prompt and output together" in found.output
    missing = CliRunner().invoke(app, ["explain", "spec.engine.maxModel"])
    assert missing.exit_code == 2
    assert "did you mean maxModelLen?" in missing.output


@pytest.mark.parametrize("command", [["serve"], ["up", "-f", str(EXAMPLE)]])
def test_a_missing_temporary_folder_is_reported_with_the_remedy(command: list[str]) -> None:
    """Python finds none, for example, if /tmp is full."""
    code = (
        "import errno, sys, tempfile\n"
        "def none():\n"
        "    raise FileNotFoundError(errno.ENOENT, \"No usable temporary directory found in ['/tmp']\")\n"
        "tempfile._get_default_tempdir = none\n"
        f"sys.argv = ['pagemill', *{command!r}, '--port', '0']\n"
        "from pagemill.main import main\n"
        "main()"
    )
    environment = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "No usable temporary directory found in ['/tmp']. Free space there, or set TMPDIR to a folder" in done.stderr
    assert "Traceback" not in done.stderr
