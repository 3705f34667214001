"""Makes an engine's proposals from its settings and its runner, or says why it cannot have any.

A package registers a method as an entry point of group `pagemill.proposers`: its name is what `speculative.method` is
set to, its object a class that is made without arguments and has the functions of `proposing.base.Method`. It is asked
beside the clients' predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points

from pagemill_engine.config import EngineConfig
from pagemill_engine.proposing.base import Method
from pagemill_engine.proposing.draft import DraftMethod, Rounds
from pagemill_engine.proposing.gain import MsOf
from pagemill_engine.proposing.ngram import Ngrams
from pagemill_engine.proposing.recent_answers import RecentAnswers
from pagemill_engine.scheduler.proposals import Proposals
from pagemill_execution.config import PROPOSER_GROUP, SpeculationConfig
from pagemill_execution.runners.base import RunnerInfo
from pagemill_execution.weights.errors import LoadError

BUILT_IN: Mapping[str, tuple[Callable[[], Method], ...]] = {
    "auto": (),
    "ngram": (Ngrams, RecentAnswers),
    "draft": (),
    "eagle3": (),
    "mtp": (),
}
"""To add a method, add a file in `proposing` and an entry here, and its name to `config.PROPOSING`."""


def proposals_of(config: EngineConfig, info: RunnerInfo, ms_of: MsOf) -> Proposals | None:
    """Return the proposals of an engine, or None if nothing is proposed. `config`: with the limits of a step. Raises
    `LoadError` if the engine cannot propose what its settings say."""
    settings = config.speculative
    if settings.method == "off" or info.pooling is not None:
        return None
    limit, is_chosen = config.step.max_num_batched_tokens, settings != SpeculationConfig()
    most = settings.num_tokens if info.most_proposed is None else min(settings.num_tokens, info.most_proposed)
    if not most:
        if not is_chosen or settings.method == "auto":
            return None
        raise _refused(
            f"method {settings.method} needs a model that can verify tokens; this one keeps states without room for "
            "such tokens; set it to off"
        )
    if is_chosen and settings.num_tokens >= limit:
        raise _refused(
            f"num_tokens is {settings.num_tokens}, but a step has {limit} tokens with the one that is sampled without "
            "proposals; lower it, or raise max_num_batched_tokens"
        )
    # What a simulated device samples is no text.
    chooses_ngram = settings.method == "auto" and not info.drafts and not config.null_runner
    try:
        methods = _methods_of("ngram" if chooses_ngram else settings.method)
    except ValueError as error:
        raise LoadError("SettingsUnsupported", str(error)) from error
    if info.drafts:
        methods.append(DraftMethod())
    if not config.enable_prefix_caching:  # then requests share nothing
        methods = [method for method in methods if not isinstance(method, RecentAnswers)]
    rounds = Rounds(most) if info.drafts else None
    return Proposals(methods, most, ms_of=ms_of, rounds=rounds, rounding_rows=info.rounding_rows)


def _refused(what: str) -> LoadError:
    return LoadError("SettingsUnsupported", f"`speculative`: {what}.")


def _methods_of(name: str) -> list[Method]:
    """Return the methods that are asked with this setting. Raises `ValueError` for one that cannot be used."""
    if name in BUILT_IN:
        return [make() for make in BUILT_IN[name]]
    for entry in entry_points(group=PROPOSER_GROUP, name=name):
        try:
            method = entry.load()()
        except Exception as error:
            raise ValueError(_unusable(name, entry.value, f"{type(error).__name__}: {error}")) from error
        if not isinstance(method, Method):
            raise ValueError(_unusable(name, entry.value, "it has not the functions of a Method"))
        return [method]
    raise ValueError(f"`speculative.method` is {name!r}, and no installed package registers it. Install the package.")


def _unusable(name: str, value: str, why: str) -> str:
    return f"`speculative.method` {name} is registered as {value}, which cannot be used: {why}. Repair the package."
