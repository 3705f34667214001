"""The error of a dialect for a body that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pagemill_protocol.errors import PagemillError


def refusal_of(parse: Callable[..., Any], **fields: Any) -> PagemillError:
    """Return the 400 that `parse` raises for these fields."""
    with pytest.raises(PagemillError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    return caught.value
