"""The version from which the upgrade tests start: `--previous REF`, by default the previous commit."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import history
from support.clusters import Cluster, program
from support.history import Previous


@pytest.fixture
def previous(request: pytest.FixtureRequest, tmp_path: Path, cluster: Cluster) -> Previous:
    """Return an earlier commit's chart, with its gateway and operator if images can be loaded onto the nodes."""
    found = history.previous(tmp_path, request.config.getoption("--previous"))
    if cluster.node is not None:
        program("platform", str(found.root), found.image_tag)
    return found
