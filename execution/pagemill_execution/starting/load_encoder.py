"""Loads an encoder: a model whose steps compute whole prompts and keep nothing. Torch is imported where it computes."""

from __future__ import annotations

from pagemill_execution.decoders.native.decoder import NativeDecoder, NativeEncoder
from pagemill_execution.decoders.rope import Rotations, decoder_tables
from pagemill_execution.runners.encoder_runner import EncoderModel, EncoderRunner
from pagemill_execution.runners.pooling import Pooler
from pagemill_execution.starting.preparing import PreparedModel, runner_info
from pagemill_models.spec.model_spec import ModelSpec


def load_encoder(prepared: PreparedModel, spec: ModelSpec, max_model_len: int) -> EncoderRunner:
    compute, weights = prepared.compute, prepared.weights
    if compute.is_native:
        rotations = Rotations(decoder_tables(spec.decoder, max_model_len, weights))
        model: EncoderModel = NativeEncoder(NativeDecoder(spec, compute.native_ops, weights, rotations))
    else:
        model = _on_torch(prepared, spec, max_model_len)
    info = runner_info(prepared, spec, max_model_len, model.num_bytes, "cpu")
    assert spec.pooling is not None
    return EncoderRunner(model, info, Pooler(spec.pooling, model.classifier))


def _on_torch(prepared: PreparedModel, spec: ModelSpec, max_model_len: int) -> EncoderModel:
    from pagemill_execution.runners.torch_model import TorchEncoder, load_decoder, rotations_of

    compute = prepared.compute
    loaded = load_decoder(spec, compute, prepared.weights)
    rotations = rotations_of(spec, compute, prepared.weights, max_model_len)
    return TorchEncoder(loaded, compute.ops, rotations)
