"""Reads all engines at an interval and shows the rows, once or until interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pagemill.top.reading import PodRow, Reading, row_of
from pagemill.top.sources import find_source
from pagemill.top.table import as_table


async def intervals(
    runtime_folder: Path, context: str | None, kubeconfig: Path | None, namespace: str | None, interval_s: float
) -> AsyncGenerator[tuple[str, list[PodRow]], None]:
    """Yield the source's description and the sorted rows every `interval_s`. Raises `TopError`."""
    source = await find_source(runtime_folder, context, kubeconfig, namespace)
    try:
        before = _by_pod(await source.read())
        while True:
            await asyncio.sleep(interval_s)
            now = _by_pod(await source.read())
            yield source.where, [row_of(before.get(key), reading) for key, reading in sorted(now.items())]
            before = now
    finally:
        await source.close()


async def read_interval(
    runtime_folder: Path, context: str | None, kubeconfig: Path | None, namespace: str | None, interval_s: float
) -> tuple[str, list[PodRow]]:
    """Return the first interval's description and rows. Raises `TopError`."""
    async with aclosing(intervals(runtime_folder, context, kubeconfig, namespace, interval_s)) as found:
        return await anext(found)


async def follow(
    runtime_folder: Path, context: str | None, kubeconfig: Path | None, namespace: str | None, interval_s: float
) -> None:
    """Show the table on the terminal until cancelled. Raises `TopError`."""
    found = intervals(runtime_folder, context, kubeconfig, namespace, interval_s)
    with Live(console=Console(highlight=False, emoji=False), screen=True, auto_refresh=False) as live:
        async with aclosing(found):
            async for where, rows in found:
                live.update(Text(as_table(where, rows), no_wrap=True, overflow="ellipsis"), refresh=True)


def _by_pod(readings: list[Reading]) -> dict[tuple[str, str], Reading]:
    return {(reading.deployment, reading.pod): reading for reading in readings}
