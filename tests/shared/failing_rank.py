"""A follower's process whose steps raise: those that the environment lists, on rank 1."""

from __future__ import annotations

import os
from typing import Any

from pagemill_engine.executing.ranks.follower import FollowerRunner
from pagemill_engine.starting import rank_process

STEPS = "FAILING_STEPS"


def main() -> None:
    launch, failing = FollowerRunner.launch, {int(step) for step in os.environ[STEPS].split(",")}

    def failing_launch(self: FollowerRunner, plan: Any) -> Any:
        if plan.step in failing:
            raise MemoryError(f"no memory for step {plan.step}")
        return launch(self, plan)

    FollowerRunner.launch = failing_launch  # type: ignore[method-assign]
    rank_process.main()


if __name__ == "__main__":
    main()
