"""The version of this gateway."""

from __future__ import annotations

from importlib.metadata import version

VERSION = version("pagemill-gateway")
