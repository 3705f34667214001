"""The real `promtool` evaluates every recording rule and alert with and without a result."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus import promtool
from rule_cases import ALERT_CASES, RULE_CASES, TENANT, AlertCase, RuleCase, Series

from observability.alerts import ALERTS
from observability.rules import recording_groups

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "charts" / "pagemill" / "files" / "rules.yaml"
GROUPS = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
RUNBOOK_SECTIONS = ["## Meaning", "## Impact", "## What to look at", "## What to do", "## With pagemill up"]


Check = dict[str, Any]


def rule_check(case: RuleCase) -> Check:
    matchers = f"{{{case.labels}}}" if case.labels else ""
    labels = ",".join(part for part in (case.of_model, case.labels, case.of_series) if part)
    samples = [] if case.value is None else [{"labels": f"{{{labels}}}", "value": case.value}]
    expression = f"round({case.record}{matchers}, 0.001)"
    return {"expr": expression, "eval_time": f"{case.minutes}m", "exp_samples": samples}


def alert_check(case: AlertCase) -> Check:
    return {
        "expr": f'count(ALERTS{{alertname="{case.alert}",alertstate="firing"}}) > bool 0',
        "eval_time": f"{case.minutes}m",
        "exp_samples": [{"labels": "{}", "value": 1}] if case.fires else [],
    }


def promtool_tests(checks: Iterable[tuple[Series, Check]]) -> list[Check]:
    """Return one promtool test for all checks of the same series, since each test has a database of its own."""
    tests: dict[tuple[tuple[str, str], ...], Check] = {}
    for series, check in checks:
        inputs = [{"series": each, "values": values} for each, values in series.items()]
        test = {"name": check["expr"], "interval": "1m", "input_series": inputs, "promql_expr_test": []}
        tests.setdefault(tuple(series.items()), test)["promql_expr_test"].append(check)
    return list(tests.values())


@cache
def needed_by(name: str) -> frozenset[str]:
    """Return the names of the rule and of those on whose results it depends."""
    own = [each["expr"] for group in GROUPS for each in group["rules"] if name_of(each) == name]
    records = {name_of(each) for group in GROUPS for each in group["rules"]} - {name}
    return frozenset(
        {name}.union(*(needed_by(each) for each in records if any(each in expression for expression in own)))
    )


def name_of(rule: dict[str, Any]) -> str:
    return str(rule.get("record") or rule["alert"])


def run_promtool(folder: Path, checks: Iterable[tuple[str, Series, Check]]) -> subprocess.CompletedProcess[str]:
    """Evaluate each check of a rule with the rules that this one needs; all others would take most of the time."""
    of_rules = defaultdict[frozenset[str], list[tuple[Series, Check]]](list)
    for name, series, check in checks:
        of_rules[needed_by(name)].append((series, check))
    files = []
    for number, (names, those) in enumerate(of_rules.items()):
        groups = [{**each, "rules": [rule for rule in each["rules"] if name_of(rule) in names]} for each in GROUPS]
        rules, file = (folder / f"{what}-{number}.yaml" for what in ("rules", "tests"))
        rules.write_text(yaml.safe_dump({"groups": [each for each in groups if each["rules"]]}))
        document = {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": promtool_tests(those)}
        file.write_text(yaml.safe_dump(document))
        files.append(file)
    return promtool("test", "rules", *files)


def test_the_rules_are_valid() -> None:
    done = promtool("check", "rules", RULES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_each_recording_rule_has_the_value_of_its_case(tmp_path: Path) -> None:
    done = run_promtool(tmp_path, ((case.record, case.series, rule_check(case)) for case in RULE_CASES))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_each_alert_fires_in_its_case_and_not_in_the_others(tmp_path: Path) -> None:
    done = run_promtool(tmp_path, ((case.alert, case.series, alert_check(case)) for case in ALERT_CASES))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", [ALERT_CASES[0], next(case for case in ALERT_CASES if not case.fires)], ids=str)
def test_an_alert_with_a_different_result_is_detected(tmp_path: Path, case: AlertCase) -> None:
    wrong = case._replace(fires=not case.fires)
    assert run_promtool(tmp_path, [(case.alert, case.series, alert_check(wrong))]).returncode != 0


def test_every_rule_has_a_case_with_a_value_and_one_without_or_with_another() -> None:
    records = {(each.record, tuple(each.labels.values())) for rules in recording_groups().values() for each in rules}
    names = {record for record, _ in records}
    with_value = {
        (case.record, () if case.labels == TENANT else tuple(case.labels.split('"')[1:2]))
        for case in RULE_CASES
        if case.value
    }
    without = {case.record for case in RULE_CASES if case.value is None}
    assert (records - with_value, names - without) == (set(), set())


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    names = {each.name for each in ALERTS}
    assert {case.alert for case in ALERT_CASES if case.fires} == names
    assert {case.alert for case in ALERT_CASES if not case.fires} == names


def test_pagemill_up_has_all_alerts_but_those_of_processes_that_it_lacks() -> None:
    names = [
        {
            each["alert"]
            for group in yaml.safe_load(path.read_text("utf-8"))["groups"]
            for each in group["rules"]
            if "alert" in each
        }
        for path in (RULES, ROOT / "cli" / "pagemill" / "up" / "files" / "rules.yaml")
    ]
    assert names[0] - names[1] == {"PagemillOperatorDown"}
    assert names[1] < names[0]


def test_every_alert_has_a_runbook_with_the_same_sections_and_vice_versa() -> None:
    for alert in ALERTS:
        text = (ROOT / alert.runbook).read_text("utf-8")
        assert [line for line in text.splitlines() if line.startswith("#")] == [f"# {alert.name}", *RUNBOOK_SECTIONS]
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "runbooks").glob("*.md")}
    assert pages == {alert.runbook for alert in ALERTS}
