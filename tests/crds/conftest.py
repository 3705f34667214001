"""Whether the API server would take a document, by today's schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import miniature_api_server
import pytest

from pagemill_crds.schema import structural_schema


@pytest.fixture(scope="session")
def admit() -> Callable[[dict[str, Any]], list[str]]:
    """Errors of a document; empty when the API server would take it."""
    return lambda document: miniature_api_server.admit(document, structural_schema())
