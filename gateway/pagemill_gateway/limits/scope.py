"""How far cached prompts are shared: the root salt of the prefix cache, derived from who calls.

`prefixCaching.scope` `deployment` shares among all callers; `tenant` and `key` keep callers apart, so that nobody can
learn from timing what others asked. Clients never send a salt.
"""

from __future__ import annotations

import hashlib


def cache_salt(prefix_scope: str, deployment: str, key_hash: str | None) -> str:
    """The salt for a caller known by `key_hash`; a tenant is one key as long as keys have no groups."""
    if prefix_scope == "deployment" or key_hash is None:
        return ""
    return hashlib.blake2b(f"{deployment}\0{key_hash}".encode(), digest_size=16).hexdigest()
