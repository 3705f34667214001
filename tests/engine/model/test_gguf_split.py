"""Models whose GGUF file is split: the parts are found, read and loaded as one, and a missing part is an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from family_gguf import write_family_gguf
from family_models import VARIANTS, write_model

from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.gguf_weights import GGUFWeights
from pagemill_models.files.gguf_file import GGUFError, GGUFFile
from pagemill_models.sources import FetchError, default_name, resolve_source
from pagemill_models.sources.base import RemoteFile
from pagemill_models.sources.schemes.hugging_face import parse_hub_source
from pagemill_models.sources.selection import select_files

PROMPTS: list[list[int]] = [[3 + 7 * at % 190 for at in range(length)] for length in (1, 40)]


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Create the parts of a model, next to its folder and its whole file."""
    write_model(*VARIANTS["olmo2"], tmp_path)
    write_family_gguf(tmp_path / "whole.gguf", tmp_path, "olmo2")
    (tmp_path / "parts").mkdir()
    write_family_gguf(tmp_path / "parts" / "tiny.gguf", tmp_path, "olmo2", parts=4)
    found = sorted((tmp_path / "parts").iterdir())
    assert len(found) > 3
    return found


def test_a_split_model_gives_the_answers_of_the_whole_one(
    parts: list[Path], tmp_path: Path, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    whole = make_driver(runner_loader(tmp_path / "whole.gguf")).greedy(PROMPTS, 8)
    assert make_driver(runner_loader(parts[0])).greedy(PROMPTS, 8) == whole
    assert GGUFWeights(parts[0]).digest() == GGUFWeights(tmp_path / "whole.gguf").digest()


def test_a_folder_of_parts_is_one_model_with_the_name_of_the_whole(parts: list[Path]) -> None:
    assert resolve_source(str(parts[0].parent)) == parts[0]
    assert default_name(str(parts[0])) == "tiny"


def test_a_missing_part_is_named(parts: list[Path], runner_loader: Callable[..., Any]) -> None:
    parts[2].unlink()
    with pytest.raises(LoadError, match=f"first file of a split model, and `{parts[2].name}` is not beside it"):
        runner_loader(parts[0])


def test_the_error_for_a_later_part_names_the_first(parts: list[Path]) -> None:
    with pytest.raises(GGUFError, match=f"is part 2 of {len(parts)} of a model. Give `{parts[0].name}`"):
        GGUFFile(parts[1])


def test_parts_whose_order_differs_from_their_names_are_refused(parts: list[Path]) -> None:
    parts[2].replace(parts[1])
    with pytest.raises(GGUFError, match="calls itself part 3, not 2"):
        GGUFFile(parts[0])


def test_all_parts_of_a_hubs_model_are_downloaded() -> None:
    names = [f"q4/big-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    files = [RemoteFile(name, 1, None) for name in ["README.md", *names]]
    model = parse_hub_source(f"hf://org/big/{names[0]}", "model")
    assert [file.path for file in select_files("org/big", model.file, files)] == names
    with pytest.raises(FetchError, match=f"has no file `{names[2]}`"):
        select_files("org/big", model.file, files[:-1])
