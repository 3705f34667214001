"""The header of the model that is planned: what its files say of it, with none of its weights on this machine.

Folders and files of this machine are read where they lie, with weights or with their index alone; of an `hf://`,
`s3://` or `gs://` source the header is fetched into a folder that goes when the plan is made. `replica` computes bytes
with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from pagemill.planning.errors import PlanError
from pagemill_protocol.model_files import load_outlined_spec
from pagemill_protocol.model_spec import ModelSpec
from pagemill_protocol.sources import SourceError, in_full, is_fetched, resolve_source
from pagemill_protocol.sources.headers import can_read_header, fetch_header


class Header(NamedTuple):
    path: Path
    """A `.gguf` file or a folder."""
    spec: ModelSpec


@contextmanager
def header_of(source: str, field: str) -> Iterator[Header]:
    """`field`: where the source was named. Raises `PlanError`."""
    is_here = not is_fetched(source) or Path(source).expanduser().exists()
    if not is_here and not can_read_header(source):
        raise PlanError(
            f"{field}: `{source}` would be downloaded whole; give --model the folder that holds its config.json and "
            "model.safetensors.index.json or safetensors files (their headers are enough), a .gguf file, hf://, s3://, "
            "gs:// or oci://"
        )
    with TemporaryDirectory(prefix="pagemill-header-") as folder:
        try:
            path = resolve_source(source, field) if is_here else fetch_header(source, Path(folder), field)
            header = Header(path, load_outlined_spec(path))
        except SourceError as error:
            message = error.message.replace(folder, in_full(source))
            raise PlanError(f"{field}: {message} (another copy can be named with --model)") from None
        yield header
