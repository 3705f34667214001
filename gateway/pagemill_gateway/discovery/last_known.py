"""Stores the latest catalogue on disk, for a gateway that starts while the API server is down and for a control process
that replaces one that died.

The file contains tokens, so only this user may read it, and it belongs on a volume in memory. An unreadable file is
ignored.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import msgspec

from pagemill_gateway.discovery.catalog import check_catalog
from pagemill_protocol.catalog import Catalog
from pagemill_protocol.errors import PagemillError

logger = logging.getLogger("pagemill.gateway.discovery")

VERSION = 1


class LastKnown(msgspec.Struct, frozen=True):
    catalog: Catalog
    control_tokens: list[str]
    version: int = VERSION


def read_last_known(path: Path) -> LastKnown | None:
    try:
        known = msgspec.json.decode(path.read_bytes(), type=LastKnown)
        check_catalog(known.catalog)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, PagemillError) as error:
        logger.warning("the last known catalogue %s cannot be used: %s", path, error)
        return None
    return known if known.version == VERSION else None


def write_last_known(path: Path, known: LastKnown) -> None:
    """Replace the file atomically. Raises `OSError`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(known))
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def keep_catalog(path: Path, catalog: Catalog) -> None:
    """Write a static catalogue for the next control process, or log why that is impossible."""
    try:
        write_last_known(path, LastKnown(catalog, []))
    except OSError as error:
        logger.warning("the catalogue cannot be kept in %s: %s", path, error.strerror)


def read_served_before(path: Path) -> Catalog | None:
    """Return the last process's catalogue with all endpoints ready, so that requests wait for their first reports."""
    last = read_last_known(path)
    if last is None:
        return None
    models = [
        msgspec.structs.replace(
            model, endpoints=[msgspec.structs.replace(each, probed_ready=True) for each in model.endpoints]
        )
        for model in last.catalog.models
    ]
    return msgspec.structs.replace(last.catalog, models=models)
