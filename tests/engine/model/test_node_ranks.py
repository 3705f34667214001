"""Processes of several nodes that compute a model together over TCP give the tokens of one, and end by name."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fork_server
import msgspec
import numpy as np
import psutil
import pytest
from eagle_heads import VOCAB, write_eagle3
from hung_processes import hang
from node_engine import NodeProcess, NodeThread, kept_threads, load_first, node_config, of_node
from ranked_engine import BASE, LONG, ROUNDS, SETTINGS, Engine, answers, prompts_of, saved
from recorded_drafts import Found, record_drafts
from waiting import SOON_S, WAIT_LIMIT_S, busy_factor

from pagemill_engine.config import EngineConfig
from pagemill_execution.config import NodesConfig, SpeculationConfig
from pagemill_execution.runners.ranks import speeds
from pagemill_execution.runners.ranks.identity import RankIdentity
from pagemill_execution.runners.ranks.ranked import RanksLostError
from pagemill_execution.sizing.compute import choose_compute
from pagemill_execution.starting import load_ranks, node_rank, rendezvous
from pagemill_execution.starting.nodes import load_nodes
from pagemill_execution.starting.preparing import ModelFiles
from pagemill_execution.starting.rendezvous import open_to, token_of
from pagemill_execution.starting.threads import threads_of_ranks
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.cpu import library
from pagemill_models.spec.model_files import load_model_spec
from pagemill_protocol.request.sampling import SamplingParams

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    with kept_threads():
        yield


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> Found:
    """What was drafted, behind which known tokens."""
    return record_drafts(monkeypatch)


DRAWN = [
    SamplingParams(temperature=1.0, seed=5, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.5, seed=6, max_tokens=9, ignore_eos=True, top_p=0.8, top_k=30),
    SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logit_bias={BASE["vocab_size"] - 1: 100.0}),
]
"""Rows of which ranks exchange what they draw, candidates, or all logits."""


def all_answers(runner: Any, engine: Engine | None = None) -> list[Any]:
    engine = engine or Engine(runner)
    return [engine.run(prompts_of(seed), params) for seed, params in enumerate([*ROUNDS, ROUNDS[0], *DRAWN])]


@pytest.fixture(scope="module")
def expected(llama_folder: Path, runner_loader: Any) -> list[Any]:
    single = runner_loader(llama_folder, **SETTINGS)
    found = all_answers(single)
    single.close()
    return found


@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (2, 2), pytest.param(4, 2, marks=pytest.mark.full)])
def test_nodes_give_the_tokens_of_one_process(
    llama_folder: Path, expected: list[Any], size: int, num_stages: int
) -> None:
    """Every rank is on a node of its own."""
    config = node_config(llama_folder, size, num_stages, count=size)
    nodes = [NodeThread(of_node(config, rank)) for rank in range(1, size)]
    runner = load_first(config)
    assert all_answers(runner) == expected
    runner.close()
    assert [node.join() for node in nodes] == [None] * len(nodes)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_nodes_with_stages_verify_proposed_tokens(llama_folder: Path, expected: list[Any], size: int) -> None:
    """The second time all is proposed that was answered the first time."""
    config = node_config(llama_folder, size, 2, count=size)
    nodes = [NodeThread(of_node(config, rank)) for rank in range(1, size)]
    runner = load_first(config)
    engine = Engine(runner, speculative=SpeculationConfig(method="ngram"))
    assert engine.core._proposals is not None
    engine.core._proposals._ms_of = None
    for _ in range(2):
        assert all_answers(runner, engine) == expected
    assert engine.num_accepted > 100
    runner.close()
    assert [node.join() for node in nodes] == [None] * len(nodes)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["Gemma2", "Mixtral"])
def test_other_families_on_nodes_give_the_tokens_of_one_process(kind: str, tmp_path: Path, runner_loader: Any) -> None:
    folder = saved(kind, tmp_path)
    single = runner_loader(folder, **SETTINGS)
    expected = answers(single)
    single.close()
    config = node_config(folder, 2)
    node = NodeThread(of_node(config, 1))
    runner = load_first(config)
    assert answers(runner) == expected
    runner.close()
    assert node.join() is None


@pytest.mark.slow
def test_rank_0_of_several_nodes_drafts(tmp_path: Path, runner_loader: Any, drafted: Found) -> None:
    """Beside the logits that ranks of nodes divide among them."""
    folder = saved("Llama", tmp_path / "model", vocab_size=VOCAB, num_hidden_layers=4)
    head = write_eagle3(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    speculative = SpeculationConfig(method="eagle3", source=str(head), num_tokens=3)
    config = node_config(folder, 2, speculative=speculative)
    node = NodeThread(of_node(config, 1))
    single, runner = runner_loader(folder, **SETTINGS, speculative=speculative), load_first(config)
    found = []
    for each in (single, runner):
        engine = Engine(each)
        assert engine.core._proposals is not None
        engine.core._proposals._ms_of = None
        found.append((engine.run(prompts_of(1), LONG), dict(drafted)))
        del drafted[:]
        each.close()
    assert found[0] == found[1]
    assert len(found[0][1]) > 50
    assert node.join() is None


def test_a_step_that_raises_is_computed_again_on_all_nodes(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, runner_loader: Any
) -> None:
    single = runner_loader(llama_folder, **SETTINGS)
    expected = Engine(single).run(prompts_of(1), LONG)
    single.close()
    config = node_config(llama_folder, 2)
    node = NodeThread(of_node(config, 1))
    runner: Any = load_first(config)
    group, failed = runner._group, []
    meet = group.meet

    def fails_twice(place: int) -> None:
        # Every failed step is followed by one step for each of its requests alone.
        if len(failed) < 2 and group.statuses[0].step >= (5, 20)[len(failed)]:
            failed.append(group.statuses[0].step)
            raise MemoryError("no memory")
        meet(place)

    monkeypatch.setattr(group, "meet", fails_twice)
    engine = Engine(runner)
    assert [tokens for tokens, _ in engine.run(prompts_of(1), LONG)] == [tokens for tokens, _ in expected]
    assert len(failed) == 2
    runner.close()
    assert node.join() is None


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 2])
def test_nodes_that_wait_use_no_time(llama_folder: Path, tmp_path: Path, num_stages: int) -> None:
    """The node's own process and its rank, which has a connection to rank 0."""
    config = node_config(llama_folder, 2, num_stages)
    node = NodeProcess(tmp_path, of_node(config, 1))
    runner: Any = load_first(config)
    Engine(runner).run(prompts_of(1), ROUNDS[0])
    own = psutil.Process(node.process.pid)
    children = [each for each in own.children() if fork_server.__file__ not in each.cmdline()]
    assert len(children) == 1
    shares: list[float] = []
    while len(shares) < 5 and min(shares, default=1.0) >= 0.05:  # other processes that use the same caches add to it
        used, started = cpu_seconds([own, *children]), time.monotonic()
        while time.monotonic() < started + 2:
            assert select.select([], [], [], 0.2) == ([], [], [])
        shares.append((cpu_seconds([own, *children]) - used) / (time.monotonic() - started))
    assert min(shares) < 0.05, "of a core"
    runner.close()
    assert node.end()[0] == 0


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return float(sum(sum(each.cpu_times()[:2]) for each in processes))


class MoreWork:
    """A part of a model that computes more than it needs to."""

    def __init__(self, model: Any) -> None:
        self._model, self._values = model, np.linspace(0, 1, 100_000)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def hidden(self, *given: Any) -> Any:
        for _ in range(40):
            np.sin(self._values)
        return self._model.hidden(*given)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_rank_of_another_node_that_computes_longer_is_named(
    llama_folder: Path, num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: Any = speeds.TimedModel
    monkeypatch.setattr(
        load_ranks, "TimedModel", lambda model, group: timed(MoreWork(model) if group.rank == 1 else model, group)
    )
    monkeypatch.setattr(speeds, "WINDOW_S", 0.0)
    monkeypatch.setattr(speeds, "WINDOW_STEPS", 5)
    config = node_config(llama_folder, 2, num_stages)
    node = NodeThread(of_node(config, 1))
    runner: Any = load_first(config)
    engine = Engine(runner)
    found: Any = None
    deadline = time.monotonic() + 60 * busy_factor()
    while found is None:
        assert time.monotonic() < deadline
        engine.add(prompts_of(1), LONG)
        while engine.core.has_work:
            engine.core.step()
            found = found or runner.info.ranks().slow
    assert (found.rank, found.node) == (1, 1)
    assert found.step_ms >= 2 * found.expected_ms
    first, second = runner.info.ranks().computed_s
    assert second > first
    runner.close()
    assert node.join() is None


def lost(engine: Engine) -> tuple[str, float]:
    """Run requests until the ranks are lost. Returns the message, and how many seconds it took."""
    engine.add(prompts_of(1), LONG)
    started = time.monotonic()
    with pytest.raises(RanksLostError) as raised:
        engine.run_out()
    return str(raised.value), time.monotonic() - started


@pytest.mark.slow
@pytest.mark.sample("kill")
@pytest.mark.parametrize("how", ["kill", "stop", "end"])
def test_a_rank_of_another_node_that_is_gone_is_named(
    llama_folder: Path, tmp_path: Path, expected: list[Any], how: str
) -> None:
    """As processes: half of the ranks are on the other node. `end`: that node gets its pod's signal."""
    size = 2 if how == "kill" else 4
    config = node_config(llama_folder, size, num_kv_blocks=None)
    node = NodeProcess(tmp_path, of_node(config, 1))
    runner: Any = load_first(config, stuck_seconds=5.0 if how == "stop" else 60.0)
    engine = Engine(runner)
    assert engine.run(prompts_of(0), ROUNDS[0]) == expected[0]
    children = psutil.Process(node.process.pid).children()
    ranks = [each for each in children if fork_server.__file__ not in each.cmdline()]
    assert len(ranks) == size // 2
    {"kill": lambda: os.kill(ranks[-1].pid, signal.SIGKILL), "stop": lambda: hang(ranks[-1].pid)}.get(
        how, node.process.terminate
    )()
    message, took = lost(engine)
    assert took < (SOON_S if how != "stop" else 5 + SOON_S)
    named = f"rank {size - 1}" if how != "end" else "rank "
    assert f"The ranks of this engine stopped: {named}" in message
    assert " (node 1 at 127.0.0.1) " in message
    assert ("has not reached" if how == "stop" else "ended its connection; it was last at") in message
    runner.close()
    if how == "stop":
        os.kill(ranks[-1].pid, signal.SIGCONT)
    code, last = node.end()
    assert code == (0 if how == "end" else 1)
    if how != "end":
        assert last["reason"] == "RankLost"
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)


def test_other_nodes_end_when_the_first_one_does(llama_folder: Path) -> None:
    config = node_config(llama_folder, 2)
    node = NodeThread(of_node(config, 1))
    runner: Any = load_first(config)
    Engine(runner).run(prompts_of(1), ROUNDS[0])
    runner._followers._signals.let_end()
    runner._followers._signals.close()  # as when the process is killed
    runner._ring.close()
    error = node.join()
    assert isinstance(error, LoadError)
    assert error.reason == "RankLost"
    assert error.message.startswith("The ranks stopped: rank 0 ended its connection")
    with pytest.raises(RanksLostError):
        runner.sleep()
    runner.close()


@pytest.mark.slow
@pytest.mark.parametrize("field", ["weights", "version", "shape", "token"])
def test_nodes_that_differ_are_refused_with_what_differs(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    config = node_config(llama_folder, 2)
    other = of_node(config, 1)
    expected = "RankMismatch: Rank 1 (node 1 at 127.0.0.1) has "
    if field == "weights":
        other = of_node(config, 1, saved("Llama", tmp_path / "other", initializer_range=0.2))
        expected += "the digest of the weights "
    elif field == "version":
        own, joining = RankIdentity.own(), node_rank._joining
        changed = msgspec.structs.replace(own, version="0.0.1")
        monkeypatch.setattr(
            node_rank, "_joining", lambda *given: msgspec.structs.replace(joining(*given), identity=changed)
        )
        expected += f"the version 0.0.1, but rank 0 has {own.version}. Install the same version"
    elif field == "shape":
        other = msgspec.structs.replace(other, tensor_parallel_size=1, pipeline_parallel_size=2)
        expected += "tensor_parallel_size 1, but rank 0 has 2. Start all nodes alike."
    else:
        other, config = of_node(config, 1, token="another"), of_node(config, 0, timeout_s=3.0)
        expected = "RendezvousFailed: rank 1 of node 1 did not join node 0 at 127.0.0.1:"
    node = NodeThread(other)
    with pytest.raises(LoadError) as raised:
        load_first(config)
    assert str(raised.value).startswith(expected)
    error = node.join()
    if field == "token":
        assert "Give all nodes the same internal token" in str(error)
    else:
        assert error is not None


def test_an_address_that_does_not_resolve_is_named() -> None:
    for address in ("no-such-node.invalid", "node..0"):
        nodes = NodesConfig(count=2, rank=1, address=address, token="known", timeout_s=0.01)
        named = f"RendezvousFailed: The address `{address}` of node 0 does not resolve: .*Set --master-addr"
        with pytest.raises(LoadError, match=named):
            open_to("join", 1, nodes, b"known")
        with pytest.raises(LoadError, match=named):
            rendezvous.listen(nodes, b"known", lambda why: None)


def test_a_name_that_does_not_resolve_is_asked_for_as_long_as_a_group_of_pods_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Elsewhere it is nearly always misspelt. Either is named at once."""
    monkeypatch.setattr(rendezvous, "RESOLVE_SECONDS", 0.0)
    own = NodesConfig(count=2, address="no-such-node.invalid", token="known", timeout_s=600.0)
    noted: list[str] = []
    with pytest.raises(LoadError, match="It was tried for 0 s"):
        rendezvous.listen(own, b"known", noted.append)
    assert noted == []
    pods = msgspec.structs.replace(own, of_group=True, timeout_s=0.5)
    with pytest.raises(LoadError, match=r"It was tried for 0\.5 s"):
        rendezvous.listen(pods, b"known", noted.append)
    (why,) = noted
    assert why.startswith("The address `no-such-node.invalid` of node 0 does not resolve: ")


def test_the_start_names_the_ranks_that_have_not_joined(llama_folder: Path) -> None:
    config = node_config(llama_folder, 3, count=3)
    assert config.nodes is not None
    details: list[str] = []
    spec = load_model_spec(llama_folder)
    files = ModelFiles(
        msgspec.structs.replace(config, nodes=msgspec.structs.replace(config.nodes, timeout_s=0.5)), llama_folder, spec,
        lambda phase, detail: details.append(detail),
    )  # fmt: skip
    with kept_threads(), pytest.raises(LoadError, match="rank 1 of node 1, rank 2 of node 2 did not join node 0"):
        load_nodes(files, choose_compute(files.config, spec))
    assert [each.partition(" to join")[0] for each in details] == ["waiting for rank 1 of node 1, rank 2 of node 2"]


def test_a_node_that_is_not_there_is_named(llama_folder: Path) -> None:
    nodes = of_node(node_config(llama_folder, 2), 1, timeout_s=0.01).nodes
    assert nodes is not None
    with pytest.raises(LoadError, match=rf"127\.0\.0\.1:{nodes.port} cannot be reached: .*Start node 0"):
        open_to("join", 1, nodes, b"known")


def test_who_does_not_know_the_token_does_not_join(llama_folder: Path) -> None:
    """What it sends is not answered, and does not hinder those that know it."""
    config = node_config(llama_folder, 2)
    assert config.nodes is not None
    listener = rendezvous.listen(config.nodes, b"known", lambda why: None)
    with pytest.raises(LoadError, match="Give all nodes the same internal token"):
        open_to("join", 1, config.nodes, b"other")
    found = open_to("join", 1, config.nodes, b"known")
    again = open_to("join", 1, config.nodes, b"known")
    collected = listener.collect([("join", 1), ("join", 2)], time.monotonic() + 0.5, lambda left: None)
    assert set(collected) == {("join", 1)}
    # They are greeted at the same time, so that either may be the second one of that number.
    second = again if collected["join", 1].getpeername() == found.getsockname() else found
    listener.close()
    second.settimeout(WAIT_LIMIT_S)
    assert second.recv(1) == b""
    for each in (found, again, *collected.values()):
        each.close()


def test_settings_of_nodes_are_checked(llama_folder: Path, tmp_path: Path) -> None:
    nodes = NodesConfig(count=3, address="a", token="known")
    with pytest.raises(ValueError, match=r"4 processes .* cannot be divided equally among 3 nodes; change nnodes"):
        EngineConfig(model="m", tensor_parallel_size=4, nodes=nodes)
    for wrong, named in (
        ({"count": 1}, "nnodes must be 2 to 64, got 1"),
        ({"count": 2, "rank": 2}, "node_rank must be 0 to 1, got 2"),
        ({"count": 2, "address": ""}, "master_addr is empty"),
        ({"count": 2, "port": 0}, "master_port: 0 is not a port"),
    ):
        with pytest.raises(ValueError, match=named):
            NodesConfig(**{"address": "a", **wrong})
    file = tmp_path / "tokens"
    file.write_text("\nfirst\nsecond\n")
    assert token_of(NodesConfig(count=2, address="a", tokens_file=str(file))) == b"first"
    with pytest.raises(LoadError, match=r"need a token that all of them know\. Set PAGEMILL_INTERNAL_TOKEN"):
        token_of(NodesConfig(count=2, address="a"))
    with pytest.raises(LoadError, match="cannot be read"):
        token_of(NodesConfig(count=2, address="a", tokens_file=str(tmp_path / "absent")))
    config = node_config(llama_folder, 4, count=2)
    assert threads_of_ranks(msgspec.structs.replace(config, num_threads=4)) == [2, 2]
    with pytest.raises(LoadError, match=r"2 processes of each node that compute at the same time, .* may use 1 core"):
        threads_of_ranks(msgspec.structs.replace(config, num_threads=1))
