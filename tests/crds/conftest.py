"""Whether the API server would accept a document, by the current schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import miniature_api_server
import pytest

from pagemill_crds.schema import structural_schema


@pytest.fixture(scope="session")
def admit() -> Callable[[dict[str, Any]], list[str]]:
    """Return a function that gives the errors of a document; none if the API server would accept it."""
    schema = structural_schema()
    return lambda document: miniature_api_server.admit(document, schema)
