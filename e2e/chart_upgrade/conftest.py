"""Where the upgrade starts from: `--previous REF`, the commit before this one by default."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import history
from support.clusters import Cluster, program
from support.history import Previous


@pytest.fixture
def previous(request: pytest.FixtureRequest, tmp_path: Path, cluster: Cluster) -> Previous:
    """An earlier commit's chart, and its gateway and operator where we may bring images to the nodes."""
    found = history.previous(tmp_path, request.config.getoption("--previous"))
    if cluster.node is not None:
        program("platform", str(found.root), found.image_tag)
    return found
