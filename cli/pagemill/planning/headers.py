"""Reads a model's header (its configuration and the shapes of its weights) without the weights.

Local folders and files are read in place; they need the weights' index only. The header of an `hf://`, `s3://` or
`gs://` source is downloaded to a temporary folder. `replica` computes bytes from the header.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from pagemill.planning.errors import PlanError
from pagemill_models.sources import SourceError, in_full, is_fetched, resolve_source
from pagemill_models.sources.headers import can_read_header, fetch_header
from pagemill_models.spec.model_files import load_spec_without_weights
from pagemill_models.spec.model_spec import ModelSpec


class Header(NamedTuple):
    path: Path
    """A `.gguf` file or a folder."""
    spec: ModelSpec


@contextmanager
def header_of(source: str, field: str) -> Iterator[Header]:
    """Yield the header. `field` is the option or field that names the source. Raises `PlanError`."""
    is_here = not is_fetched(source) or Path(source).expanduser().exists()
    if not is_here and not can_read_header(source):
        raise PlanError(
            f"{field}: `{source}` could only be downloaded completely; set --model to a folder with config.json and "
            "model.safetensors.index.json or safetensors files (their headers are enough), to a .gguf file, or to a "
            "source of hf://, s3://, gs:// or oci://"
        )
    with TemporaryDirectory(prefix="pagemill-header-") as folder:
        try:
            path = resolve_source(source, field) if is_here else fetch_header(source, Path(folder), field)
            header = Header(path, load_spec_without_weights(path))
        except SourceError as error:
            message = error.message.replace(folder, in_full(source))
            raise PlanError(f"{field}: {message} (--model can name another copy)") from None
        yield header
