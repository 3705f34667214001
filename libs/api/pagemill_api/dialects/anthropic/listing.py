"""Pages of lists as Anthropic's API has them, with `limit`, `after_id` and `before_id` of the query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagemill_protocol.errors import invalid_field, show

DEFAULT_PAGE, MAX_PAGE = 20, 1000


def page_of(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page that `query` asks for; `items` has all items in the order of the list. Raises 400."""
    limit, ids = _limit(query.get("limit")), [item["id"] for item in items]
    if before := query.get("before_id"):
        end = _place(ids, before, "before_id")
        start = max(0, end - limit)
        page, has_more = items[start:end], start > 0
    else:
        after = query.get("after_id")
        start = _place(ids, after, "after_id") + 1 if after else 0
        page, has_more = items[start : start + limit], start + limit < len(items)
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"data": [*page], "has_more": has_more, **ends}


def _limit(value: str | None) -> int:
    if value is None:
        return DEFAULT_PAGE
    if not value.isascii() or not value.isdecimal() or len(value) > 4 or not 1 <= int(value) <= MAX_PAGE:
        raise invalid_field("limit", f"`limit` must be an integer from 1 to {MAX_PAGE}, got {show(value)}.")
    return int(value)


def _place(ids: Sequence[str], wanted: str, field: str) -> int:
    if wanted not in ids:
        raise invalid_field(field, f"`{field}` is not an id of this list: {show(wanted)}. Send one of it.")
    return ids.index(wanted)
