"""Options for tokens. A token comes from an environment variable or a file and never from an argument, because every
user of the machine can read the arguments in the list of processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer


def refuse_argument(context: typer.Context, parameter: Any, value: str) -> str:
    """Return the value of a secret option. Raises `typer.BadParameter` if it was given on the command line."""
    source = context.get_parameter_source(parameter.name)
    if source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter(
            "every user of this machine can read command-line arguments, so a token is not accepted here. Set "
            f"{parameter.envvar}, or name a file with {parameter.opts[0]}-file."
        )
    return value


def token_in(path: Path) -> str:
    """Return the first word of the file. Raises `ValueError` if the file cannot be read or is empty."""
    try:
        token = next(iter(path.read_text().split()), "")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}."
        ) from error
    if not token:
        raise ValueError(f"{path} is empty. Write the token into it.")
    return token
