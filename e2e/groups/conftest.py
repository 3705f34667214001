"""The controller of LeaderWorkerSets, and what an engine of one process answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.clusters import program
from support.deployments import deploy
from support.kubectl import Kubectl
from support.load import PROMPTS
from support.objects import llmdeployment
from support.release import Release

Golden = dict[str, str]


@pytest.fixture(scope="module")
def controller() -> Iterator[None]:
    program("groups", "install")
    yield
    program("groups", "remove")


@pytest.fixture(scope="session")
def answers_of_one() -> dict[int, Golden]:
    return {}


@pytest.fixture
def golden(release: Release, space: Kubectl, answers_of_one: dict[int, Golden]) -> Callable[[int], Golden]:
    """Return a function that returns the answers of one process, of so many tokens, by prompt."""

    def answers(max_tokens: int) -> Golden:
        if max_tokens not in answers_of_one:
            single = deploy(space, llmdeployment("single"))
            single.wait_ready(1)
            service = release.service("single")
            answers_of_one[max_tokens] = {prompt: service.ask(prompt, max_tokens) for prompt in PROMPTS}
            single.delete()
        return answers_of_one[max_tokens]

    return answers
