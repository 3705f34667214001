"""Reads all engines at an interval and shows the rows as a table or as JSON, once or until interrupted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pagemill.columns import GAP, columns
from pagemill.printable import printable
from pagemill.top.reading import ClientsView, PodRow, Reading, clients_of, row_of
from pagemill.top.sources import find_source


class TopInterval(NamedTuple):
    where: str
    """The source's description."""
    rows: list[PodRow]
    clients: list[ClientsView]
    """What clients of each gateway see, as far as it is known."""


async def intervals(
    runtime_folder: Path, context: str | None, kubeconfig: Path | None, namespace: str | None, interval_s: float
) -> AsyncGenerator[TopInterval, None]:
    """Yield the source's description and the sorted rows every `interval_s`. Raises `TopError`."""
    source = await find_source(runtime_folder, context, kubeconfig, namespace)
    try:
        before = _by_pod(await source.read())
        while True:
            await asyncio.sleep(interval_s)
            now = _by_pod(await source.read())
            rows = [row_of(before.get(key), reading) for key, reading in sorted(now.items()) if reading.pod]
            clients = [clients_of(before.get(key), reading) for key, reading in now.items() if not reading.pod]
            yield TopInterval(source.where, rows, list(filter(None, clients)))
            before = now
    finally:
        await source.close()


async def read_interval(
    runtime_folder: Path, context: str | None, kubeconfig: Path | None, namespace: str | None, interval_s: float
) -> TopInterval:
    """Return the first interval. Raises `TopError`."""
    async with aclosing(intervals(runtime_folder, context, kubeconfig, namespace, interval_s)) as found:
        return await anext(found)


async def follow(
    runtime_folder: Path, context: str | None, kubeconfig: Path | None, namespace: str | None, interval_s: float
) -> None:
    """Show the table on the terminal until cancelled. Raises `TopError`."""
    found = intervals(runtime_folder, context, kubeconfig, namespace, interval_s)
    with Live(console=Console(highlight=False, emoji=False), screen=True, auto_refresh=False) as live:
        async with aclosing(found):
            async for where, rows, clients in found:
                live.update(
                    Text(as_table(where, rows, live.console.width, clients), no_wrap=True, overflow="ellipsis"),
                    refresh=True,
                )


def _by_pod(readings: list[Reading]) -> dict[tuple[str, str], Reading]:
    """Return the readings by deployment and pod; gateways, which have neither, by their place."""
    return {(each.deployment, each.pod or f"gateway {at}"): each for at, each in enumerate(readings)}


HEAD = ["DEPLOYMENT", "POD", "PHASE", "KV", "RUNNING", "WAITING", "TOKENS/S", "TTFT", "SPEC", "MODEL"]
TEXTS = (0, 1, len(HEAD) - 1)
"""The columns that are shortened where the terminal is too narrow."""
LEAST_CHARS = 8


def as_json(where: str, rows: Sequence[PodRow]) -> str:
    return json.dumps({"readFrom": where, "engines": [asdict(row) for row in rows]}, indent=1)


def as_table(where: str, rows: Sequence[PodRow], width: int | None = None, clients: Sequence[ClientsView] = ()) -> str:
    """Return the table; names are shortened to fit into `width` characters, and what is still longer is cut off."""
    total = sum(row.tokens_per_s or 0.0 for row in rows)
    waiting = sum(row.waiting or 0.0 for row in rows)
    count = "1 engine" if len(rows) == 1 else f"{len(rows)} engines"
    lines = [f"{where}: {count}, {total:.0f} tokens/s, {waiting:.0f} waiting in engines"]
    if clients:
        ttfts = [each.ttft_ms for each in clients if each.ttft_ms is not None]
        ttft = f", first tokens after {max(ttfts):.0f} ms on average" if ttfts else ""
        lines.append(f"clients: {sum(each.waiting for each in clients):.0f} waiting in gateways{ttft}")
    lines.append("")
    lines += columns(_fitted([HEAD, *map(_cells, rows)], width))
    return printable("\n".join(_first_chars(line, width or len(line)) for line in lines))


def _fitted(rows: list[list[str]], width: int | None) -> list[list[str]]:
    """Shorten the longest names, at their beginning, until the lines fit."""
    if width is None:
        return rows
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    while sum(widths) + len(GAP) * (len(widths) - 1) > width:
        at = max(TEXTS, key=widths.__getitem__)
        if widths[at] <= LEAST_CHARS:
            break
        widths[at] -= 1
    return [[_last_chars(cell, most) for cell, most in zip(row, widths, strict=True)] for row in rows]


def _first_chars(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _last_chars(text: str, most: int) -> str:
    return text if len(text) <= most else f"…{text[len(text) - most + 1 :]}"


def _cells(row: PodRow) -> list[str]:
    numbers = [
        _shown(row.kv, "{:.0%}"),
        _shown(row.running, "{:.0f}"),
        _shown(row.waiting, "{:.0f}"),
        _shown(row.tokens_per_s, "{:.0f}"),
        _shown(row.ttft_ms, "{:.0f} ms"),
        _shown(row.accepted, "{:.0%}"),
    ]
    model = f"{row.model} ({row.ranks})" if row.ranks else row.model
    return [row.deployment, row.pod, row.phase, *numbers, row.fault or model]


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
