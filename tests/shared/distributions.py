"""What is installed: the distributions that others require, and the modules of all but some of them."""

from __future__ import annotations

import re
from importlib import metadata


def required_by(names: tuple[str, ...]) -> set[str]:
    """Return the names of distributions and of all that they require."""
    wanted, waiting = set(), list(names)
    while waiting:
        name = normalized(waiting.pop())
        if name in wanted:
            continue
        wanted.add(name)
        try:
            asked = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        waiting += [re.split(r"[\s;\[<>=!~(]", each)[0] for each in asked if "extra ==" not in each]
    return wanted


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.lower())


def installed_beside(wanted: set[str]) -> set[str]:
    """Return the modules of all installed distributions but these."""
    modules = metadata.packages_distributions()
    return {
        module
        for module, names in modules.items()
        if not any(normalized(name) in wanted for name in names) and not module.startswith("pagemill")
    }
