"""Formats the rows of `pagemill top` as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from pagemill.columns import columns
from pagemill.printable import printable
from pagemill.top.reading import PodRow

HEAD = ["DEPLOYMENT", "POD", "PHASE", "KV", "RUNNING", "WAITING", "TOKENS/S", "TTFT", "MODEL"]


def as_json(where: str, rows: Sequence[PodRow]) -> str:
    return json.dumps({"readFrom": where, "engines": [asdict(row) for row in rows]}, indent=1)


def as_table(where: str, rows: Sequence[PodRow]) -> str:
    total = sum(row.tokens_per_s or 0.0 for row in rows)
    waiting = sum(row.waiting or 0.0 for row in rows)
    count = "1 engine" if len(rows) == 1 else f"{len(rows)} engines"
    lines = [f"{where}: {count}, {total:.0f} tokens/s, {waiting:.0f} requests waiting in engines", ""]
    lines += columns([HEAD, *map(_cells, rows)])
    return printable("\n".join(lines))


def _cells(row: PodRow) -> list[str]:
    numbers = [
        _shown(row.kv, "{:.0%}"),
        _shown(row.running, "{:.0f}"),
        _shown(row.waiting, "{:.0f}"),
        _shown(row.tokens_per_s, "{:.0f}"),
        _shown(row.ttft_ms, "{:.0f} ms"),
    ]
    return [row.deployment, row.pod, row.phase, *numbers, row.fault or row.model]


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
