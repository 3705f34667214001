"""Adapters beside each packed format (QLoRA): greedy answers are those of PEFT's model on the values of the files."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapter_engine import NUM_TOKENS, Engine
from packed_models import MODELS, write, write_mxfp4
from peft_adapters import ATTENTION, PROMPTS, Adapted, Base, write_adapter, write_base

from pagemill_models.declaration.quantization_settings import read_quantizations

CASES = [*MODELS, "mxfp4"]
PROMPT = [token % 128 for token in PROMPTS[1]]


def test_every_packed_format_has_a_case() -> None:
    assert {*(settings["quant_method"] for settings, _ in MODELS.values()), "mxfp4"} == set(read_quantizations())


@pytest.mark.parametrize("name", CASES)
def test_adapters_beside_packed_weights_are_those_of_peft(name: str, tmp_path: Path) -> None:
    packed, values = tmp_path / "packed", tmp_path / "values"
    settings = {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]}
    if name == "mxfp4":
        settings = {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj", "experts.gate_up_proj"]}
        model = write_base("gpt_oss", tmp_path / "drawn").model
        write_mxfp4(packed, model)
    else:
        model = write(packed, name)
    model.save_pretrained(values)
    adapted = write_adapter(Base(values, model), tmp_path / "adapter", **settings)
    tokens, gap = adapted.greedy(PROMPT, NUM_TOKENS)
    assert gap > 1e-3, "near ties do not show what is wrong"
    engine, plain = Engine(packed), Adapted(values, model).greedy(PROMPT, NUM_TOKENS)[0]
    digest = engine.load(adapted.folder)
    assert engine.greedy([PROMPT, PROMPT], [digest, ""]) == [tokens, plain]
    assert tokens != plain
