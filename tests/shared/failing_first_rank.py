"""An engine's process whose rank 0 fails at one place. Arguments: the model's folder. It prints its followers' ids."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
from failing_rank import STUCK_S, VARIABLE, FailingGroup, Failure
from ranked_engine import LONG, Engine, prompts_of, rank_loader

from pagemill_execution.runners.ranks.ranked import RanksLostError
from pagemill_execution.starting import load_ranks


def main() -> None:
    FailingGroup.failures = msgspec.json.decode(os.environ[VARIABLE], type=tuple[Failure, ...])
    load_ranks.SharedMemoryGroup = FailingGroup  # type: ignore[misc, attr-defined]
    with rank_loader() as load:
        runner: Any = load(Path(sys.argv[1]), 3, stuck_seconds=STUCK_S)
        print(*runner._followers.ids, flush=True)
        engine = Engine(runner)
        engine.add(prompts_of(1), LONG)
        try:
            engine.run_out()
        except RanksLostError as error:
            print(error, flush=True)


if __name__ == "__main__":
    main()
