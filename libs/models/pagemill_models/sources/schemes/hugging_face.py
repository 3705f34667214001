"""`hf://`: a model hub or a mirror of it (`HF_ENDPOINT`), through `huggingface_hub`.

Models that other programs have fetched completely into the library's cache are used from there; all others are fetched
as from other sources, since the library restarts interrupted files. A git commit names the version, so all files belong
to one state.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pagemill_models.files.gguf_split import part_names
from pagemill_models.files.safetensors_header import shard_paths, weight_map
from pagemill_models.sources.base import Credential, Listing, RemoteFile, Repository, SourceKind
from pagemill_protocol.source_errors import FetchError, SourceError, UnreadableModelError

HUB_SOURCE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+?))?(?P<file>/[^@]+\.gguf)?")
MODEL_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
"""Patterns of the files of a model in safetensors."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_LOGIN_STATUSES = frozenset({401, 403})
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")
_CREDENTIALS = "Give a token that may read it: HF_TOKEN, in a cluster spec.model.credentialsSecretRef"


class HubModel(NamedTuple):
    """The parts of an `hf://` source."""

    repository: str
    """`org/name`."""
    revision: str | None
    """Branch, tag or commit; `None`: the repository's default branch."""
    file: str | None
    """One GGUF file in the repository; `None`: the whole model."""


class HuggingFace(SourceKind):
    scheme = "hf"
    where = "network"
    form = "hf://ORG/NAME[@REVISION][/FILE.gguf]"
    about = (
        "A repository of a Hugging Face hub, at its default branch or at a branch, tag or commit; `ORG/NAME` alone is "
        "the same."
    )
    credentials = (Credential("HF_TOKEN"),)
    variables = ("HF_ENDPOINT",)
    unreachable = "HubUnreachable"

    def fault(self, source: str) -> str | None:
        if HUB_SOURCE.fullmatch(source.removeprefix("hf://")):
            return None
        return f"`{source}` is not of the form `hf://ORG/NAME`, `hf://ORG/NAME@REVISION`."

    def path_of(self, source: str) -> str:
        path = source.removeprefix("hf://")
        return path if path.endswith(".gguf") else path.split("@", 1)[0]

    def file_of(self, source: str) -> str | None:
        return parse_hub_source(source).file

    def server_of(self, source: str) -> str:
        from huggingface_hub import constants

        return constants.ENDPOINT

    def find(self, source: str, field: str) -> Path | None:
        """Return the model in the library's cache, if another program has fetched it completely."""
        model = parse_hub_source(source, field)
        try:
            from huggingface_hub import snapshot_download
        except ImportError:
            return None
        patterns = part_names(model.file) if model.file else MODEL_PATTERNS
        try:
            folder = Path(
                snapshot_download(
                    model.repository, revision=model.revision, allow_patterns=patterns, local_files_only=True
                )
            )
        except (OSError, ValueError):  # absent or incomplete
            return None
        if model.file:
            return folder / model.file if all((folder / part).is_file() for part in patterns) else None
        return folder if _is_complete(folder) else None

    def open(self, source: str) -> Repository:
        try:
            import huggingface_hub  # noqa: F401
        except ImportError:
            message = f"`{source}` needs the package `huggingface_hub`. Run `pip install huggingface_hub`"
            raise FetchError("SourceUnavailable", f"{message}, or give a path.") from None
        return HubRepository(parse_hub_source(source))


def parse_hub_source(source: str, field: str = "model.source") -> HubModel:
    """Return the parts of `hf://ORG/NAME[@REVISION][/FILE.gguf]`. Raises `SourceError`."""
    match = HUB_SOURCE.fullmatch(source.removeprefix("hf://"))
    if match is None or not source.startswith("hf://"):
        raise SourceError(field, f"`{source}` is not of the form `hf://ORG/NAME`, `hf://ORG/NAME@REVISION`.")
    return HubModel(match["repo"], match["revision"], match["file"].lstrip("/") if match["file"] else None)


def _is_complete(folder: Path) -> bool:
    """Whether the folder is complete. Other programs may have fetched only tokenizers or only weights."""
    try:
        weight_map(folder)
        shard_paths(folder)
    except UnreadableModelError:
        return False
    return (folder / "config.json").is_file() and any((folder / name).is_file() for name in _TOKENIZERS)


class HubRepository:
    connections = 1

    def __init__(self, model: HubModel) -> None:
        self.model = model
        self.name = f"`{model.repository}`" + (f" at revision `{model.revision}`" if model.revision else "")

    def list_files(self) -> Listing:
        """Return the repository's current files; its commit makes all further requests about the same state."""
        with self._explained():
            from huggingface_hub import HfApi, constants
            from huggingface_hub.hf_api import RepoFile

            api, name = HfApi(), self.model.repository
            info = api.repo_info(name, revision=self.model.revision)
            if not info.sha:
                raise FetchError("HubUnreachable", f"{constants.ENDPOINT} does not report a commit of {name}.")
            tree = api.list_repo_tree(name, recursive=True, revision=info.sha)
            return Listing(info.sha, [_remote_file(entry) for entry in tree if isinstance(entry, RepoFile)])

    def fetch(self, file: RemoteFile, version: str, out: BinaryIO) -> None:
        with self._explained():
            # As it arrives: the library writes pieces of 10 MB, so that a connection which is cut before never
            # progresses.
            for piece in self._pieces(file, version, out.tell(), file.num_bytes):
                out.write(piece)

    def read_range(self, file: RemoteFile, version: str, start: int, num_bytes: int) -> bytes:
        """Return a range, also from a server that answers with the whole file, of which no more is read than needed."""
        num_bytes = min(num_bytes, file.num_bytes - start)
        if num_bytes <= 0:
            return b""
        with self._explained():
            found = b"".join(self._pieces(file, version, start, start + num_bytes))
        if len(found) < num_bytes:
            ends = f"ends after {start + len(found)} of {file.num_bytes} bytes"
            raise FetchError("HubUnreachable", f"{self.name}: `{file.path}` {ends}. Try again.")
        return found

    def _pieces(self, file: RemoteFile, version: str, start: int, end: int) -> Iterator[bytes]:
        """Yield the file's bytes from `start` to `end` as they arrive."""
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils._headers import build_hf_headers
        from huggingface_hub.utils._http import get_session, hf_raise_for_status

        url, left = hf_hub_url(self.model.repository, file.path, revision=version), end - start
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        if left <= 0:
            return
        with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=timeout) as response:
            hf_raise_for_status(response)
            to_skip = 0 if response.status_code == 206 else start
            for chunk in response.iter_raw():
                piece = chunk[to_skip : to_skip + left]
                to_skip = max(0, to_skip - len(chunk))
                left -= len(piece)
                if piece:
                    yield piece
                if left == 0:
                    return

    def close(self) -> None:
        """Do nothing: the library keeps its connections."""

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (FetchError, OSError, KeyboardInterrupt) as error:
            if isinstance(error, FetchError | KeyboardInterrupt) or not _is_of_network(error):
                raise
            raise explain(error, self.model) from error
        except Exception as error:
            raise explain(error, self.model) from error


def _remote_file(entry: object) -> RemoteFile:
    from huggingface_hub.hf_api import RepoFile

    assert isinstance(entry, RepoFile)
    if entry.lfs is not None:
        # Git stores only a pointer to such a file, whose name does not depend on the content.
        return RemoteFile(entry.path, entry.lfs.size, entry.lfs.sha256)
    git_sha1 = entry.blob_id if _GIT_SHA1.fullmatch(entry.blob_id) else None
    return RemoteFile(entry.path, entry.size, None, git_sha1)


def _is_of_network(error: BaseException) -> bool:
    """Whether the library raised the `OSError` for an HTTP answer and not for the disk."""
    from huggingface_hub.errors import HfHubHTTPError

    return isinstance(error, HfHubHTTPError | ConnectionError | TimeoutError)


def explain(error: Exception, model: HubModel) -> FetchError:
    """Convert an error of the library to a `FetchError`."""
    import httpx2
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name, endpoint = f"`{model.repository}`", constants.ENDPOINT
    status = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None
    if isinstance(error, GatedRepoError):
        return FetchError("Unauthorized", f"{name} is gated at {endpoint}. Accept its terms there. {_CREDENTIALS}.")
    if isinstance(error, RevisionNotFoundError):
        return FetchError("ModelNotFound", f"{name} has no revision `{model.revision}`. Name a branch, tag or commit.")
    if status in _LOGIN_STATUSES:
        message = f"{endpoint} does not let these credentials read {name} (status {status}), or it does not exist."
        return FetchError("Unauthorized", f"{message} {_CREDENTIALS}, and check the name.")
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        return FetchError("ModelNotFound", f"{endpoint} has no {name}. Check the name; a private one needs a token.")
    if isinstance(error, HfHubHTTPError | httpx2.HTTPError | ConnectionError | TimeoutError):
        cause = f"status {status}" if status is not None else f"{type(error).__name__}: {error}"
        message = f"{endpoint} cannot be reached or does not answer as it should ({cause[:300]})."
        return FetchError(
            "HubUnreachable",
            f"{message} Check the network, or name a mirror in HF_ENDPOINT.",
            retry_after_s=_retry_after_s(error.response) if isinstance(error, HfHubHTTPError) else None,
        )
    return FetchError("HubUnreachable", f"{endpoint}: {type(error).__name__}: {str(error)[:300]}")


def _retry_after_s(response: Any) -> float | None:
    """Return the seconds of `Retry-After`; None for another status, and for a date, which none of the hubs sends."""
    if response is None or response.status_code not in (429, 503):
        return None
    try:
        return max(0.0, float(response.headers.get("retry-after", "")))
    except ValueError:
        return None
