"""Results as Markdown: for each precision a table of peers, Pagemill's ratio to the best of them, and the goal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peers.catalogue import OURS, PRECISIONS, Peer, Precision
from peers.metrics import METRICS, Metric, advantage, figure
from peers.results import Results


def markdown(results: Results, peers: Sequence[Peer]) -> str:
    parts = []
    for precision in PRECISIONS:
        shown = [peer for peer in peers if peer.precision == precision and _known(results, peer.name)]
        if shown:
            parts.append(_table(results, precision, shown))
    causes = sorted({(p.peer, p.cause) for p in results.problems if results.cause(p.peer, p.row)})
    if causes:
        parts.append("Without a figure:\n\n" + "\n".join(f"- {peer}: {cause}" for peer, cause in causes))
    return "\n\n".join(parts)


def ratios(results: Results, peers: Sequence[Peer]) -> dict[str, dict[str, float]]:
    """Return the ratios by precision and title of the figure, for scripts."""
    found: dict[str, dict[str, float]] = {}
    for precision in PRECISIONS:
        same = [peer for peer in peers if peer.precision == precision]
        for metric in METRICS:
            ratio = _ratio(results, metric, same)
            if ratio is not None:
                found.setdefault(precision, {})[metric.title] = round(ratio, 3)
    return found


def _table(results: Results, precision: Precision, peers: Sequence[Peer]) -> str:
    ordered = sorted(peers, key=lambda peer: not _is_ours(peer))
    lines = [
        _line([precision, *(peer.name for peer in ordered), "ours / best", "goal"]),
        _line(["---"] * (len(ordered) + 3)),
    ]
    for metric in METRICS:
        cells = [_cell(results, metric, peer) for peer in ordered]
        if all(cell == "" for cell in cells):
            continue
        ratio = _ratio(results, metric, ordered)
        ahead = "" if ratio is None else f"{ratio:.2f}"
        lines.append(_line([metric.title, *cells, ahead, _goal(results, metric, precision, ordered)]))
    return "\n".join(lines)


def _cell(results: Results, metric: Metric, peer: Peer) -> str:
    value = figure(results, peer.name, metric)
    if value is not None:
        return _number(value)
    return "failed" if results.cause(peer.name, metric.row) else ""


def _ratio(results: Results, metric: Metric, peers: Sequence[Peer]) -> float | None:
    """Return Pagemill's ratio to the best peer of the metric; None if either is missing."""
    ours = [figure(results, peer.name, metric) for peer in peers if _is_ours(peer)]
    others = [
        figure(results, peer.name, metric)
        for peer in peers
        if not _is_ours(peer) and peer.name.startswith(metric.against)
    ]
    rivals = [value for value in others if value is not None]
    if not ours or ours[0] is None or not rivals:
        return None
    best = max(rivals) if metric.more_is_better else min(rivals)
    return advantage(metric, ours[0], best)


def _goal(results: Results, metric: Metric, precision: Precision, peers: Sequence[Peer]) -> str:
    """Return the goal and, if known, whether it is met."""
    goal = metric.goal_of(precision)
    if metric.most is not None:
        ours = next((figure(results, peer.name, metric) for peer in peers if _is_ours(peer)), None)
        return _reported(f"at most {metric.most:g}", None if ours is None else ours <= metric.most)
    if goal is None:
        return ""
    ratio = _ratio(results, metric, peers)
    against = f" of {metric.against}'s" if metric.against else ""
    return _reported(f"{goal:g}{against}", None if ratio is None else ratio >= goal)


def _reported(goal: str, met: bool | None) -> str:
    return goal if met is None else f"{goal}, {'met' if met else 'missed'}"


def _known(results: Results, name: str) -> bool:
    return name in {each.peer for each in results.samples} | {each.peer for each in results.problems}


def _is_ours(peer: Peer) -> bool:
    return peer.name.startswith(OURS)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}" if value >= 10 else f"{value:,.2f}"


def _line(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"
