"""Pages lists like OpenAI's API, with `limit`, `after` and `order` of the query. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagemill_protocol.errors import invalid_field, show


def page_of(
    items: Sequence[dict[str, Any]], query: Mapping[str, str], *, default_limit: int, max_limit: int = 100
) -> dict[str, Any]:
    """Return a list object with the items that `query` requests. `items` has all items, oldest first."""
    limit, order = query.get("limit", str(default_limit)), query.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= max_limit):
        raise invalid_field("limit", f"`limit` must be a number from 1 to {max_limit}, got {show(limit)}.")
    if order not in ("asc", "desc"):
        raise invalid_field("order", f"`order` must be asc or desc, got {show(order)}.")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after := query.get("after"):
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise invalid_field("after", f"`after` is not an id of this list: {show(after)}.")
        ordered = ordered[places[0] + 1 :]
    page = ordered[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > len(page),
    }
