"""The defaults of transformers' configuration classes: `python tests/shared/class_defaults.py` writes them."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pagemill_models
from pagemill_models.declaration.known import BUILT_IN, TEXT_TYPES

ROOT = Path(pagemill_models.__file__).parent
TABLE = ROOT / "spec" / "class_defaults.json"
_NEVER = {"architectures", "dtype", "id2label", "label2id", "rope_parameters", "text_config", "num_labels"}


def keys_that_are_read() -> set[str]:
    """Return every quoted name in the code that reads configurations."""
    folders = (ROOT / "families", ROOT / "declaration", ROOT / "spec")
    sources = (path.read_text() for folder in folders for path in folder.glob("*.py"))
    return {name for source in sources for name in re.findall(r'"(_?[a-zA-Z0-9_]+)"', source)} - _NEVER


def defaults_of(model_type: str, keys: set[str]) -> dict[str, Any]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class: Any = CONFIG_MAPPING[model_type]
    values = {
        field.name: field.default
        for field in dataclasses.fields(config_class)
        if field.name in keys and field.default is not dataclasses.MISSING
    }
    rope = getattr(config_class(), "rope_parameters", None) or {}
    if any(isinstance(each, dict) for each in rope.values()):
        thetas = [rope[kind]["rope_theta"] for kind in ("full_attention", "sliding_attention")]
        names = dict(zip(("rope_theta", "rope_local_base_freq"), thetas, strict=True))
        return values | names
    if rope.get("rope_type", "default") != "default":
        values["rope_parameters"] = rope
    shared = {"rope_theta", "partial_rotary_factor"} & rope.keys()
    return values | {name: rope[name] for name in shared if rope[name] != 1.0}


def table() -> dict[str, dict[str, Any]]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    keys, types = keys_that_are_read(), {names.model_type for names in BUILT_IN.values()} | TEXT_TYPES.keys()
    return {name: defaults_of(name, keys) for name in sorted(types) if name in CONFIG_MAPPING}


def written(found: dict[str, dict[str, Any]]) -> str:
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(values, sort_keys=True)}" for name, values in found.items())
    return f"{{\n{lines}\n}}\n"


if __name__ == "__main__":
    TABLE.write_text(written(table()))
