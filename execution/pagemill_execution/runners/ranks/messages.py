"""What rank 0 sends to its followers, as bytes for the ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from pagemill_execution.adapters.messages import AdapterMessage
from pagemill_execution.step import StepPlan, StepResult, decode_plan, encode_plan

FORMAT = 5
"""Raised with every change of these messages and of what they contain, such as plans."""


class SampledStep(msgspec.Struct, array_like=True):
    """What only rank 0 knows of a step that was launched before."""

    step: int
    sampled: dict[str, list[int]] = {}
    """The tokens that it sampled. Requests that failed have none."""
    failed: list[str] = []
    """Requests whose blocks may hold values that are not finite."""

    @classmethod
    def of(cls, step: int, result: StepResult) -> SampledStep:
        return cls(step, result.token_ids, list(result.failed))


class FollowedStep(msgspec.Struct, tag="step", array_like=True):
    """A plan, and the steps that were read since the plan before it."""

    plan: msgspec.Raw
    before: Sequence[SampledStep] = ()


class Command(msgspec.Struct, tag="command", array_like=True):
    name: Literal["sleep", "wake", "recover", "close"]


Message = FollowedStep | AdapterMessage | Command
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)


def encode_step(plan: StepPlan, before: Sequence[SampledStep]) -> bytes:
    return _ENCODER.encode(FollowedStep(msgspec.Raw(encode_plan(plan)), before))


def encode_message(message: Message) -> bytes:
    return _ENCODER.encode(message)


def decode(data: bytes) -> Message:
    message: Message = _DECODER.decode(data)
    return message


def plan_of(step: FollowedStep) -> StepPlan:
    return decode_plan(bytes(step.plan))
