"""Tells a port that nobody listens on from every other trouble: asked there, nothing was begun and nothing is lost."""

from __future__ import annotations

import errno

import aiohttp


def is_refused(error: BaseException) -> bool:
    return isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno == errno.ECONNREFUSED
