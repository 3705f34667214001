"""Weights of a folder whose files are still being downloaded: available ones are read, others are waited for."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.safetensors_folder import SafetensorsFolder
from pagemill_models.files.partial_download import FileLink, PartialDownload
from pagemill_models.files.safetensors_header import INDEX_FILE

FIRST, LATE = "model-1.safetensors", "model-2.safetensors"
VALUES = {FIRST: np.arange(4096, dtype=np.float32), LATE: np.arange(4096, 9000, dtype=np.float32)}


@pytest.fixture
def arriving(tmp_path: Path) -> Iterator[PartialDownload]:
    """Create a folder in which the first file is complete and the late one has only its header."""
    for name, values in VALUES.items():
        save_file({name[6]: values}, tmp_path / name)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"1": FIRST, "2": LATE}}))
    num_bytes = (tmp_path / LATE).stat().st_size
    with (tmp_path / LATE).open("r+b") as late:
        late.truncate(100)
    links = {name: FileLink(tmp_path / name, 0, is_complete=True) for name in (FIRST, INDEX_FILE)}
    arriving = PartialDownload(tmp_path / "m", links | {LATE: FileLink(tmp_path / LATE, num_bytes, is_complete=False)})
    yield arriving
    arriving.close()


def test_a_tensor_is_read_once_its_file_is_complete(arriving: PartialDownload, tmp_path: Path) -> None:
    weights = SafetensorsFolder(arriving.folder)
    assert weights.shapes == {"1": (4096,), "2": (4904,)}
    first, late = np.empty(4096, np.float32), np.empty(4904, np.float32)
    weights.read_into("1", first)
    assert np.array_equal(first, VALUES[FIRST])
    reading = threading.Thread(target=weights.read_into, args=("2", late))
    reading.start()
    reading.join(0.1)
    assert reading.is_alive()
    whole = tmp_path / "whole"
    whole.mkdir()
    save_file({"2": VALUES[LATE]}, whole / LATE)
    (tmp_path / LATE).write_bytes((whole / LATE).read_bytes())
    arriving.mark_complete(LATE)
    reading.join()
    assert np.array_equal(late, VALUES[LATE])
    save_file({"1": VALUES[FIRST]}, whole / FIRST)
    (whole / INDEX_FILE).write_text((tmp_path / INDEX_FILE).read_text())
    assert weights.digest() == SafetensorsFolder(whole).digest()


def test_a_download_that_ended_without_the_file_is_an_error_with_its_name(arriving: PartialDownload) -> None:
    weights = SafetensorsFolder(arriving.folder)
    arriving.close()
    with pytest.raises(LoadError, match=rf"`{LATE}` has not arrived.*Start again") as error:
        weights.read_into("2", np.empty(4904, np.float32))
    assert error.value.reason == "ModelUnreadable"
