"""Converts an engine's state frame to the report that routing uses."""

from __future__ import annotations

import logging

import msgspec

from pagemill_protocol.report.cache_kinds import ONE_KIND
from pagemill_protocol.report.state import EngineLoad, StateFrame, StepTimeParams
from pagemill_protocol.report.step_time import StepTimeModel
from pagemill_routing.policies.report import PodReport
from pagemill_routing.policies.step_time_snapshot import take_snapshot

logger = logging.getLogger("pagemill.gateway.brain")


def read_report(frame: StateFrame, before: PodReport | None, params_before: StepTimeParams | None) -> PodReport:
    """Return the report of a frame. The step-time model of `before` is reused if its parameters are the same."""
    load, kinds = frame.load, frame.kinds or ONE_KIND
    is_same = frame.step_time is params_before or frame.step_time == params_before
    model = _model_of(before) if is_same else _model(frame.step_time)
    return PodReport(
        load=load,
        block_size=max(1, frame.block_size),
        max_step_tokens=frame.max_num_batched_tokens,
        max_num_seqs=frame.max_num_seqs,
        step_time=take_snapshot(model, frame.max_num_batched_tokens, load.num_requests_running, load.num_tokens_running)
        if model is not None
        else None,
        block_bytes=sum(kind.block_bytes for kind in kinds if kind.keeps_all),
        sparse_kinds=tuple(kind for kind in kinds if not kind.keeps_all),
    )


def with_own_counts(report: PodReport, num_running: int) -> PodReport:
    """Return a stale report's limits with this gateway's own counts as its load."""
    model = _model_of(report)
    return msgspec.structs.replace(
        report,
        load=EngineLoad(num_requests_running=num_running),
        step_time=take_snapshot(model, report.max_step_tokens, num_running, 0) if model is not None else None,
    )


def _model_of(report: PodReport | None) -> StepTimeModel | None:
    return report.step_time.model if report is not None and report.step_time is not None else None


def _model(params: StepTimeParams) -> StepTimeModel | None:
    """Return the step-time model; `None` if the engine has not measured any step or the parameters are invalid."""
    try:
        model = StepTimeModel.from_params(params)
    except ValueError as error:
        logger.warning("an engine's step time cannot be used: %s", error)
        return None
    return model if model.known else None
