"""Template processes that are kept between the gateways of different tests, because each start is slow."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pagemill_api.sandbox.process import LimitedProcess, ProcessLimits
from pagemill_api.text.template import chat_template


class KeptTemplates:
    def __init__(self) -> None:
        self._kept: defaultdict[str, deque[LimitedProcess]] = defaultdict(deque)
        self._kinds: dict[LimitedProcess, str] = {}
        self._is_closed = False

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Reuse kept processes for templates that start rendering in the block."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chat_template, "LimitedProcess", self._take)
            patch.setattr(chat_template, "_close_all", self._keep)
            yield

    def close(self) -> None:
        self._is_closed = True
        for processes in self._kept.values():
            self._keep(processes)

    def _take(self, templates: dict[str, str], limits: ProcessLimits) -> LimitedProcess:
        kind = repr((templates, limits))
        kept = self._kept[kind]
        while kept:
            process = kept.popleft()
            if process.is_alive:
                return process
            self._end(process)
        process = LimitedProcess(templates, limits)
        self._kinds[process] = kind
        return process

    def _keep(self, processes: deque[LimitedProcess]) -> None:
        """Keep the idle processes of a template that is closed."""
        while processes:
            process = processes.popleft()
            kind = self._kinds.get(process)
            if kind is None or self._is_closed:
                self._end(process)
            else:
                self._kept[kind].append(process)

    def _end(self, process: LimitedProcess) -> None:
        self._kinds.pop(process, None)
        process.close()
