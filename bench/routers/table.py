"""Formats results as markdown: the cost of a request, the time added to its TTFT, and the sustained rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peers.results import Results
from report import markdown_table

from routers.catalogue import DIRECT, OURS, routers


def markdown(results: Results, names: Sequence[str], rates: Sequence[float]) -> str:
    """Return a table with one row per router. `rates`: the rates whose latencies are shown."""
    measured = [name for name in names if name != DIRECT and _measured(results, name)]
    shown = [rate for rate in rates if best(results, DIRECT, rate)]
    columns = ["router", "CPU ms/request", "idle cores", "MiB", "rate held"]
    columns += [f"added at {rate:g}/s, p50 / p99 ms" for rate in shown]
    rows = [_row(results, name, shown) for name in measured]
    direct = ["direct, not a router", "", "", "", held(results, DIRECT)]
    direct += [_pair(best(results, DIRECT, rate)) for rate in shown]
    text = markdown_table(columns, [*rows, direct])
    known = routers()
    legend = [f"- {name}: {known[name].how}" for name in measured if name in known]
    text += "\n\n" + "\n".join(legend)
    causes = sorted({(each.peer, each.cause) for each in results.problems})
    if causes:
        text += "\n\nWithout a figure:\n\n" + "\n".join(f"- {name}: {cause}" for name, cause in causes)
    return text


def by_rate(results: Results, names: Sequence[str]) -> str:
    """Return a table of CPU per request and added TTFT for every rate."""
    measured = [name for name in names if name != DIRECT and _measured(results, name)]
    rates = sorted({rate for name in measured for rate in _rates(results, name)})
    columns = ["requests/s", *(f"{name}: CPU ms, added p50 / p99 ms" for name in measured)]
    return markdown_table(columns, [[f"{rate:g}", *(_at(results, name, rate) for name in measured)] for rate in rates])


def figures(results: Results, name: str, rates: Sequence[float]) -> dict[str, Any]:
    """Return the figures of one router, for scripts."""
    return {
        "cpu_ms": cpu_ms(results, name),
        "idle_cores": _idle(results, name, "cores"),
        "held": held(results, name),
        "added_ms": {f"{rate:g}": added(results, name, rate) for rate in rates if added(results, name, rate)},
        "cpu_ms_at": {f"{rate:g}": values["cpu_ms"] for rate in rates if (values := best(results, name, rate))},
    }


def cpu_ms(results: Results, name: str) -> float | None:
    """Return the CPU per request at the highest sustained rate, where the share of idle work is smallest."""
    rates = [rate for rate in _rates(results, name) if best(results, name, rate)]
    return round(best(results, name, max(rates))["cpu_ms"], 3) if rates else None


def held(results: Results, name: str) -> str:
    """Return the highest sustained rate, with a plus if the load and not the router was the limit."""
    rates = _rates(results, name)
    good = [rate for rate in rates if best(results, name, rate)]
    if not good:
        return "none"
    beyond = [rate for rate in rates if rate > max(good)]
    ended_by_load = not beyond or all(values["lagged"] for values in _values(results, name, min(beyond)))
    return f"{max(good):g}{'+' if ended_by_load else ''}"


def added(results: Results, name: str, rate: float) -> dict[str, float]:
    """Return the added TTFT in milliseconds compared with no router at the same rate; empty if one is missing."""
    ours, direct = best(results, name, rate), best(results, DIRECT, rate)
    if not ours or not direct:
        return {}
    return {rank: round(ours["ttft_ms"][rank] - direct["ttft_ms"][rank], 2) for rank in ("p50", "p99")}


def best(results: Results, name: str, rate: float) -> dict[str, Any]:
    """Return the round with the median CPU (without CPU figures: median time) among those that sustained the rate."""
    good = [values for values in _values(results, name, rate) if values["held"]]
    good.sort(key=lambda values: (values["cpu_ms"], values["ttft_ms"]["p50"]))
    return good[(len(good) - 1) // 2] if good else {}


def _row(results: Results, name: str, rates: Sequence[float]) -> list[str]:
    label = f"**{name}**" if name == OURS else name
    idle, memory = _idle(results, name, "cores"), _idle(results, name, "pss_mib")
    latencies = [_added(added(results, name, rate)) for rate in rates]
    return [label, _number(cpu_ms(results, name)), _number(idle), _number(memory), held(results, name), *latencies]


def _at(results: Results, name: str, rate: float) -> str:
    values = best(results, name, rate)
    if not values:
        return "not held" if _values(results, name, rate) else ""
    return f"{values['cpu_ms']:.2f}, {_added(added(results, name, rate)) if best(results, DIRECT, rate) else '?'}"


def _measured(results: Results, name: str) -> bool:
    return any(sample.peer == name for sample in results.samples)


def _rates(results: Results, name: str) -> list[float]:
    return sorted({float(sample.row) for sample in results.samples if sample.peer == name and sample.row != "idle"})


def _values(results: Results, name: str, rate: float) -> list[dict[str, Any]]:
    return [each.values for each in results.samples if (each.peer, each.row) == (name, f"{rate:g}")]


def _idle(results: Results, name: str, key: str) -> float | None:
    found = results.values(name, "idle", key)
    return sorted(found)[(len(found) - 1) // 2] if found else None


def _added(values: dict[str, float]) -> str:
    return f"{values['p50']:.2f} / {values['p99']:.2f}" if values else "not held"


def _pair(values: dict[str, Any]) -> str:
    return f"{values['ttft_ms']['p50']:.2f} / {values['ttft_ms']['p99']:.2f}" if values else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"
