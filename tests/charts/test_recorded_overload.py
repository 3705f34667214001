"""The alerts on the recording of a real overload, which `bench/overload.py` makes: in time, and not before."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus import promtool

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "cli" / "pagemill" / "up" / "files" / "rules.yaml"
RECORDING: dict[str, Any] = json.loads(Path(__file__).with_name("overload.json").read_text("utf-8"))
SERIES: dict[str, str] = RECORDING["series"]
"""Values in the notation of `promtool test rules`."""
OVERLOAD_FROM_S = int(RECORDING["overload_from_s"])
MOST_S = {"PagemillErrorBudgetBurnsFast": 120, "PagemillNoHeadroom": 180}
"""Within how many seconds after the beginning of the overload an alert fires."""


def firing(alert: str) -> str:
    return f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) > bool 0'


def fired(until_s: int, alerts: set[str]) -> dict[str, Any]:
    """Return the check that until then exactly these alerts fire at some time."""
    expr = f'group by (alertname) (count_over_time(ALERTS{{alertstate="firing"}}[{until_s + 1}s]))'
    samples = [{"labels": f'{{alertname="{each}"}}', "value": 1} for each in sorted(alerts)]
    return {"expr": expr, "eval_time": f"{until_s}s", "exp_samples": samples}


def run_rules(folder: Path, checks: list[dict[str, Any]]) -> str:
    """Evaluate the rules on the recording; return the differences from what is expected."""
    inputs = [{"series": name, "values": values} for name, values in SERIES.items()]
    interval = f"{RECORDING['interval_s']:.0f}s"
    test = {"interval": interval, "input_series": inputs, "promql_expr_test": checks}
    document = {"rule_files": [str(RULES)], "evaluation_interval": interval, "tests": [test]}
    (folder / "tests.yaml").write_text(yaml.safe_dump(document))
    done = promtool("test", "rules", folder / "tests.yaml")
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize("alert", sorted(MOST_S))
def test_an_alert_fires_soon_after_the_beginning_of_the_overload(tmp_path: Path, alert: str) -> None:
    at_s = OVERLOAD_FROM_S + MOST_S[alert]
    check = {"expr": firing(alert), "eval_time": f"{at_s}s", "exp_samples": [{"labels": "{}", "value": 1}]}
    assert run_rules(tmp_path, [check]) == ""


def test_no_alert_fires_before_it(tmp_path: Path) -> None:
    assert run_rules(tmp_path, [fired(OVERLOAD_FROM_S, set())]) == ""


def test_the_other_alerts_do_not_fire_later(tmp_path: Path) -> None:
    assert run_rules(tmp_path, [fired(OVERLOAD_FROM_S + 240, {*MOST_S})]) == ""


def test_the_outcomes_are_the_clients_own_count() -> None:
    found: Counter[str] = Counter()
    for name, notation in SERIES.items():
        if name.startswith("pagemill_gateway_outcomes_total"):
            numbers = [float(each.partition("x")[0]) for each in notation.split() if not each.startswith("_")]
            before = 0.0 if notation.startswith("_") else numbers[0]
            found[re.findall(r'outcome="(\w+)"', name)[0]] += int(numbers[-1] - before)
    assert +found == Counter(RECORDING["client"])
    assert found["no_capacity"] > found["completed"], "it must be an overload"
