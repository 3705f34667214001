"""Reads records of one deployment's scaling decisions from a `pagemill up` on this machine, or from a file.

`cluster` reads those of an operator.
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
    """There is nothing to show; the message says why and what to do."""


class Found(NamedTuple):
    records: list[Record]
    """Oldest first."""
    where: str
    """Who recorded them, for people."""


def from_this_machine(runtime_folder: Path, name: str, namespace: str | None) -> Found | None:
    """Those of the `pagemill up` that decided about it last; None where none has."""
    newest: tuple[float, Running] | None = None
    for backend in running(runtime_folder):
        if select(_records_of(backend), name, namespace):
            changed_at_s = _changed_at_s(backend)
            newest = max(newest or (changed_at_s, backend), (changed_at_s, backend), key=lambda each: each[0])
    if newest is None:
        return None
    backend = newest[1]
    return Found(select(_records_of(backend), name, namespace), f"`pagemill up` (process {backend.pid})")


def names_on_this_machine(runtime_folder: Path) -> list[str]:
    """Deployments about which something was decided here."""
    return sorted({record.key for backend in running(runtime_folder) for record in _records_of(backend)})


def served_on_this_machine(runtime_folder: Path, name: str, namespace: str | None) -> int | None:
    """The process of the `pagemill up` that serves the deployment; None where none does."""
    for backend in running(runtime_folder):
        try:
            targets = json.loads((backend.folder / TARGETS_FILE).read_bytes())
        except (OSError, ValueError):
            continue  # it begins, or has just ended
        if any(_is_meant(each["labels"].get("variant", ""), name, namespace) for each in targets):
            return backend.pid
    return None


def from_file(path: Path, name: str, namespace: str | None) -> Found:
    """Lines of records, or what `-o json` printed. Raises `WhyError`."""
    records = list(_decoded(path, _text(path)))
    chosen = select(records, name, namespace)
    if not chosen:
        others = ", ".join(sorted({record.key for record in records})) or "nothing"
        raise WhyError(f"{path}: holds no decision about {name}; it has decisions about {others}")
    return Found(chosen, str(path))


def select(records: list[Record], name: str, namespace: str | None) -> list[Record]:
    """Those of the deployment. Raises `WhyError` where several namespaces have one of the name."""
    keys = {record.key for record in records if _is_meant(record.key, name, namespace)}
    if len(keys) > 1:
        raise WhyError(f"{name} is in several namespaces: {', '.join(sorted(keys))}; choose one with --namespace")
    return [record for record in records if record.key in keys]


def _is_meant(key: str, name: str, namespace: str | None) -> bool:
    of_namespace, _, of_name = key.partition("/")
    return of_name == name and namespace in (None, of_namespace)


def _records_of(backend: Running) -> list[Record]:
    """None, where it has decided nothing yet or has just ended."""
    try:
        lines = (backend.folder / RECORDS_FILE).read_bytes().splitlines()
    except OSError:
        return []
    try:
        return [decode_record(line) for line in lines]
    except (msgspec.DecodeError, ValueError):
        raise WhyError(
            f"`pagemill up` (process {backend.pid}) records its decisions otherwise: it is of another version; "
            "ask with the pagemill command that it was started with"
        ) from None


def _changed_at_s(backend: Running) -> float:
    try:
        return (backend.folder / RECORDS_FILE).stat().st_mtime
    except OSError:
        return 0.0


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise WhyError(
                f"{path}: is larger than {MAX_FILE_BYTES} bytes; give the part with the deployment's records"
            )
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
                f"{path}:{number}: is no record of a decision: {error}; give --file lines as /debug/scaling, or "
                "`pagemill why -o json`, prints them"
            ) from None


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """(line or place in the list, a record's JSON)."""
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, dict) and isinstance(whole.get("records"), list):
        yield from ((number, json.dumps(record)) for number, record in enumerate(whole["records"], 1))
        return
    yield from ((number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())
