"""Every panel's number is the client's own count: one recorded overload, loaded into a real Prometheus.

`bench/overload.py` makes the recording, `overload.json`. Recorded series are replaced by their rules' expressions, and
all windows by the length of the recording, so that a rate times that length is a count.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus import Prometheus, prometheus, promtool

from observability import rules
from observability.dashboards import autoscaling, fleet, gateway, model

RECORDING: dict[str, Any] = json.loads(Path(__file__).with_name("overload.json").read_text("utf-8"))
CLIENT: dict[str, int] = RECORDING["client"]
SERIES: dict[str, str] = RECORDING["series"]
BEGIN_S = 1_700_000_000
STEP_S = int(RECORDING["interval_s"])
TTFT_S, SECONDS = RECORDING["ttft_s"], RECORDING["seconds"]
PROMPT, COMPLETION = RECORDING["prompt_tokens"], RECORDING["completion_tokens"]
TOLERANCE = 0.05
PRICE = 2.5
"""`spec.cost.hour` of the recorded deployment."""
COUNTED = sum(CLIENT.values()) - CLIENT.get("client_left", 0)
FAILED = COUNTED - CLIENT["completed"]
RECORDED = re.compile(r"([a-z_]+:pagemill_[a-z0-9_]+:[a-z0-9_]+)(\{[^}]*\})?(\[[^\]]*\])?")
WINDOW = re.compile(r"\[(?:\d+[mhd]|\$__rate_interval)\]")


def values_of(notation: str) -> Iterator[float | None]:
    for each in notation.split():
        text, _, times = each.partition("x")
        yield from [None if text == "_" else float(text)] * (int(times or 0) + (text != "_" or not times))


NUM_SAMPLES = max(len([*values_of(each)]) for each in SERIES.values())
LENGTH_S = (NUM_SAMPLES - 1) * STEP_S + 1
"""A window of this length has all samples, and next to nothing is extrapolated."""
END_S = BEGIN_S + (NUM_SAMPLES - 1) * STEP_S


def inlined(expression: str) -> str:
    """Return the expression with the rules' expressions in place of recorded series."""

    def replace(found: re.Match[str]) -> str:
        name, matchers, window = found.groups()
        asked = dict(re.findall(r'(\w+)="([^"$]+)"', matchers or ""))
        parts = []
        for rule in (each for group in rules.recording_groups().values() for each in group if each.record == name):
            if asked.items() <= rule.labels.items():
                expr = inlined(rule.expr)
                for label, value in rule.labels.items():
                    expr = f'label_replace({expr}, "{label}", "{value}", "", "")'
                parts.append(expr)
        return f"({' or '.join(parts)})" + (f"[{LENGTH_S}s:{STEP_S}s]" if window else "")

    return RECORDED.sub(replace, expression)


def as_asked(expression: str) -> str:
    expression = WINDOW.sub(f"[{LENGTH_S}s]", inlined(expression))
    return re.sub(r"\$(job|instance|model)", ".+", expression)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("recorded")
    lines = [
        f"{name} {value:.10g} {BEGIN_S + number * STEP_S}"
        for name, notation in SERIES.items()
        for number, value in enumerate(values_of(notation))
        if value is not None
    ]
    (folder / "recording.txt").write_text("\n".join([*lines, "# EOF", ""]))
    done = promtool("tsdb", "create-blocks-from", "openmetrics", folder / "recording.txt", folder / "data")
    assert done.returncode == 0, done.stdout + done.stderr
    no_rules = folder / "rules.yaml"
    no_rules.write_text(yaml.safe_dump({"groups": []}))
    with prometheus(folder, [], no_rules) as server:
        yield server


class Asked:
    """The numbers of a panel, by the values of their labels besides the model's."""

    def __init__(self, server: Prometheus, title: str) -> None:
        panel = PANELS[title]
        self.numbers: list[dict[str, float]] = []
        for expression, _ in panel.targets:
            found = server.get("query", query=as_asked(expression), time=str(END_S))["result"]
            named = {
                " ".join(
                    value for label, value in sorted(each["metric"].items()) if not label.startswith("model")
                ): each
                for each in found
            }
            self.numbers.append({name: float(each["value"][1]) for name, each in named.items()})


PAGES = (fleet(), model(), gateway(), autoscaling())
PANELS = {panel.title: panel for page in PAGES for row in page.rows.values() for panel in row}
RATE = 1 / LENGTH_S
ONE = {"default/busy": 1.0}
LATE = sum(each > 2.5 for each in TTFT_S)
NUM_STREAMS_WITHOUT = RECORDING["streams_without_first_token"]
CLIENTS: dict[str, Sequence[Mapping[str, float | None]]] = {
    "Requests": [{outcome: count * RATE for outcome, count in CLIENT.items()}],
    "Refused": [{code: count * RATE for code, count in RECORDING["codes"].items()}],
    "Tokens by tenant": [{"completion -": COMPLETION * RATE, "prompt -": PROMPT * RATE}],
    "Tokens per second": [{"": PROMPT * RATE}, {"": COMPLETION * RATE}],
    "Ended requests": [{"abort": 0.0, "error": 0.0, "length": CLIENT["completed"] * RATE, "stop": 0.0}],
    "Tokens served": [{"": (PROMPT + COMPLETION) * RATE}],
    "Goodput": [{"": (len(TTFT_S) - LATE) * RATE}],
    "Cost per hour": [{"": PRICE}],
    "Cost by tenant": [{"-": PRICE}],
    "Cost of a million tokens": [{"": 1e6 * PRICE / 3600 / ((PROMPT + COMPLETION) * RATE)}],
    "Error budget burn": [
        {
            "availability": FAILED / COUNTED / 0.005,
            "first_token": (LATE + NUM_STREAMS_WITHOUT) / (len(TTFT_S) + NUM_STREAMS_WITHOUT) / 0.05,
        }
    ],
    # All requests have ended.
    "In flight": [{"": 0.0}],
    "Waiting": [{"": 0.0}],
    "Waiting in gateways": [{"": 0.0}],
    "Requests at engines": [{"": 0.0}, {"": 0.0}],
    "Headroom": [{"": 1.0}],
    "Headroom over time": [{"": 1.0}],
    "Cost of headroom": [{"": PRICE}],
    "Use by resource": [{"kv": 0.0, "sequences": 0.0}],
    "KV cache in use": [{"": 0.0}, {"": 1.0}],
    "End of waiting": [
        {
            "deadline": 0.0,
            "failed": 0.0,
            "full": RECORDING["codes"]["queue_full"] * RATE,
            "left": 0.0,
            "served": None,
            "shed": 0.0,
            "timeout": RECORDING["codes"]["server_is_overloaded"] * RATE,
        }
    ],
    # What the deployment says: one replica on the CPU.
    "Replicas": [ONE, ONE, ONE],
    "Current spec": [ONE, ONE],
    "Engines by phase": [{"draining": 0, "ejected": 0, "ready": 1, "sleeping": 0, "stale": 0, "starting": 0}],
    "At the maximum": [{"": 1.0}],
    "Without GPUs": [{"": 0.0}],
    "GPUs held": [{"": 0.0}],
}
"""What clients counted, by panel, for each of its expressions; None: they cannot know it."""
QUANTILES = {"Time to first token": TTFT_S, "First tokens, 95th percentile": TTFT_S, "Request time": SECONDS}
SHARES = {"First tokens, 95th percentile": (0.95,)}
"""Panels of histograms, which know a value by its bucket."""


@pytest.mark.parametrize("title", CLIENTS)
def test_a_panel_shows_the_clients_count(loaded: Prometheus, title: str) -> None:
    shown = Asked(loaded, title).numbers
    assert [each.keys() for each in shown] == [each.keys() for each in CLIENTS[title]]
    for found, expected in zip(shown, CLIENTS[title], strict=True):
        known = {name: value for name, value in expected.items() if value is not None}
        assert {name: found[name] for name in known} == pytest.approx(known, rel=TOLERANCE, abs=1e-9)


@pytest.mark.parametrize("title", QUANTILES)
def test_a_quantile_is_in_the_bucket_of_the_clients(loaded: Prometheus, title: str) -> None:
    own = sorted(QUANTILES[title])
    name = "request" if title == "Request time" else "time_to_first_token"
    bounds = sorted(
        {float(each) for key in SERIES if f"{name}_seconds_bucket" in key for each in re.findall(r'le="([^"]+)"', key)}
    )
    for share, shown in zip(SHARES.get(title, (0.5, 0.95, 0.99)), Asked(loaded, title).numbers, strict=True):
        (estimate,) = shown.values()
        # A client sees a little more than the gateway: its value, or one 2 % below, lies in the estimate's bucket.
        value = own[math.ceil(share * len(own)) - 1]
        buckets = {next(at for at, bound in enumerate(bounds) if each <= bound) for each in (value, 0.98 * value)}
        assert next(at for at, bound in enumerate(bounds) if estimate <= bound) in buckets
