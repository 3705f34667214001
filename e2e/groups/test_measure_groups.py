"""Measures replicas of two pods: their start by phase, what a dead worker costs, and their speed beside one pod.

make e2e-measure CASES=e2e/groups
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
from support.clusters import OneNode
from support.deployments import deploy
from support.groups import of_two_pods, wait_replaced, workers
from support.kubectl import Kubectl
from support.load import LONG_PROMPT, Service, running_load
from support.measures import Measures
from support.objects import llmdeployment
from support.phases import of_new_pod
from support.processes import kill_pod
from support.release import Release

pytestmark = [pytest.mark.measure, pytest.mark.timeout(900)]

MAX_TOKENS = 200
ROUNDS = 5


def test_start_of_a_group_and_the_death_of_a_worker(
    one_node: OneNode, release: Release, controller: None, space: Kubectl, measures: Measures
) -> None:
    started_s = time.monotonic()
    chat = deploy(space, of_two_pods(replicas=1))
    measures.record("group of two pods: start by phase", **of_new_pod(chat, set(), started_s))
    chat.wait_ready(1)
    chat.scale(2)
    chat.wait_ready(2)
    service = release.service("chat")
    with running_load(service, workers=4, max_tokens=MAX_TOKENS, prompts=(LONG_PROMPT,)) as load:
        worker = workers(chat)[0]
        load.wait_for(1)
        killed_s = time.monotonic()
        kill_pod(worker, "pagemill_engine")
        wait_replaced(chat, 2, worker)
        restarted_s = time.monotonic() - killed_s
    report = load.report()
    report.assert_all_complete(at_least=4)
    met = [each for each in report.records if each.started_s < killed_s < each.started_s + each.seconds]
    gap_s = max(each.longest_gap_s for each in met)
    measures.record("group of two pods: worker killed", longest_gap_s=gap_s, streams=len(met), ready_s=restarted_s)


def test_speed_of_two_pods_beside_two_processes_of_one(
    one_node: OneNode, release: Release, controller: None, make_space: Callable[..., Kubectl], measures: Measures
) -> None:
    pair = deploy(make_space(), of_two_pods(replicas=1))
    single = deploy(make_space(), llmdeployment("single", engine={"tensorParallel": 2}, resources={"cpu": 2}))
    pair.wait_ready(1)
    single.wait_ready(1)
    services = {"two pods": release.service("chat"), "one pod": release.service("single")}
    taken_s: dict[str, list[float]] = {name: [] for name in services}
    for _ in range(ROUNDS):
        for name, service in services.items():
            taken_s[name].append(_token_s(service))
    rates = {f"{name.replace(' ', '_')}_per_s": 1 / statistics.median(each) for name, each in taken_s.items()}
    measures.record("tensor parallel 2: steps of one stream", **rates)


def _token_s(service: Service) -> float:
    """Return the seconds of a step: those between the first and the last token of a stream, by token."""
    times: list[float] = []
    with service.client() as client:
        stream = client.chat.completions.create(
            model=service.model,
            messages=[{"role": "user", "content": LONG_PROMPT}],
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        num_tokens = 0
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                times.append(time.monotonic())
            num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
    return (times[-1] - times[0]) / (num_tokens - 1)
