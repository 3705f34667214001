"""Loads an encoder: a model whose steps compute whole prompts and keep nothing."""

from __future__ import annotations

from pagemill_engine.decoders.on_torch.decoder import Decoder
from pagemill_engine.decoders.on_torch.filling import weight_bytes
from pagemill_engine.executing.encoder_runner import EncoderRunner
from pagemill_engine.executing.pooling import Pooler
from pagemill_engine.executing.torch_model import classifier_of, load_decoder, rotations_of
from pagemill_engine.starting.preparing import PreparedModel, runner_info
from pagemill_models.spec.model_spec import ModelSpec


def load_encoder(prepared: PreparedModel, spec: ModelSpec, max_model_len: int) -> EncoderRunner:
    compute = prepared.compute
    model: Decoder = load_decoder(spec, compute, prepared.weights)
    rotations = rotations_of(spec, compute, prepared.weights, max_model_len)
    info = runner_info(prepared, spec, max_model_len, weight_bytes(model), "cpu")
    assert spec.pooling is not None
    return EncoderRunner(model, compute.ops, rotations, info, Pooler(spec.pooling, classifier_of(model)))
