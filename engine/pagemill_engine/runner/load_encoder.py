"""Builds the runner of an encoder, which torch computes: weights, and no KV cache."""

from __future__ import annotations

from pagemill_engine.models.decoder import Decoder
from pagemill_engine.models.weights import weight_bytes
from pagemill_engine.runner.encoder_runner import EncoderRunner
from pagemill_engine.runner.pooling import Pooler
from pagemill_engine.runner.preparing import PreparedModel, runner_info
from pagemill_engine.runner.torch_model import classifier_of, load_decoder, rotations_of
from pagemill_protocol.model_spec import ModelSpec


def load_encoder(prepared: PreparedModel, spec: ModelSpec, max_model_len: int) -> EncoderRunner:
    compute = prepared.compute
    model: Decoder = load_decoder(spec, compute, prepared.weights)
    rotations = rotations_of(spec, compute, prepared.weights, max_model_len)
    info = runner_info(prepared, spec, max_model_len, weight_bytes(model), "cpu")
    assert spec.pooling is not None
    return EncoderRunner(model, compute.ops, rotations, info, Pooler(spec.pooling, classifier_of(model)))
