"""The generated reference pages match the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def test_every_page_matches_the_code(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_page_edited_by_hand_is_detected(generate: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("edited")
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "pages", lambda: {page: "generated"})
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    assert generate.main() == 1
    monkeypatch.setattr(sys, "argv", ["generate.py"])
    assert generate.main() == 0
    assert page.read_text() == "generated"


def test_every_setting_has_a_type_and_a_default(generate: Any) -> None:
    settings = {each.name: each for each in generate.settings_of("pagemill_engine.config", "ServerConfig")}
    assert settings["port"].type == "int"
    assert settings["port"].default == "`8000`"
    assert settings["max_body_bytes"].default == "`8388608`", "products of numbers must be shown as numbers"
    assert "SIGTERM" in settings["drain_timeout_s"].meaning
