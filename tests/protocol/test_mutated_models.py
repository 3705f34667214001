"""A model whose settings are changed, one value at a time, loads within limits or is refused by key and value."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from mutated_models import (
    FAMILIES,
    VOCAB_SIZE,
    config_of,
    gguf_bytes,
    gguf_metadata,
    mutations_of_config,
    mutations_of_gguf,
    write_folder,
)

from examples import IN_FULL, num_examples
from pagemill_models.declaration.known import BUILT_IN
from pagemill_models.spec.model_files import load_model_spec
from pagemill_protocol.source_errors import MAX_MESSAGE_CHARS, MAX_QUOTED_CHARS, SourceError

MAX_S = 2.0
GGUF_NAMES = sorted({name for known in BUILT_IN.values() for name in known.gguf})


def sampled(mutations: Iterable[tuple[str, dict[str, Any]]], family: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every mutation in the full suite, otherwise one in about fifty, others for each family."""
    step = 1 if num_examples(IN_FULL) == IN_FULL else 53
    return islice(mutations, sum(map(ord, family)) % step, None, step)


def check_load(path: Path, what: str) -> None:
    began_s = time.thread_time()
    message = ""
    try:
        load_model_spec(path)
    except SourceError as error:
        message = error.message
    assert time.thread_time() - began_s < MAX_S, what
    assert len(message) <= MAX_MESSAGE_CHARS, what
    assert "x" * (MAX_QUOTED_CHARS + 1) not in message, what
    assert "values of another kind" not in message, f"{what}: no check names the key: {message}"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_a_configuration_may_have_any_value(family: str, tmp_path: Path) -> None:
    write_folder(tmp_path, config_of(family))
    for what, config in sampled(mutations_of_config(family), family):
        (tmp_path / "config.json").write_text(json.dumps(config))
        check_load(tmp_path, what)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_unchanged_configurations_load(family: str, tmp_path: Path) -> None:
    write_folder(tmp_path, config_of(family))
    (tmp_path / "config.json").write_text(json.dumps(config_of(family)))
    assert load_model_spec(tmp_path).num_layers >= 3


@pytest.mark.parametrize("architecture", GGUF_NAMES)
def test_every_key_of_gguf_metadata_may_have_any_value(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for what, metadata in sampled(mutations_of_gguf(architecture), architecture):
        path.write_bytes(gguf_bytes(metadata, {"token_embd.weight": (VOCAB_SIZE, 64)}))
        check_load(path, what)


@pytest.mark.parametrize("architecture", GGUF_NAMES)
def test_the_unchanged_metadata_loads(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(gguf_metadata(architecture), {"token_embd.weight": (VOCAB_SIZE, 64)}))
    assert load_model_spec(path).num_layers == 2


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_moe", {"num_experts": 2**24}, "num_experts = 16777216; it must be from 1 to 8192"),
        ("qwen3_moe", {"num_experts": 4096}, "num_experts = 4096, but the files hold matrices of at most"),
        ("qwen3_moe", {"num_experts": 250, "num_hidden_layers": 100}, "250 experts in each of 100 layers"),
        ("bloom", {"n_layer": 1000}, "num_layers = 1000, but the files hold"),
        ("bloom", {"n_head": 65_536}, "num_heads = 65536; it must be from 1 to 4096"),
        ("llama", {"vocab_size": 2**24}, "vocab_size = 16777216, but the largest dimension of a tensor is 128"),
        ("gpt2", {"n_head": 100}, "100 attention heads are more than the 64 values of its hidden_size"),
        ("gemma3", {"sliding_window_pattern": 0}, "declares period = 0"),
        ("llama", {"quantization_config": ["awq"]}, "`quantization_config` is a list"),
        ("llama", {"quantization_config": {"bits": [4]}}, "`quantization_config.bits` is a list"),
        ("llama", {"quantization_config": {"config_groups": {"g": []}}}, "`quantization_config.config_groups.g` is"),
    ],
)
def test_a_number_is_bounded_by_what_the_files_hold(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_folder(tmp_path, config_of(family))
    (tmp_path / "config.json").write_text(json.dumps(config_of(family) | changes))
    began_s = time.thread_time()
    with pytest.raises(SourceError) as refused:
        load_model_spec(tmp_path)
    assert message in refused.value.message
    assert time.thread_time() - began_s < MAX_S


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.attention.sliding_window", math.nan, "`llama.attention.sliding_window` is nan"),
        ("llama.attention.sliding_window", -5, "`llama.attention.sliding_window` is -5"),
        ("llama.rope.scaling.type", "llama3", "`llama.rope.scaling.low_freq_factor`"),
        ("llama.rope.scaling.type", ["yarn"], "`llama.rope.scaling.type` is "),
    ],
)
def test_a_wrong_value_of_gguf_metadata_is_named(key: str, value: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(gguf_metadata("llama") | {key: value}, {"token_embd.weight": (VOCAB_SIZE, 64)}))
    with pytest.raises(SourceError) as refused:
        load_model_spec(path)
    assert message in refused.value.message
