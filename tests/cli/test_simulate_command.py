"""`pagemill simulate`: a deployment's fleet under traffic; errors name option or field and remedy."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_policy
import msgspec
import pytest
from click.testing import Result
from pydantic import TypeAdapter, ValidationError
from scaling_world import STEP_TIME
from typer.testing import CliRunner

from pagemill.main import LazyCommand, app
from pagemill.planning.errors import PlanError
from pagemill.simulation.fleet import cold_start_of
from pagemill.simulation.policies import BOUND, OWN, own_settings
from pagemill.simulation.traffic import Traffic, workload_of
from pagemill_crds.fields import Duration
from pagemill_crds.sections.autoscaling import AutoscalingSection
from pagemill_operator.autoscaler.registry import BUILT_IN
from pagemill_operator.autoscaler.settings import Slo, settings_of
from pagemill_simulator.bounds.informed import Informed
from pagemill_simulator.fleet.settings import ColdStart
from pagemill_simulator.scaling.policy import ReplicaBounds
from pagemill_simulator.scaling.rivals import RIVALS
from pagemill_simulator.workloads.generators import GENERATORS

Write = Callable[..., Path]
Simulated = Callable[..., dict[str, Any]]
SHORT = "steady:rate=3,duration_s=10,prompt_tokens=100,output_tokens=20,longest_prompt=400,longest_output=100"
BUSY = "steady:rate=20,duration_s=60,prompt_tokens=200,output_tokens=60,longest_prompt=400,longest_output=100"
AUTOSCALING = {"minReplicas": 1, "maxReplicas": 3, "slo": {"ttft": "800ms", "tpot": "40ms"}}


def simulate(file: Path, *arguments: Any, workload: str | None = SHORT) -> Result:
    words = ["simulate", "-f", file, *([] if workload is None else ["--workload", workload]), *arguments]
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def fit(tmp_path: Path) -> Path:
    path = tmp_path / "fit.json"
    path.write_bytes(msgspec.json.encode(STEP_TIME))
    return path


@pytest.fixture
def file(write: Write, simulated: Simulated) -> Path:
    """Write a deployment with few blocks: a simulated engine has a million by default, which takes longer to create."""
    engine = {"maxModelLen": 2048, "extraArgs": ["--num-kv-blocks=8000"]}
    return write("chat.yaml", simulated("chat", engine=engine, autoscaling=AUTOSCALING))


# Answers


def test_policies_are_shown_side_by_side(file: Path, fit: Path) -> None:
    result = simulate(file, "--fit", fit, "--policy", "pagemill", "--policy", "fixed:replicas=2", "--policy", "dynamo")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    (head,) = (line for line in lines if line.startswith("POLICY"))
    assert "SLO MET" in head
    assert [line.split()[0] for line in lines[lines.index(head) + 1 :][:3]] == ["pagemill", "fixed", "dynamo"]
    assert "the SLO is TTFT 800 ms and TPOT 40 ms" in result.stdout


@pytest.mark.slow
def test_the_files_policy_is_used_by_default_and_another_one_can_be_simulated(
    write: Write, simulated: Simulated, fit: Path
) -> None:
    def figures(policy: str, *options: str) -> list[dict[str, Any]]:
        autoscaling = {**AUTOSCALING, "slo": {"ttft": "100ms"}, "policy": policy}
        spec = simulated("chat", engine={"maxModelLen": 2048, "extraArgs": []}, autoscaling=autoscaling)
        file = write(f"{policy}.yaml", spec)
        body = json.loads(simulate(file, "--fit", fit, "-o", "json", "--fast", *options, workload=BUSY).stdout)
        return [{**each, "wall_s": 0.0} for each in body["policies"]]

    (demand,), (tracking,) = figures("Demand"), figures("TargetTracking")
    (tried,) = figures("Demand", "--policy", "TargetTracking")
    assert (demand["policy"], tracking["policy"], tried["policy"]) == ("pagemill", "pagemill", "TargetTracking")
    assert {**tried, "policy": "pagemill"} == tracking
    most = (demand["num_scale_ups"], tracking["num_scale_ups"])
    assert most == (1, 0), "only one of the policies uses the SLO, which one replica does not meet"


@pytest.mark.slow
def test_a_policy_of_another_package_is_simulated_like_any_other(
    file: Path, fit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign_policy.install(tmp_path, monkeypatch, {foreign_policy.NAME: "foreign_policies:PerRequest"})
    try:
        for fast in ([], ["--fast"]):
            result = simulate(file, "--fit", fit, "--policy", "PerRequest", "-o", "json", *fast, workload=BUSY)
            assert result.exit_code == 0, result.output
            (figures,) = json.loads(result.stdout)["policies"]
            assert (figures["policy"], figures["most_replicas"], figures["num_scale_downs"]) == ("PerRequest", 3, 0)
    finally:
        foreign_policy.uninstall()


@pytest.mark.full
def test_the_bound_without_foresight_is_better_than_one_replica_for_rising_traffic(file: Path, fit: Path) -> None:
    """`tests/simulator/test_scaling_bounds.py` covers more workloads."""
    rising = "ramp:from_rate=2,to_rate=30,before_s=20,over_s=60,after_s=30,prompt_tokens=200,output_tokens=60"
    asked = ["--fit", fit, "--fast", "--cold-start", "5s", "-o", "json"]
    found = simulate(file, *asked, "--policy", "informed", "--policy", "fixed:replicas=1", workload=rising)
    assert found.exit_code == 0, found.output
    informed, fixed = json.loads(found.stdout)["policies"]
    assert informed["policy"] == "informed"
    assert (informed["num_scale_ups"] > 0, informed["slo_attained"] > fixed["slo_attained"]) == (True, True)


def test_the_bound_without_foresight_requires_the_rate_of_the_traffic(file: Path, fit: Path, write: Write) -> None:
    trace = write("azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5,300,40\n")
    refused = simulate(file, "--fit", fit, "--policy", "informed", "--trace", trace, workload=None)
    assert refused.exit_code == 2
    assert "--policy informed: needs the rate of generated traffic" in refused.stderr
    assert "use --workload" in refused.stderr


def test_fast_forward_is_announced_and_gives_nearly_the_same_result(file: Path, fit: Path) -> None:
    exact, fast = (simulate(file, "--fit", fit, "-o", "json", *words) for words in ([], ["--fast"]))
    assert fast.exit_code == 0, fast.output
    (theirs,), (mine,) = (json.loads(each.stdout)["policies"] for each in (exact, fast))
    assert (mine["is_exact"], theirs["is_exact"]) == (False, True)
    assert mine["num_served"] == theirs["num_served"]
    assert mine["ttft_ms"]["p95"] == pytest.approx(theirs["ttft_ms"]["p95"], rel=0.03)
    assert "Simulated with --fast in" in simulate(file, "--fit", fit, "--fast").stdout


def test_the_json_output_is_complete_and_reproducible(file: Path, fit: Path) -> None:
    first, second = (simulate(file, "--fit", fit, "--seed", 7, "-o", "json") for _ in range(2))
    assert first.exit_code == 0, first.output
    body, again = json.loads(first.stdout), json.loads(second.stdout)
    (figures,) = body["policies"]
    assert figures["num_requests"] == body["workload"]["requests"] > 10
    assert figures["num_served"] + figures["num_refused"] + figures["num_lost"] == figures["num_requests"]
    assert figures["ttft_ms"]["p50"] <= figures["ttft_ms"]["p95"] <= figures["ttft_ms"]["p99"]
    assert 0 <= figures["slo_attained"] <= 1
    assert body["bounds"] == {"min_replicas": 1, "max_replicas": 3}
    for each in (body, again):
        del each["policies"][0]["wall_s"]
    assert again == body
    other = json.loads(simulate(file, "--fit", fit, "--seed", 8, "-o", "json").stdout)
    assert other["workload"] != body["workload"]


def test_a_trace_is_read_by_its_first_line(file: Path, fit: Path, write: Write) -> None:
    trace = write("day.csv", "Timestamp,Model,Request tokens,Response tokens\n1,a,100,10\n4,a,50,20\n4,a,50\n")
    result = simulate(file, "--fit", fit, "--trace", trace, "--skip-broken", "-o", "json", workload=None)
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    assert (body["workload"]["requests"], body["workload"]["outputTokens"]) == (2, 30)
    assert "1 broken lines left out" in body["workload"]["source"]
    broken = simulate(file, "--fit", fit, "--trace", trace, workload=None)
    assert broken.exit_code == 2
    assert f"--trace {trace}:4: expected at least 4 fields, got 3" in broken.stderr


def test_bounds_and_slo_can_be_overridden(file: Path, fit: Path) -> None:
    options = ["--min-replicas", 2, "--max-replicas", 2, "--ttft", "1ms", "--fit", fit, "-o", "json"]
    body = json.loads(simulate(file, *options).stdout)
    (figures,) = body["policies"]
    assert (figures["most_replicas"], figures["num_scale_ups"], figures["slo_attained"]) == (2, 0, 0.0)


@pytest.mark.slow
def test_without_autoscaling_the_replicas_do_not_change(write: Write, simulated: Simulated, fit: Path) -> None:
    file = write("plain.yaml", simulated(engine={"extraArgs": []}, replicas=2))
    result = simulate(file, "--fit", fit, "-o", "json")
    assert result.exit_code == 0, result.output
    (figures,) = json.loads(result.stdout)["policies"]
    assert (figures["most_replicas"], figures["slo_attained"]) == (2, None)
    assert figures["pod_seconds"] == pytest.approx(2 * figures["duration_s"])


def test_the_fleet_recovers_from_crashes(file: Path, fit: Path) -> None:
    options = ["--fit", fit, "--crash-mean", "5s", "--cold-start", "2s", "--min-replicas", 2, "-o", "json"]
    (figures,) = json.loads(simulate(file, *options).stdout)["policies"]
    assert figures["num_served"] + figures["num_lost"] + figures["num_refused"] == figures["num_requests"]
    assert figures["num_served"] > 0


@pytest.mark.slow
def test_a_report_is_a_page_in_a_folder(file: Path, fit: Path, tmp_path: Path) -> None:
    folder = tmp_path / "some" / "where"
    result = simulate(file, "--fit", fit, "--report", folder, "--policy", "pagemill", "--policy", "fixed")
    assert result.exit_code == 0, result.output
    assert f"report: {folder / 'report.html'}" in result.stderr
    page = (folder / "report.html").read_text()
    assert "pagemill" in page
    assert "fixed" in page
    refused = simulate(file, "--fit", fit, "--report", file)
    assert refused.exit_code == 2
    assert f"--report {file}: cannot be created: File exists; name another folder" in refused.stderr


# Settings from file and options


def test_cold_starts_are_given_as_a_whole_or_by_phase() -> None:
    assert cold_start_of(None) == ColdStart()
    whole = cold_start_of("80s")
    assert whole.total_s == pytest.approx(80.0)
    assert whole.load_s / whole.warm_s == pytest.approx(ColdStart().load_s / ColdStart().warm_s)
    phased = cold_start_of("load=2m, pull=500ms")
    assert (phased.load_s, phased.pull_s, phased.warm_s) == (120.0, 0.5, ColdStart().warm_s)


@pytest.mark.parametrize("mode", ["Active", "Advisory"])
def test_the_settings_equal_those_that_the_operator_derives_from_the_file(mode: str) -> None:
    section = AutoscalingSection.model_validate(
        {**AUTOSCALING, "mode": mode, "minReplicas": 0, "scaleToZeroAfter": "90s"}
    )
    active = section.model_copy(update={"mode": "Active"})
    assert own_settings(section, ReplicaBounds(0, 3), Slo(ttft_ms=800.0, tpot_ms=40.0)) == settings_of(active)


@pytest.mark.parametrize("section", [None, {"minReplicas": 2, "maxReplicas": 9, "mode": "External"}])
def test_settings_without_an_slo_use_targets(section: dict[str, Any] | None) -> None:
    read = None if section is None else AutoscalingSection.model_validate(section)
    policy = own_settings(read, ReplicaBounds(0, 5), Slo())
    assert (policy.mode, policy.min_replicas, policy.max_replicas) == ("Active", 0, 5)
    assert policy.kv_cache_usage is not None
    assert own_settings(read, ReplicaBounds(0, 5), Slo(ttft_ms=300.0)).slo == Slo(ttft_ms=300.0)


def test_the_help_and_the_page_name_all_workloads_and_policies() -> None:
    options = {name: " ".join(str(each.help).split()) for name, each in _options().items()}
    page = PAGE.read_text()
    for name in (OWN, *BUILT_IN, *RIVALS, Informed.name, BOUND):
        assert name in options["policy"]
        assert f"`{name}" in page
    for name in GENERATORS:
        assert name in options["workload"]
        assert f"`{name}`" in page


def _options() -> dict[str, Any]:
    command = LazyCommand("simulate").load()
    return {each.name: each for each in command.params}


# Errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "vpa"], "--policy 'vpa': is not a policy; choose one of pagemill, Demand, TargetTracking"),
        (["--policy", "pagemill:speed=9"], "--policy pagemill:speed=9: pagemill has no parameters"),
        (["--policy", "hpa:target_waiting=0"], "--policy hpa: target_waiting: '0' will not do"),
        (["--policy", "fixed:replicas"], "--policy fixed:replicas: 'replicas' is no parameter"),
        (["--workload", "tides"], "--workload there is no workload 'tides'; there are steady, ramp"),
        (["--workload", "ramp", "--rps", "3"], "--workload ramp: there is no parameter 'rate'; there are"),
        (["--rps", "nan", "--workload", "steady"], "--workload steady: rate: 'nan' will not do"),
        (["--rps", "3", "--workload", "steady:rate=2"], "--rps 3.0: --workload sets rate=2 already"),
        (["--duration", "soon", "--workload", "steady"], "--duration 'soon' is not a duration; write it like 300ms"),
        (["--limit", "5"], "--limit 5: applies to traces only"),
        (["--trace", "/nonexistent"], "give either --trace FILE or --workload NAME"),
        (["--min-replicas", "5"], "--min-replicas 5 is above --max-replicas 3"),
        (["--start-replicas", "9"], "start_replicas: 9 is not between 1 and 3"),
        (["--cold-start", "boot=3s"], "--cold-start boot=3s: there is no phase 'boot'; write the total, such as 45s"),
        (["--cold-start", "load=fast"], "--cold-start load 'fast' is not a duration"),
        (["--crash-mean", "often"], "--crash-mean 'often' is not a duration"),
        (["--ttft", "0s"], "--ttft 0s: must be above 0"),
        (["--name", "other"], "has no such LLMDeployment; it has chat"),
        (["--fit", "/nonexistent"], "--fit /nonexistent: cannot be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_invalid_option_is_refused_with_its_value_and_the_remedy(
    file: Path, fit: Path, arguments: list[str], words: str
) -> None:
    result = simulate(file, *([] if "--fit" in arguments else ["--fit", fit]), *arguments)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert result.stdout == ""


def test_without_traffic_there_is_nothing_to_simulate(file: Path, fit: Path) -> None:
    result = simulate(file, "--fit", fit, workload=None)
    assert result.exit_code == 2
    assert "give either --trace FILE or --workload NAME, such as --workload ramp" in result.stderr
    nowhere = simulate(file, "--fit", fit, "--trace", "/nonexistent", workload=None)
    assert "--trace /nonexistent: cannot be read" in nowhere.stderr


def test_contradictory_bounds_of_the_file_are_reported_with_their_line(
    write: Write, simulated: Simulated, fit: Path
) -> None:
    file = write("f.yaml", simulated(engine={"extraArgs": []}, autoscaling={"minReplicas": 4, "maxReplicas": 2}))
    result = simulate(file, "--fit", fit)
    assert result.exit_code == 2
    assert "minReplicas" in result.stderr


# The page

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "simulate-scaling.md"


def documented() -> list[str]:
    return re.findall(r"^\.venv/bin/pagemill (simulate .*)$", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize("line", documented())
def test_the_commands_of_the_page_work(line: str, fit: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test shortens the traffic; the tests of `plan` cover measuring."""
    monkeypatch.chdir(PAGE.parents[2])
    words = shlex.split(line)
    if "--trace" in words:
        rows = "".join(f"2023-11-16 18:15:{second}.5,300,40\n" for second in range(10, 20))
        words[words.index("--trace") + 1] = str(write("azure.csv", f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}"))
    else:
        place = words.index("--workload") + 1
        asked = Traffic(None, words[place], None, None, None, None, skip_broken=False)
        assert len(workload_of(asked, seed=0)[0].requests) > 1000
        words[place] = SHORT
    result = CliRunner().invoke(app, words if "--accelerator" in words else [*words, "--fit", str(fit)])
    assert result.exit_code == 0, result.output
    assert "POLICY" in result.stdout


def test_a_trace_has_its_own_rate() -> None:
    with pytest.raises(PlanError, match=r"--rps 3\.0: does not apply to a trace; use --limit and --speedup"):
        workload_of(Traffic(Path("x"), None, 3.0, None, None, None, skip_broken=False), seed=0)


def test_options_and_fields_refuse_a_duration_with_one_sentence() -> None:
    sentence = "'soon' is not a duration; write it like 300ms, 30s, 5m or 1h30m"
    with pytest.raises(PlanError) as of_option:
        cold_start_of("soon")
    with pytest.raises(ValidationError) as of_field:
        TypeAdapter(Duration).validate_python("soon")
    assert str(of_option.value) == f"--cold-start {sentence}"
    assert sentence in str(of_field.value)
