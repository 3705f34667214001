"""`pagemill version`: prints the installed versions, for a bug report."""

from __future__ import annotations

import platform
from importlib.metadata import version as distribution_version

import typer


def version() -> None:
    """Print the versions of pagemill, Python and the machine."""
    typer.echo(f"pagemill {distribution_version('pagemill')}")
    typer.echo(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
