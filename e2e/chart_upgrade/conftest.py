"""Where the upgrade starts from: `--previous REF`, the commit before this one by default."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.history import previous_chart


@pytest.fixture
def previous(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The chart of an earlier commit."""
    return previous_chart(tmp_path, request.config.getoption("--previous"))
