"""Configures pytest for all tests; without an NVIDIA device, Triton's kernels run in its interpreter.

The interpreter is selected before anything imports Triton. The longest test files start first, and files that share
servers run in one worker.

Property tests draw a sample of their examples, always the same, unless `--hypothesis-profile=full` is set, which draws
others each time; tests with the marker `sample` run with some of their parameters, and with all of them in `make
test-full`.

Clients trust one certificate authority in place of the machine's 140, whose certificates each of them and each gateway
would read in 30 ms. No test connects to a public server.

Under `nohup`, or in the background of a script, SIGHUP and SIGINT are ignored, and so they would be in every process
that a test starts. Tests send these signals to their processes, which therefore start with the default action of each.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from started_by_fork import install
from unclosed_connections import refuse_unclosed, watch_connections

watch_connections()
install()
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        # This process goes on ignoring the signal, but a program that it executes gets the default action.
        signal.signal(number, lambda *_: None)
os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("shared") / "authority.pem")

settings.register_profile("sample", settings(), max_examples=15, deadline=None, derandomize=True, database=None)
settings.register_profile("full", settings(), max_examples=100, deadline=None)
settings.register_profile("thorough", settings(), max_examples=5000, deadline=None)
settings.load_profile("sample")


SHARED = ("tests/http_servers/", "tests/engine/server/")
"""Folders whose files share servers."""
WITH_ONE_ENGINE = tuple(
    f"tests/gateway/{name}.py" for name in ("test_gateway_engines", "test_gateway_tools", "test_open_responses")
)
"""Files that share an engine with the embedded model, and the gateway in front of it."""
LONGEST = (
    "cli/test_up_session.py",
    "gateway/test_gateway_engines.py",
    "operator/test_local_backend.py",
    "engine/model/test_experts.py",
    "house/test_docs_commands.py",
    "gateway/test_embedding_engines.py",
    "bench/test_gpu_bench.py",
    "gateway/test_worker_processes.py",
    "engine/model/test_hf_equality_tiny.py",
    "engine/model/test_structured_output.py",
    "operator/test_local_scaling.py",
    "engine/model/test_hf_equality_smollm2.py",
    "gateway/test_rolling_engines.py",
    "gateway/test_stream_migration.py",
    "engine/model/test_device_runner.py",
    "engine/model/test_model_families.py",
    "cli/test_plan_command.py",
    "cli/test_plan_comparisons.py",
    "cli/test_serve_command.py",
    "kernels/test_triton_compiled.py",
    "cli/test_plan_from_headers.py",
    "gateway/test_gateway_faults.py",
    "engine/model/test_compiled_before_ready.py",
    "engine/model/test_triton_engine.py",
    "kernels/test_triton_attention.py",
    "engine/model/test_restricted_sampling.py",
    "house/test_house_rules.py",
)
"""Files below `tests` in order of the CPU time of their processes; they start after those of `SHARED`."""
LONG_OF_FEW_TESTS = (
    "charts/test_rules.py",
    "gateway/test_previous_release.py",
    "simulator/test_scaling_bounds.py",
    "operator/running/test_operator_standby.py",
    "gateway/test_outlier_engines.py",
    "bench/test_gateway_budget.py",
    "bench/test_local_scaling_bench.py",
    "bench/test_gateway_pods_bench.py",
    "cli/test_up_dashboards.py",
    "cli/test_live_metrics.py",
    "cli/test_serve_from_bucket.py",
    "bench/test_speed_gate.py",
    "operator/test_local_standby.py",
    "simulator/test_simulated_adapters.py",
    "operator/test_autoscaler_properties.py",
    "simulator/test_cluster_routing.py",
    "cli/test_unprivileged_user.py",
    "gateway/test_gateway_tls.py",
    "cli/test_full_temporary_folder.py",
    "simulator/test_fleet_zero.py",
    "engine/model/test_family_matrix.py",
    "house/test_bench_command.py",
    "bench/test_step_overhead_bench.py",
)
"""Files of up to eight tests that take seconds, much of it waiting: by their number of tests they would begin last."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute tests like `--dist loadfile`, what shares servers as one file, in the order of `_from_longest`."""
    from xdist.scheduler import LoadFileScheduling

    class LoadShared(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return LoadShared(config, log)


def _scope(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    if file in WITH_ONE_ENGINE:
        return WITH_ONE_ENGINE[0]
    return next((folder for folder in SHARED if file.startswith(folder)), file)


class _FromAnotherEntry(pytest.Dir):
    """A folder that each worker reads from another entry on.

    Files are compiled with their assertions rewritten, half of the time of a first collection. Workers that read the
    same files at the same time would each compile all of them; so each finds most of them compiled by the others.
    """

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        found = list(super().collect())
        worker = self.config.workerinput  # type: ignore[attr-defined]
        first = len(found) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        return found[first:] + found[:first]


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if not hasattr(parent.config, "workerinput"):
        return None
    return _FromAnotherEntry.from_parent(parent, path=path)


def _from_longest(items: list[pytest.Item]) -> None:
    """Sort the tests from the longest to the shortest, so that workers do not wait for a long one at the end."""
    order = [*SHARED, *(f"tests/{file}" for file in (*LONGEST, *LONG_OF_FEW_TESTS))]
    rank = {scope: position for position, scope in enumerate(order)}
    scopes = {item.nodeid: _scope(item.nodeid) for item in items}
    sizes = Counter(scopes.values())
    place = {scope: (rank.get(scope, len(order)), -size, scope) for scope, size in sizes.items()}
    items.sort(key=lambda item: (place[scopes[item.nodeid]], item.path))


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Clean up after the fixtures of a test: suspended processes are killed, and no connection may be left open."""
    try:
        return (yield)
    finally:
        if "hung_processes" in sys.modules:
            sys.modules["hung_processes"].end_hung()
        refuse_unclosed()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Freeze what is imported and collected, so that the garbage collector does not scan it repeatedly."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        _from_longest(items)
    unused: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    used: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for item, name in product(items, ("sample", "slow_for")):
        marker, call = item.get_closest_marker(name), getattr(item, "callspec", None)
        if marker is None or call is None:
            continue
        test = item.nodeid.partition("[")[0]
        matching = {pattern for pattern in marker.args if fnmatchcase(call.id, pattern)}
        if name == "sample" and not matching:
            item.add_marker(pytest.mark.full)
        if name == "slow_for" and matching:
            item.add_marker(pytest.mark.slow)
        for pattern in marker.args:
            (used if pattern in matching else unused)[test, pattern].add(call.id)
    # Some of a file's tests may have been selected by their ids; only a complete parameter set reveals a wrong pattern.
    wrong = [f"{test}: {pattern}" for test, pattern in unused.keys() - used.keys() if len(unused[test, pattern]) > 1]
    if wrong:
        raise pytest.UsageError(
            f"patterns of `sample` or `slow_for` that match no parameters: {', '.join(sorted(wrong))}"
        )
