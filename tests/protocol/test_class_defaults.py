"""Keys that a `config.json` lacks have the values of transformers' classes, for every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from class_defaults import TABLE, table, written
from encoder_models import ENCODERS
from family_matrix import BASES

from pagemill_models.declaration.known import MULTIMODAL
from pagemill_models.spec.decoders import decoder_from_config

CASES = {**BASES, **ENCODERS}


def test_the_table_is_that_of_the_installed_transformers() -> None:
    """`python tests/shared/class_defaults.py` writes it."""
    assert TABLE.read_text() == written(table())


def test_multimodal_classes_are_tied_as_in_transformers() -> None:
    for name, known in MULTIMODAL.items():
        config_class: Any = getattr(transformers, name.replace("ForConditionalGeneration", "Config"))
        fields = config_class.__dataclass_fields__
        assert bool(fields["tie_word_embeddings"].default) is known.tied, name


@pytest.mark.parametrize("name", CASES)
def test_a_file_with_few_keys_declares_what_the_whole_one_does(name: str) -> None:
    architecture, asked = CASES[name]
    config: Any = getattr(transformers, architecture).config_class(**asked)
    whole, declared = json.loads(config.to_json_string(use_diff=False)), {"architectures": [architecture]}
    assert decoder_from_config(asked | declared, Path("config.json")) == decoder_from_config(
        whole | declared, Path("config.json")
    )


def test_gemma_2_has_its_caps() -> None:
    values = {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 2}
    decoder = decoder_from_config(values, Path("config.json"))
    assert decoder.head is not None
    assert (decoder.head.soft_cap, {getattr(each, "soft_cap", None) for each in decoder.attentions()}) == (30.0, {50.0})
