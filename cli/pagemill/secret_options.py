"""Tokens that commands take: from an environment variable or a file, never as an argument, which every user of the
machine can read in a process list.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer


def refuse_argument(context: typer.Context, parameter: Any, value: str) -> str:
    """Callback of an option with a secret. Raises `typer.BadParameter` where it was given on the command line."""
    source = context.get_parameter_source(parameter.name)
    if source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter(
            f"arguments stand in process lists, so a token is not taken here. Set {parameter.envvar}, or name a file "
            f"with {parameter.opts[0]}-file."
        )
    return value


def token_in(path: Path) -> str:
    """The first line of the file. Raises `ValueError`."""
    try:
        token = next(iter(path.read_text().split()), "")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is no text'}.") from error
    if not token:
        raise ValueError(f"{path} is empty. Write the token into it.")
    return token
