"""Attacks a gateway and its engines as a hostile client would, while an honest tenant streams and asks beside.

Each case is one attack on one port (see `bench/attacks`): without a key, with the key of another tenant, or with an
engine's token. Servers are real processes with 1 GiB of private memory each, engines have a simulated device. A case
fails if a server dies, if the processes of one server take 700 MiB together, if the honest tenant's stream has a gap
of a second, if one of its requests is refused, or if a promise that the case names is not kept. A failed case runs
once more on new servers, and counts if it fails again. Without options the whole grid runs; `--quick` (`make attack`)
runs one case of each kind and port with shorter attacks. `--cases` picks some by name.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import sys
import time
from typing import Any, NamedTuple

from attacks import answers, batches, bodies, connections, depth, handshakes, leaving, link
from attacks.cases import CASES, Broken, Case
from attacks.site import MAX_PEAK_MIB, Harm, Site, honest_tenant, running_site
from report import emit, progress

MODULES = (connections, link, bodies, answers, batches, depth, handshakes, leaving)
"""Their functions are the cases, which they register."""
QUICK_HOLD_S, GRID_HOLD_S = 1.5, 8.0
CASE_LIMIT_S = 180.0
COLUMNS = ["case", "peak MiB", "lag s", "gap s", "slowest s", "answers", "refused", "own lag s", "took s", "result"]


class Outcome(NamedTuple):
    case: Case
    harm: Harm
    took_s: float
    note: str
    faults: list[str]

    def row(self) -> list[Any]:
        seen = self.harm.honest
        figures = [seen[name] for name in ("lag_s", "gap_s", "slowest_s", "num_answers", "num_refused", "own_lag_s")]
        result = "; ".join(self.faults)[:160] if self.faults else f"held {self.note}".strip()
        return [self.case.name, self.harm.peak_mib, *figures, self.took_s, result]


async def play(site: Site, case: Case) -> Outcome:
    """Run one case beside the honest tenant."""
    began_s, broken, note = time.monotonic(), "", ""
    async with honest_tenant(site) as seen:
        site.forget_peaks()
        try:
            async with asyncio.timeout(CASE_LIMIT_S):
                note = await case.attack(site, case.port)
        except (Broken, TimeoutError) as error:
            broken = str(error) or f"not over within {CASE_LIMIT_S:.0f} s"
    harm = Harm(site.peaks_mib(), seen, site.dead())
    faults = ([broken] if broken else []) + harm.faults(of_honest=not case.ends_servers)
    return Outcome(case, harm, time.monotonic() - began_s, note, faults)


def run(site: Site, cases: list[Case], repeats: int) -> list[Outcome]:
    found = []
    for case in cases:
        for number in range(1 + repeats):
            site.start()
            outcome = asyncio.run(play(site, case))
            progress(f"{case.name}: {outcome.harm.peak_mib:.0f} MiB, {outcome.row()[-1]}")
            if not outcome.faults:
                break
            site.stop()
            progress("once more, on new servers" if number < repeats else "it succeeded")
        found.append(outcome)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one case for each kind and port, with shorter attacks")
    parser.add_argument("--cases", default="", help="run only the cases whose names match this expression")
    parser.add_argument("--repeats", type=int, default=2, help="how often a case that fails may run again")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    args = parser.parse_args()
    cases = [each for each in CASES if re.search(args.cases, each.name) and not (args.quick and each.full)]
    if args.list or not cases:
        print("\n".join(each.name for each in cases))
        raise SystemExit(0 if cases else f"No case has {args.cases!r} in its name.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server outlives the attack
    os.nice(5)  # an attacker has machines of its own
    sys.setrecursionlimit(5000)  # bodies are nested more deeply than JSON is written by default
    with running_site() as site:
        site.hold_s, site.whole_grid = (QUICK_HOLD_S, False) if args.quick else (GRID_HOLD_S, True)
        outcomes = run(site, cases, args.repeats)
    failed = [each.case.name for each in outcomes if each.faults]
    rows = [each.row() for each in outcomes]
    result = {"limit_mib": MAX_PEAK_MIB, "rows": [dict(zip(COLUMNS, row, strict=True)) for row in rows]}
    emit("attack", COLUMNS, rows, {**result, "failed": failed})
    if failed:
        raise SystemExit(f"{len(failed)} of {len(outcomes)} attacks succeeded: {failed}")


if __name__ == "__main__":
    main()
