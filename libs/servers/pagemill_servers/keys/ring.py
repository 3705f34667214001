"""Authentication: the keys that a gateway accepts, found by hash, wherever they are configured.

The ring stores neither keys nor plain hashes: it hashes each hash again with a secret of this process, so that a client
cannot learn anything from the time of a look-up; a last comparison is in constant time. Keys come from the settings,
from a file that may change at any time, and from Redis (`redis.keys`).
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Collection, Iterable
from hashlib import blake2b

from starlette.types import Scope

from pagemill_protocol.errors import PagemillError, unauthorized, unavailable
from pagemill_servers.auth import api_key, hash_key
from pagemill_servers.direct import count_for_tenant
from pagemill_servers.keys.caller import ANONYMOUS, Caller
from pagemill_servers.keys.entries import parse_entry
from pagemill_servers.secrets.secret_file import SecretFile


class KeyRing:
    """The keys of settings, file and Redis. With none of the three, all requests are accepted."""

    def __init__(self, entries: Iterable[str], file: SecretFile | None = None, *, shared: bool = False) -> None:
        """Collect the keys. Raises `EntryError` for an invalid one of `entries`.

        `shared`: more keys follow by `replace_shared`; until then, requests with unknown keys are asked to try again.
        """
        self._fixed = tuple(parse_entry(each) for each in entries)
        self._file = file
        self._file_lines: tuple[str, ...] = ()
        self._waits_for_shared = shared
        self._has_shared = shared
        self._shared: tuple[Caller, ...] = ()
        self._secret = secrets.token_bytes(32)
        self._callers: dict[bytes, Caller] = {}
        self._anonymous = secrets.token_bytes(32)
        self._index()

    @property
    def open(self) -> bool:
        return not self._fixed and self._file is None and not self._has_shared

    @property
    def callers(self) -> Collection[Caller]:
        """The callers of all keys."""
        self._follow_file()
        return self._callers.values()

    def replace_shared(self, callers: Iterable[Caller]) -> None:
        """Replace the keys of the shared store. Keys of settings and file override them."""
        self._shared = tuple(callers)
        self._waits_for_shared = False
        self._index()

    def authenticate(self, scope: Scope) -> Caller:
        """Return the caller by its API key. Raises `PagemillError` 401, or 503 while not all keys are loaded or if the
        caller's tenant has too many connections."""
        if self.open:
            return ANONYMOUS
        token = api_key(scope)
        if token is None:
            raise unauthorized()
        self._follow_file()
        given = self._keyed_hash(hash_key(token))
        caller = self._callers.get(given)
        known = self._keyed_hash(caller.key_hash) if caller is not None else self._anonymous
        if not hmac.compare_digest(known, given) or caller is None:
            raise self._unknown_key()
        count_for_tenant(scope, caller.account)
        return caller

    def by_hash(self, key_hash: str) -> Caller | None:
        """Return the caller whose key has this hash, for work that it left here, or None if the key is no longer
        accepted.

        Raises `PagemillError` 503 while not all keys are loaded.
        """
        if self.open:
            return ANONYMOUS
        self._follow_file()
        caller = self._callers.get(self._keyed_hash(key_hash))
        if caller is None and self._waits_for_shared:
            raise self._unknown_key()
        return caller

    def _follow_file(self) -> None:
        if self._file is not None and self._file.lines() is not self._file_lines:
            self._index()

    def _unknown_key(self) -> PagemillError:
        if self._waits_for_shared:
            return unavailable("The API keys are not loaded yet. Try again.", retry_after_s=1, code="keys_not_loaded")
        return unauthorized()

    def _index(self) -> None:
        if self._file is not None:
            self._file_lines = self._file.lines()
        from_file = (parse_entry(line) for line in self._file_lines)
        self._callers = {self._keyed_hash(each.key_hash): each for each in (*self._shared, *from_file, *self._fixed)}

    def _keyed_hash(self, key_hash: str) -> bytes:
        # Not `hmac.digest`, which releases the interpreter's lock: every request would wait to get it back.
        return blake2b(key_hash.encode("ascii"), digest_size=32, key=self._secret).digest()
