"""The command-line options of the end-to-end tests; the Makefile passes its variables here.

--context NAME      use this context of the user's kubeconfig instead of a new one-node cluster (E2E_CONTEXT)
--kubeconfig FILE   use the one-node cluster that already runs, and leave it running (development)
--image-tag TAG     tag of the images on the cluster's node
--keep-release      leave the shared Helm release installed at the end (development)
--artifacts DIR     folder for the logs of failed cases
--previous REF      commit from which the upgrade tests start
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

DEFAULT_ARTIFACTS = Path(__file__).resolve().parents[2] / "build" / "e2e"


@dataclass(frozen=True)
class Settings:
    context: str
    kubeconfig: str
    image_tag: str
    keep_release: bool
    artifacts: Path


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("e2e", "the cluster under test")
    group.addoption("--context", default="", help="a context of the user's kubeconfig to test on")
    group.addoption("--kubeconfig", default="", help="kubeconfig of a running one-node cluster, or of --context")
    group.addoption("--image-tag", default="", help="tag of pagemill/{engine,gateway,operator} on the nodes")
    group.addoption("--keep-release", action="store_true", help="leave the shared release installed at the end")
    group.addoption("--previous", default="HEAD~1", help="commit that is upgraded to today's")
    group.addoption("--artifacts", type=Path, default=DEFAULT_ARTIFACTS, help="folder for the logs of failed cases")


def read(config: pytest.Config) -> Settings:
    return Settings(
        context=config.getoption("--context"),
        kubeconfig=config.getoption("--kubeconfig"),
        image_tag=config.getoption("--image-tag"),
        keep_release=config.getoption("--keep-release"),
        artifacts=config.getoption("--artifacts"),
    )
