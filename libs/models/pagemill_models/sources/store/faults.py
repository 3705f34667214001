"""Explain a disk's errors while a model is fetched."""

from __future__ import annotations

import errno

from pagemill_protocol.source_errors import FetchError

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
FREE_SPACE = "Raise spec.model.cache.size or sizeLimit, use a larger volume, or free space"


def explain_disk(error: OSError) -> FetchError:
    if error.errno in DISK_FULL:
        return FetchError("DiskFull", f"The volume is full ({error.strerror}). {FREE_SPACE}.")
    path = f" {error.filename}" if error.filename else ""
    message = f"The volume cannot be written:{path}: {error.strerror or error}."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        message += " Make the folder writable for the user that the pods run as."
    return FetchError("VolumeUnusable", message)


def size_text(num_bytes: int) -> str:
    return f"{num_bytes / 1024**3:.1f} GiB" if num_bytes >= 1024**3 else f"{num_bytes / 1024**2:.0f} MiB"
