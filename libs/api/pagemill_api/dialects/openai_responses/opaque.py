"""The `encrypted_content` of reasoning and compaction items: text that clients keep and send back unread.

The server keeps nothing, so the items carry their text themselves. It is encoded, not encrypted: the client has seen
the reasoning, and a summary has only what the client sent.
"""

from __future__ import annotations

import base64
import binascii

_PREFIX = "pagemill-1."


def sealed(text: str) -> str:
    return _PREFIX + base64.urlsafe_b64encode(text.encode()).decode()


def opened(value: str) -> str | None:
    """Return the text, or None for content that another server made."""
    if not value.startswith(_PREFIX):
        return None
    try:
        return base64.b64decode(value[len(_PREFIX) :], altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
