"""Rewrites options of `vllm serve` into those of `pagemill serve` before they are parsed, or refuses them.

The engine's table (`pagemill_engine.vllm_arguments`) says what each of vLLM's arguments becomes; this module knows how
they are written on a command line. Options that both commands have under the same name pass unchanged.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from pagemill_engine.vllm_arguments import ARGUMENTS, Argument, takes

IN_PROCESS_LISTS = (
    "--api-key: every user of this machine can read command-line arguments. Use --api-keys-file with a file of the "
    "keys' hashes."
)


_LONG = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-n": "--nnodes",
    "-r": "--node-rank",
}
"""Short options of vLLM."""


def _refuse(line: str) -> None:
    raise typer.BadParameter(line)


def rewritten(words: list[str], note: Callable[[str], None], refuse: Callable[[str], None] = _refuse) -> list[str]:
    """Return the arguments with Pagemill's options in place of vLLM's.

    `note` is called with a line for each option without effect, `refuse` with one for each that is not supported, which
    raises `typer.BadParameter` unless the caller says otherwise.
    """
    left = list(words)
    result: list[str] = []
    while left:
        word = left.pop(0)
        if word == "--":
            return [*result, word, *left]
        option, has_value, value = word.partition("=")
        option = _LONG.get(option, option.replace("_", "-") if option.startswith("--") else option)
        if has_value:
            left.insert(0, value)
        name, denied = _name_of(option)
        if name == "api_key":
            result += ["--api-keys-file", _keys_file(_values(left), note)]
        elif name in ARGUMENTS:
            result += _options(ARGUMENTS[name], option, denied, left, note, refuse)
        elif has_value:
            result.append(f"{option}={left.pop(0)}")
        else:
            result.append(option)
    return result


def _name_of(option: str) -> tuple[str, bool]:
    """Return the name of vLLM's argument that the option sets, and whether the option is its `--no-` form."""
    name = option.removeprefix("--").replace("-", "_") if option.startswith("--") else ""
    denied = name.startswith("no_") and name.removeprefix("no_") in ARGUMENTS
    return (name.removeprefix("no_"), True) if denied else (name, False)


def _options(
    argument: Argument,
    option: str,
    denied: bool,
    left: list[str],
    note: Callable[[str], None],
    refuse: Callable[[str], None],
) -> list[str]:
    if argument.sets == "served_names":
        return [word for value in _values(left) for word in ("--served-name", value)]
    if argument.sets == "lora_modules":
        return [word for value in _values(left) for word in ("--lora-modules", value)]
    if argument.sets == "enable_prefix_caching":
        return ["--no-prefix-caching" if denied else "--prefix-caching"]
    if argument.sets == "cuda_graphs":
        return ["--cuda-graphs" if denied else "--no-cuda-graphs"]
    if argument.option == "allowed-origin":
        return [word for origin in _origins(left) for word in ("--allowed-origin", origin)]
    if argument.option:
        given = left.pop(0) if left else ""
        return [f"--{argument.option}", str(argument.values.get(given, given))]
    if is_flag(argument):
        value: bool | str = not denied
        shown = option
    else:
        value = " ".join(_values(left))
        shown = f"{option} {value}".rstrip()
    if argument.only == "LLM" or not _takes(argument, value):
        refuse(f"{shown} is not supported. {argument.meaning}")
    else:
        note(f"{shown} has no effect. {argument.meaning}")
    return []


def is_flag(argument: Argument) -> bool:
    """Whether the option takes no value in `vllm serve`."""
    return (
        bool(argument.taken)
        and all(type(each) is bool or each is None for each in argument.taken or ())
        and argument.taken != (None,)
    )


def _takes(argument: Argument, value: Any) -> bool:
    if isinstance(value, bool):
        return takes(argument, value)
    return argument.taken is None or value in [str(each) for each in argument.taken if each is not None]


def _origins(left: list[str]) -> list[str]:
    """Remove vLLM's list of origins, which is written as JSON, from `left` and return it."""
    try:
        found = json.loads(left.pop(0) if left else "")
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise typer.BadParameter("--allowed-origins must be a JSON list. For one origin, use --allowed-origin.")
    return found


def _values(left: list[str]) -> list[str]:
    """Remove the words before the next option from `left` and return them."""
    values = []
    while left and not (left[0].startswith("-") and not left[0][1:2].isdigit()):
        values.append(left.pop(0))
    return values


def _keys_file(keys: list[str], note: Callable[[str], None]) -> str:
    """Write the keys' hashes to a private file that is deleted when this process exits; return its path."""
    if not keys:
        raise typer.BadParameter("--api-key needs a key.")
    note(IN_PROCESS_LISTS)
    descriptor, path = tempfile.mkstemp(prefix="pagemill-keys-")
    with os.fdopen(descriptor, "w") as file:
        file.writelines(f"{hashlib.sha256(key.encode()).hexdigest()} tenant=default\n" for key in keys)
    atexit.register(Path(path).unlink, missing_ok=True)
    return path
