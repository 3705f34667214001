"""Reads the records of a deployment's scaling decisions from a `pagemill up` on this machine, or from a file.

`cluster` reads the records of an operator.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from pagemill_operator.autoscaler.records import Record, decode_record
from pagemill_operator.backends.local.state_dir import RECORDS_FILE, TARGETS_FILE, Running, running

MAX_FILE_BYTES = 64 * 1024 * 1024


class WhyError(Exception):
    """There are no records to show; the message names the cause and the remedy."""


class FoundRecords(NamedTuple):
    records: list[Record]
    """The records, oldest first."""
    where: str
    """The recorder's description for the output."""


def from_this_machine(runtime_folder: Path, name: str, namespace: str | None) -> FoundRecords | None:
    """Return the records of the `pagemill up` that decided about the deployment last; None if there is none."""
    newest: tuple[float, Running] | None = None
    for backend in running(runtime_folder):
        if select(_records_of(backend), name, namespace):
            changed_at_s = _changed_at_s(backend)
            newest = max(newest or (changed_at_s, backend), (changed_at_s, backend), key=lambda each: each[0])
    if newest is None:
        return None
    backend = newest[1]
    return FoundRecords(select(_records_of(backend), name, namespace), f"`pagemill up` (process {backend.pid})")


def names_on_this_machine(runtime_folder: Path) -> list[str]:
    """Return the keys of the deployments that a `pagemill up` serves, or has decided about, on this machine."""
    decided = {record.key for backend in running(runtime_folder) for record in _records_of(backend)}
    return sorted(decided | {key for _, key in _served(runtime_folder)})


def served_on_this_machine(runtime_folder: Path, name: str, namespace: str | None) -> int | None:
    """Return the process id of the `pagemill up` that serves the deployment; None if there is none."""
    return next((pid for pid, key in _served(runtime_folder) if _is_meant(key, name, namespace)), None)


def _served(runtime_folder: Path) -> Iterator[tuple[int, str]]:
    """Yield the process id of each `pagemill up`, and the key of each deployment that it serves."""
    for backend in running(runtime_folder):
        try:
            targets = json.loads((backend.folder / TARGETS_FILE).read_bytes())
        except (OSError, ValueError):
            continue  # this `pagemill up` is starting or has just exited
        yield from ((backend.pid, each["labels"]["variant"]) for each in targets if "variant" in each["labels"])


def from_file(path: Path, name: str, namespace: str | None) -> FoundRecords:
    """Read records from lines of JSON or from the output of `-o json`. Raises `WhyError`."""
    records = list(_decoded(path, _text(path)))
    chosen = select(records, name, namespace)
    if not chosen:
        others = ", ".join(sorted({record.key for record in records})) or "nothing"
        raise WhyError(f"{path}: has no decision about {name}; it has decisions about {others}")
    return FoundRecords(chosen, str(path))


def select(records: list[Record], name: str, namespace: str | None) -> list[Record]:
    """Return the records of the deployment. Raises `WhyError` if several namespaces have one with this name."""
    keys = {record.key for record in records if _is_meant(record.key, name, namespace)}
    if len(keys) > 1:
        raise WhyError(f"{name} is in several namespaces: {', '.join(sorted(keys))}; choose one with --namespace")
    return [record for record in records if record.key in keys]


def _is_meant(key: str, name: str, namespace: str | None) -> bool:
    of_namespace, _, of_name = key.partition("/")
    return of_name == name and namespace in (None, of_namespace)


def _records_of(backend: Running) -> list[Record]:
    """Return the records of a `pagemill up`; empty if it has made no decision yet or has just exited."""
    try:
        lines = (backend.folder / RECORDS_FILE).read_bytes().splitlines()
    except OSError:
        return []
    try:
        return [decode_record(line) for line in lines]
    except (msgspec.DecodeError, ValueError):
        raise WhyError(
            f"`pagemill up` (process {backend.pid}) has records that this version cannot read; use the pagemill "
            "command that started it"
        ) from None


def _changed_at_s(backend: Running) -> float:
    try:
        return (backend.folder / RECORDS_FILE).stat().st_mtime
    except OSError:
        return 0.0


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise WhyError(f"{path}: is larger than {MAX_FILE_BYTES} bytes; reduce it to the deployment's records")
        return path.read_text("utf-8")
    except OSError as error:
        raise WhyError(f"{path}: cannot be read: {error.strerror}; give --file a file of records") from None
    except UnicodeDecodeError as error:
        raise WhyError(f"{path}: is not UTF-8 text (byte {error.start}); give --file a file of records") from None


def _decoded(path: Path, text: str) -> Iterator[Record]:
    for number, line in _lines(text):
        try:
            yield decode_record(line.encode())
        except (msgspec.DecodeError, ValueError) as error:
            raise WhyError(
                f"{path}:{number}: is not a record of a decision: {error}; give --file the output of /debug/scaling or "
                "of `pagemill why -o json`"
            ) from None


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each record's JSON with its line number, or with its number in the list of `-o json`."""
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, dict) and isinstance(whole.get("records"), list):
        yield from ((number, json.dumps(record)) for number, record in enumerate(whole["records"], 1))
        return
    yield from ((number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())
