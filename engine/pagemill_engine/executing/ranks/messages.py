"""What rank 0 sends to its followers, as bytes for the ring."""

from __future__ import annotations

from typing import Literal

import msgspec

from pagemill_engine.scheduler.step import StepPlan, StepResult, decode_plan, encode_plan


class FollowedStep(msgspec.Struct, tag="step", array_like=True):
    """A plan, and what only rank 0 knows of the step before."""

    plan: msgspec.Raw
    sampled: dict[str, list[int]] = {}
    """The tokens that the step before sampled. Requests that failed have none."""
    failed: list[str] = []
    """Requests whose blocks may hold values that are not finite."""


class Command(msgspec.Struct, tag="command", array_like=True):
    name: Literal["sleep", "wake", "recover", "close"]


Message = FollowedStep | Command
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)


def encode_step(plan: StepPlan, before: StepResult) -> bytes:
    return _ENCODER.encode(FollowedStep(msgspec.Raw(encode_plan(plan)), before.token_ids, list(before.failed)))


def encode_command(command: Command) -> bytes:
    return _ENCODER.encode(command)


def decode(data: bytes) -> Message:
    message: Message = _DECODER.decode(data)
    return message


def plan_of(step: FollowedStep) -> StepPlan:
    return decode_plan(bytes(step.plan))
