"""The entry of one key: `SHA256 [tenant=NAME] [models=A,B] [LIMIT=NUMBER ...] [LIMIT@MODEL=NUMBER ...]
[priority=CLASS] [objective=PERCENT] [role=admin]`.

The settings, a file of keys, a Secret and Redis use the same line. A bare hash is a key without limits. A message about
a wrong line never quotes it: it may contain a key in place of its hash.
"""

from __future__ import annotations

import re
from typing import Any

from pagemill_servers.keys.caller import PRIORITY_CLASSES, Caller, Limits

_SHA256_HEX = re.compile(r"[0-9a-fA-F]{64}")
_PERCENT = re.compile(r"[0-9]{2}(\.[0-9]{1,3})?")
MAX_OBJECTIVE = 99.999
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
HASH_REMEDY = "Write the hash of each key, never the key itself: printf %s KEY | sha256sum"
MAX_LIMIT = 10**12
"""Sums of some thousands of such numbers are still exact as doubles, such as in Redis's scripts."""
FIELDS = ("tenant", "models", *Limits._fields, "priority", "objective", "role")


class EntryError(ValueError):
    """The line cannot be used; the message names the field and the remedy, and shows no secret."""


def parse_entry(line: str) -> Caller:
    """Parse an entry. Raises `EntryError`."""
    key_hash, *words = line.split() or [""]
    if _SHA256_HEX.fullmatch(key_hash) is None:
        raise EntryError(f"does not begin with a SHA-256 in hex (64 characters). {HASH_REMEDY}")
    fields: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        limit, at, _ = name.partition("@")
        if not equals or (limit not in Limits._fields if at else name not in FIELDS):
            shown = f"`{name}`" if name.isidentifier() and len(name) < 32 else "something"
            raise EntryError(f"has {shown}, which is none of {', '.join(FIELDS)}. Write FIELD=VALUE after the hash.")
        if name in fields:
            raise EntryError(f"has `{name}` twice. Keep one.")
        fields[name] = value
    return Caller(
        key_hash=key_hash.lower(),
        tenant=_tenant(fields),
        models=_models(fields),
        limits=_limits(fields, ""),
        model_limits=_model_limits(fields),
        priority_class=_priority(fields),
        objective=_objective(fields),
        is_admin=_is_admin(fields),
    )


def fault_of(line: str) -> str | None:
    """Return what is wrong with a line, or None."""
    try:
        parse_entry(line)
    except EntryError as error:
        return str(error)
    return None


def _tenant(fields: dict[str, str]) -> str:
    name = fields.get("tenant")
    if name is None:
        return ""
    if _TENANT.fullmatch(name) is None:
        raise EntryError(
            f"has tenant={name[:80]!r}. Use up to 63 letters, digits, dots, dashes and underscores, a letter or digit "
            "first."
        )
    return name


def _models(fields: dict[str, str]) -> frozenset[str] | None:
    text = fields.get("models")
    if text is None:
        return None
    names = frozenset(text.split(","))
    if "" in names:
        raise EntryError("has an empty name in `models`. Write models=NAME,NAME without blanks, or leave it out.")
    return names


def _model_limits(fields: dict[str, str]) -> tuple[tuple[str, Limits], ...]:
    models, found = _models(fields), dict[str, Limits]()
    for field in fields:
        limit, at, name = field.partition("@")
        if not at:
            continue
        if not name:
            raise EntryError(f"has `{field}` without a name. Write {limit}@MODEL=NUMBER.")
        if models is not None and name not in models:
            raise EntryError(
                f"has `{field[:200]}`, and its `models` lacks that name, so the key cannot use it. Add the name there, "
                "or leave the limit out."
            )
        found[name] = _limits(fields, f"@{name}")
    return tuple(found.items())


def _limits(fields: dict[str, str], of_model: str) -> Limits:
    given = {each: f"{each}{of_model}" for each in Limits._fields}
    return Limits(**{each: _limit(field, fields[field]) for each, field in given.items() if field in fields})


def _limit(name: str, text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 13 else 0
    if not 1 <= number <= MAX_LIMIT:
        raise EntryError(
            f"has {name}={text[:20]!r}. Use a whole number from 1 to {MAX_LIMIT}, or leave it out for no limit."
        )
    return number


def _priority(fields: dict[str, str]) -> Any:
    name = fields.get("priority", "normal")
    if name not in PRIORITY_CLASSES:
        raise EntryError(f"has priority={name[:20]!r}. Use one of {', '.join(PRIORITY_CLASSES)}.")
    return name


def _objective(fields: dict[str, str]) -> float | None:
    text = fields.get("objective")
    if text is None:
        return None
    if _PERCENT.fullmatch(text) is None or not 50 <= float(text) <= MAX_OBJECTIVE:
        raise EntryError(
            f"has objective={text[:20]!r}. Use a percentage of requests from 50 to {MAX_OBJECTIVE}, such as 99.9."
        )
    if "tenant" not in fields:
        raise EntryError("has `objective` without `tenant`. Add the tenant that it is for, or leave it out.")
    return float(text)


def _is_admin(fields: dict[str, str]) -> bool:
    role = fields.get("role")
    if role not in (None, "admin"):
        raise EntryError(f"has role={role[:20]!r}. Use admin, or leave it out for a key that only uses models.")
    return role is not None
