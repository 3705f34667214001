"""Accelerators and models in one table, users instead of a rate, and models that do not fit."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result
from outlines import PUBLISHED, QWEN_7B, QWEN_14B, write_outline
from scaling_world import BLOCK_SIZE, STEP_TIME
from typer.testing import CliRunner

from examples import num_examples
from pagemill.main import app
from pagemill.planning.accelerators import ACCELERATORS, find_accelerator
from pagemill.planning.forecast import PlannedWorkload, forecast, of_users
from pagemill.planning.placement import SEVERAL_DEVICES
from pagemill.planning.replica import PlannedReplica
from pagemill.planning.users import MEAN, Cycles, Users
from pagemill_kernels.gpu.launch import FP8_CAPABILITY, OLDEST_CAPABILITY
from pagemill_operator.autoscaler.settings import Slo
from pagemill_protocol.report.prediction import Predictor
from pagemill_protocol.report.shape import Shape

pytestmark = pytest.mark.usefixtures("short_simulation")
REPLICA = PlannedReplica(Shape(4000, BLOCK_SIZE, 64, 512, STEP_TIME), 4096, 10**8, 1024, None, "cpu", "given")
LENGTHS = PlannedWorkload(0.0, 256, 100)
SLO = Slo(ttft_ms=500.0, tpot_ms=40.0)


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_outline(tmp_path_factory.mktemp("models") / "seven", QWEN_7B)


@pytest.fixture(scope="module")
def fourteen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_outline(tmp_path_factory.mktemp("models") / "fourteen", QWEN_14B)


def plan(*arguments: Any, rps: float | None = 2, input: int = 1000, output: int = 60) -> Result:
    rate = [] if rps is None else ["--rps", rps]
    words = ["plan", "--input", input, "--output", output, *rate, *arguments]
    return CliRunner().invoke(app, [str(word) for word in words])


def plans(*arguments: Any, **load: Any) -> list[dict[str, Any]]:
    result = plan(*arguments, "-o", "json", **load)
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["plans"]
    return found


# Several plans in one table


def test_each_row_equals_the_plan_of_its_accelerator_alone(seven: Path) -> None:
    devices = ("l4", "h200")
    together = plans("--model", seven, *(word for name in devices for word in ("--accelerator", name)))
    assert [each["accelerator"] for each in together] == list(devices)
    for each in together:
        alone = json.loads(plan("--model", seven, "--accelerator", each["accelerator"], "-o", "json").stdout)
        for field in ("replicas", "replicasKept", "utilization", "candidates", "replica", "stepTime"):
            assert each[field] == alone[field]


def test_an_accelerators_own_price_takes_precedence_over_the_common_one(seven: Path) -> None:
    l4, a100 = plans(
        *("--model", seven, "--accelerator", "l4", "--accelerator", "a100-80gb"),
        *("--price-per-hour", "l4=0.8", "--price-per-hour", "3.5"),
    )
    for each, price in ((l4, 0.8), (a100, 3.5)):
        chosen = next(row for row in each["candidates"] if row["replicas"] == each["replicas"])
        assert chosen["cost"]["per_hour"] == pytest.approx(price * each["replicas"])
        tokens = 2 * 3600 * 1060
        assert chosen["cost"]["per_million_tokens"] == pytest.approx(price * each["replicas"] / tokens * 1e6)


def test_the_table_has_replicas_utilization_and_costs_of_each(seven: Path) -> None:
    result = plan("--model", seven, "--accelerator", "l4", "--accelerator", "a100-80gb", "--price-per-hour", "l4=0.8")
    assert result.exit_code == 0, result.output
    head, l4, a100 = result.stdout.splitlines()[2:5]
    assert head.split("  ")[0] == "ACCELERATOR"
    for column in ("REPLICAS", "GPUS EACH", "UTILIZATION", "COST/H", "PER 1M TOKENS", "TPOT P95"):
        assert column in head
    assert l4.startswith("l4 ")
    assert a100.rstrip().endswith("-"), "an unknown price must not be shown"


def test_models_are_compared_on_one_device_and_those_that_do_not_fit_are_reported(seven: Path, fourteen: Path) -> None:
    small, large = plans("--model", seven, "--model", fourteen, "--accelerator", "l4")
    assert small["replicas"] >= 1
    assert large["replica"]["gpus"] == 2
    table = plan("--model", seven, "--model", fourteen, "--accelerator", "l4")
    assert table.exit_code == 0
    assert f"{fourteen} on l4: {SEVERAL_DEVICES}; tensorParallel 2 is" in table.stdout
    assert "l4 cannot serve this; the engine would refuse it: ModelTooLarge: " in table.stdout


def test_if_no_device_serves_the_load_the_exit_code_is_1(fourteen: Path) -> None:
    result = plan("--model", fourteen, "--accelerator", "l4", "--accelerator", "a100-40gb", "--tpot", "1ms")
    assert result.exit_code == 1
    assert "a100-40gb: No number of replicas serves this load within TPOT 1 ms" in result.stdout


def test_utilization_is_the_load_divided_by_the_capacity_of_the_chosen_replicas() -> None:
    found = forecast(REPLICA, LENGTHS.at(20.0), SLO, 50, None)
    assert found.needed is not None
    assert found.utilization == pytest.approx(20.0 / (found.needed * found.capacity))
    assert 0 < found.utilization <= 1


# Models that do not fit


def test_for_a_model_that_does_not_fit_other_devices_and_quantizations_are_named(fourteen: Path) -> None:
    result = plan("--model", fourteen, "--accelerator", "l4")
    known = result.stdout.partition(" Of the known devices, it fits on ")[2]
    devices, _, remedy = known.partition("; ")
    assert {"a100-80gb", "h200"} <= set(devices.split(", "))
    assert "mi300x" not in devices, "no pod runs there"
    assert remedy.startswith("spec.engine.quantization int8 or int4 makes it fit on l4")
    for name in devices.split(", ")[: num_examples(10)]:
        assert plan("--model", fourteen, "--accelerator", name).exit_code == 0


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"quantization": "fp8"}, "spec.engine.quantization fp8 needs hardware for 8-bit floats"),
        ({"kvCacheDtype": "fp8"}, "spec.engine.kvCacheDtype fp8 needs hardware for 8-bit floats"),
    ],
)
def test_fp8_without_hardware_support_names_device_field_and_remedy(
    write: Any, simulated: Any, seven: Path, engine: dict[str, str], words: str
) -> None:
    resources = {"gpus": 1, "gpuProduct": "NVIDIA-A100-SXM4-80GB"}
    document = simulated(engine={"extraArgs": [], "maxModelLen": 2048, **engine}, resources=resources)
    file = write("gpu.yaml", document)
    result = plan("-f", file, "--model", seven)
    assert result.exit_code == 2, result.output
    assert f"a100-80gb cannot serve this: {words}" in result.stderr
    assert "compute capability 8.0" in result.stderr
    assert "choose one of b200, h100-80gb, h200, l4, l40s" in result.stderr
    assert plan("-f", file, "--model", seven, "--accelerator", "h100-80gb").exit_code == 0


def test_fp8_matmuls_take_half_the_time_if_arithmetic_is_the_limit(write: Any, simulated: Any, seven: Path) -> None:
    def prompt_ms(quantization: str) -> float:
        engine = {"extraArgs": [], "maxModelLen": 4096, "quantization": quantization}
        file = write("gpu.yaml", simulated(engine=engine, resources={"gpus": 1}))
        found = json.loads(plan("-f", file, "--model", seven, "--accelerator", "h100-80gb", "-o", "json").stdout)
        return float(found["stepTime"]["knot_ms"][-1])

    assert prompt_ms("fp8") == pytest.approx(prompt_ms("int8") / 2, rel=0.1)


def test_another_makers_device_is_planned_with_a_note_that_no_pod_runs_there(seven: Path) -> None:
    result = plan("--model", seven, "--accelerator", "mi300x")
    assert result.exit_code == 0, result.output
    assert "for comparison of data sheets only" in result.stdout


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=lambda each: each.name)
def test_the_data_sheets_agree_with_the_requirements_of_the_kernels(accelerator: Any) -> None:
    capability = accelerator.capability
    assert capability is None or capability >= OLDEST_CAPABILITY
    assert capability is None or accelerator.has_fp8 == (capability >= FP8_CAPABILITY)
    assert 1.9 < accelerator.operations8_per_s / accelerator.operations_per_s < 2.1
    assert all(find_accelerator(product) is accelerator for product in accelerator.products)


def test_names_may_be_in_capitals_and_without_the_only_size(seven: Path) -> None:
    shown = plan("--model", seven, "--accelerator", "L4", "--accelerator", "l4", "--accelerator", "H100")
    assert shown.exit_code == 0, shown.output
    rows = [line.split()[0] for line in shown.stdout.splitlines()[3:5]]
    assert rows == ["l4", "h100-80gb"]
    assert plan("--model", seven, "--accelerator", "a100").exit_code == 2, "there are two"


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=lambda each: each.name)
def test_a_device_has_less_memory_than_its_data_sheet_says(accelerator: Any) -> None:
    stated = re.search(r"(\d+) ?GB\b", accelerator.source) or re.search(r"(\d+)gb", accelerator.name)
    assert stated is not None
    assert 0.9 * int(stated[1]) < accelerator.memory_bytes / 1024**3 < int(stated[1])


# Numbers of users


@pytest.mark.parametrize(("num_users", "think_s"), [(1, 30.0), (40, 5.0), (100, 30.0), (400, 2.0)])
def test_littles_law_holds_for_users_with_think_time(num_users: int, think_s: float) -> None:
    """N = X (Z + R), with the mean time of an answer at that very rate."""
    users = Users(num_users, think_s)
    workload = of_users(REPLICA, LENGTHS, users, SLO, 50)
    found = forecast(REPLICA, workload, SLO, 50, None)
    assert found.needed is not None
    mean = Predictor(REPLICA.shape, MEAN).predict(workload.offered, found.needed)
    answer_s = (mean.ttft_ms + (LENGTHS.output_tokens - 1) * mean.tpot_ms) / 1000
    assert workload.requests_per_s * (think_s + answer_s) == pytest.approx(num_users, rel=0.01)
    assert workload.answering == pytest.approx(workload.requests_per_s * answer_s, rel=0.02)


def test_the_number_of_replicas_for_users_is_minimal() -> None:
    users = Users(400, 5.0)
    cycles = Cycles(REPLICA, LENGTHS.offered, users)
    found = cycles.fewest(SLO, 50)
    assert found is not None
    needed, steady_load = found
    assert forecast(REPLICA, LENGTHS.at(steady_load.requests_per_s), SLO, 50, None).needed == needed
    for fewer in range(1, needed):
        less = cycles.steady_load(fewer)
        assert less is None or not forecast(REPLICA, LENGTHS.at(less.requests_per_s), SLO, fewer, None).needed


def test_a_saturated_replica_is_never_chosen() -> None:
    workload = of_users(REPLICA, LENGTHS, Users(5000, 1.0), Slo(), 1)
    assert forecast(REPLICA, workload, Slo(), 1, None).needed is None


def test_a_replica_serves_the_number_of_users_that_the_plan_states() -> None:
    workload = of_users(REPLICA, LENGTHS, Users(100, 5.0), SLO, 50)
    supported = forecast(REPLICA, workload, SLO, 50, None).users_supported
    assert supported is not None

    def needed(num_users: int) -> int | None:
        asked = of_users(REPLICA, LENGTHS, Users(num_users, 5.0), SLO, 50)
        return forecast(REPLICA, asked, SLO, 50, None).needed

    assert needed(round(supported * 0.97)) == 1
    assert needed(round(supported * 1.05)) == 2


def test_users_with_a_longer_think_time_send_fewer_requests() -> None:
    rates = [of_users(REPLICA, LENGTHS, Users(100, think), SLO, 50).requests_per_s for think in (0.0, 5.0, 60.0)]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(
    ("arguments", "rps", "words"),
    [
        ([], None, "give either --rps with requests per second, or --users with --think"),
        (["--users", "3", "--think", "1s"], 2, "give either --rps with requests per second, or --users"),
        (["--users", "3"], None, "--users and --think go together: --users 100 --think 30s"),
        (["--think", "3s"], 2, "--users and --think go together"),
        (["--users", "3", "--think", "long"], None, "--think 'long' is not a duration"),
        (["--price-per-hour", "l5=1"], 2, "--price-per-hour l5=1: l5 is not a known accelerator; name one of"),
        (["--price-per-hour", "l4=free"], 2, "--price-per-hour l4=free: must be a number above 0"),
        (["--price-per-hour", "1", "--price-per-hour", "2"], 2, "--price-per-hour 2: is a second price for the"),
    ],
)
def test_options_that_exclude_each_other_are_named(
    seven: Path, arguments: list[str], rps: float | None, words: str
) -> None:
    result = plan("--model", seven, "--accelerator", "l4", *arguments, rps=rps)
    assert result.exit_code == 2, result.output
    assert words in result.stderr


def test_without_file_and_model_both_options_are_named() -> None:
    result = plan("--accelerator", "l4")
    assert result.exit_code == 2
    assert "give --file with an LLMDeployment, or --model with a model's source" in result.stderr


def test_step_times_of_one_device_cannot_be_used_for_two(seven: Path, tmp_path: Path) -> None:
    fit = tmp_path / "fit.json"
    fit.write_bytes(msgspec.json.encode(STEP_TIME))
    result = plan("--model", seven, "--accelerator", "l4", "--accelerator", "h200", "--fit", fit)
    assert result.exit_code == 2
    assert "has the step times of one model on one device; plan one combination at a time" in result.stderr


# The exercises of the page


def test_models_that_fit_on_a_24_gb_card(tmp_path: Path) -> None:
    """7B in bfloat16 fits with a few long contexts, 14B does not, and 14B in 4 bits does."""
    folders = [write_outline(tmp_path / str(at), config) for at, config in enumerate(PUBLISHED.values())]
    models = [word for folder in folders for word in ("--model", folder)]
    seven, fourteen, packed = plans(*models, "--accelerator", "l4", rps=0.2, input=4000, output=300)
    assert "ModelTooLarge" in fourteen["replica"]["chosenRanks"]["reason"]
    assert 13 < seven["replica"]["weightBytes"] / 1024**3 < 15
    assert 8 < packed["replica"]["weightBytes"] / 1024**3 < 13
    for each in (seven, packed):
        replica = each["replica"]
        held = replica["numBlocks"] * replica["blockSize"]
        assert replica["requestsAtOnce"] == min(replica["maxNumSeqs"], held // 4300)
        assert replica["longestRequestsAtOnce"] == held // replica["maxModelLen"]


def test_7b_on_l4_costs_less_per_hour_and_is_slower_than_on_a100(seven: Path) -> None:
    l4, a100 = plans(
        *("--model", seven, "--accelerator", "l4", "--accelerator", "a100-80gb"),
        *("--price-per-hour", "l4=0.8", "--price-per-hour", "a100-80gb=3.7"),
        rps=0.2,
    )
    assert l4["candidates"][0]["cost"]["per_hour"] < a100["candidates"][0]["cost"]["per_hour"]
    assert l4["idle"]["tpot_ms"] > 4 * a100["idle"]["tpot_ms"]


def test_100_users_with_30_s_of_think_time_send_fewer_than_three_requests_per_second(seven: Path) -> None:
    result = plan(
        *("--model", seven, "--accelerator", "l4", "--users", 100, "--think", "30s", "--tpot", "120ms", "-o", "json"),
        rps=None,
    )
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    assert 1 < body["workload"]["requests_per_s"] < 100 / 30
    assert body["workload"]["users"] == {"num_users": 100, "think_s": 30.0}
    assert body["replica"]["users"] * body["replicas"] >= 100


DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "how-to" / "plan-capacity.md").read_text()
LINES = re.findall(r"^\.venv/bin/pagemill (plan .*hf://.*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("line", LINES)
def test_the_pages_statements_on_published_models_follow_from_their_headers(line: str, tmp_path: Path) -> None:
    """A folder of the same dimensions replaces each source, since tests download nothing."""
    folders = {f"hf://{name}": write_outline(tmp_path / name, config) for name, config in PUBLISHED.items()}
    result = CliRunner().invoke(app, [str(folders.get(word, word)) for word in shlex.split(line)])
    assert result.exit_code == 0, result.output
    shown = PAGE.partition(line)[2].partition("```bash")[0]
    table = re.search(r"```text\n(.*?)```", shown, re.DOTALL)
    assert table is None or table[1] in result.stdout
    for rows, words in (
        ("AWQ", r"Instruct +l4 .* 18 +2 x 32,768"),
        ("AWQ", r"AWQ +l4 .* 11 +1 x 32,768"),
        ("--tpot 100ms\n", r"1\.78 requests/s; 46\.5 of 100 wait for an answer"),
        ("--tpot 100ms\n", r"\n2 +718 ms +103 ms +no\n"),
        ("--tpot 100ms\n", r"3 replicas are needed .* \(47 such users\)"),
    ):
        assert rows not in f"{line}\n" or re.search(words, result.stdout), words


def keys_of(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {key for each in value.values() for key in keys_of(each)}
    return {key for each in value for key in keys_of(each)} if isinstance(value, list) else set()


def simulate(seven: Path, *arguments: Any) -> dict[str, Any]:
    traffic = ("--workload", "steady", "--rps", 1, "--duration", "30s", "--max-replicas", 2, "--fast")
    words = ["simulate", "--model", seven, "--accelerator", "l4", *traffic, *arguments, "-o", "json"]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    body: dict[str, Any] = json.loads(result.stdout)
    return body


def test_a_simulation_of_several_devices_equals_that_of_each(seven: Path) -> None:
    prices = ("--price-per-hour", "l4=0.8", "--price-per-hour", "2")
    both = simulate(seven, "--accelerator", "l40s", *prices)
    l4, l40s = both["devices"]
    assert [each["replica"]["device"] for each in (l4, l40s)] == ["l4", "l40s"]
    alone = simulate(seven, *prices)
    for each, price in ((l4, 0.8), (l40s, 2.0)):
        (policy,) = each["policies"]
        assert policy["cost"]["total"] == pytest.approx(policy["pod_seconds"] / 3600 * price)
        tokens = both["workload"]["promptTokens"] + both["workload"]["outputTokens"]
        assert policy["cost"]["per_million_tokens"] == pytest.approx(policy["cost"]["total"] / tokens * 1e6)
    (same,) = alone["policies"]
    assert {**l4["policies"][0], "wall_s": 0} == {**same, "wall_s": 0}


def test_the_page_describes_all_fields_of_a_simulations_json(seven: Path) -> None:
    found = simulate(seven, "--accelerator", "l40s", "--price-per-hour", "1")
    for each in found["devices"]:
        del each["stepTime"]
        each["policies"] = [{"cost": policy["cost"]} for policy in each["policies"]]
    assert keys_of(found) <= words_of_page()


def words_of_page() -> set[str]:
    page = (DOCS / "reference" / "plan.md").read_text()
    return set(re.findall(r"[A-Za-z_]+", " ".join(re.findall(r"`([^`]+)`", page))))


def test_the_page_describes_all_fields_of_a_plans_json(seven: Path) -> None:
    arguments = ("--model", seven, "--accelerator", "l4", "--users", 9, "--think", "9s", "--price-per-hour", 1)
    one = json.loads(plan(*arguments, "-o", "json", rps=None).stdout)
    several = json.loads(plan(*arguments, "--accelerator", "h200", "--roles", "-o", "json", rps=None).stdout)
    del one["stepTime"], several["plans"]
    assert keys_of(one) | keys_of(several) <= words_of_page()
