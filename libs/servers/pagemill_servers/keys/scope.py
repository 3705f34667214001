"""How far cached prompts are shared: the root salt of the prefix cache, derived from the caller.

`prefixCaching.scope` `tenant`, the default, and `key` separate callers, so that none can learn from timing or from
`cached_tokens` what others sent; `deployment` shares among all. Clients never send a salt.
"""

from __future__ import annotations

import hashlib

from pagemill_servers.keys.caller import Caller


def cache_salt(prefix_scope: str, deployment: str, caller: Caller) -> str:
    """Return the salt for `caller`; a key without a tenant counts as a tenant of its own."""
    if prefix_scope == "deployment" or not caller.key_hash:
        return ""
    whose = f"tenant\0{caller.tenant}" if prefix_scope == "tenant" and caller.tenant else caller.key_hash
    return hashlib.blake2b(f"{deployment}\0{whose}".encode(), digest_size=16).hexdigest()
