"""How far cached prompts are shared: the root salt of the prefix cache, derived from who calls.

`prefixCaching.scope` `tenant`, the default, and `key` keep callers apart, so that none can learn from timing or from
`cached_tokens` what others asked; `deployment` shares among all. Clients never send a salt.
"""

from __future__ import annotations

import hashlib

from pagemill_protocol.keys.caller import Caller


def cache_salt(prefix_scope: str, deployment: str, caller: Caller) -> str:
    """The salt for `caller`; a key that names no tenant is a tenant of its own."""
    if prefix_scope == "deployment" or not caller.key_hash:
        return ""
    whose = f"tenant\0{caller.tenant}" if prefix_scope == "tenant" and caller.tenant else caller.key_hash
    return hashlib.blake2b(f"{deployment}\0{whose}".encode(), digest_size=16).hexdigest()
