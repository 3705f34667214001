"""Asking a hub: what a repository holds at one commit, and the bytes of one file, from where they stopped coming.

Everything that can go wrong becomes a `LoaderError` that names the remedy. Where the bytes go is `volume`'s.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx2
from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils._headers import build_hf_headers

from pagemill_engine.loader.errors import LoaderError
from pagemill_engine.loader.selection import RemoteFile
from pagemill_protocol.sources import HubModel

LOGIN_STATUSES = frozenset({401, 403})
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
GIT_SHA1 = re.compile(r"[0-9a-f]{40}")
CREDENTIALS = "Give a token that may read it: spec.model.credentialsSecretRef"


class Listing(NamedTuple):
    commit: str
    files: list[RemoteFile]


def list_files(model: HubModel) -> Listing:
    """What the repository holds now; the commit makes all further questions about the same state."""
    with _explained(model):
        api = HfApi()
        info = api.repo_info(model.repository, revision=model.revision)
        if not info.sha:
            raise LoaderError("HubUnreachable", f"{constants.ENDPOINT} does not report a commit of {model.repository}.")
        tree = api.list_repo_tree(model.repository, recursive=True, revision=info.sha)
        return Listing(info.sha, [_remote_file(entry) for entry in tree if isinstance(entry, RepoFile)])


def download(model: HubModel, file: RemoteFile, commit: str, part: Path) -> None:
    """Append to `part` what it lacks of the file."""
    url = hf_hub_url(model.repository, file.path, revision=commit)
    with _explained(model), part.open("ab") as out:
        if out.tell() < file.num_bytes:
            http_get(url, out, resume_size=out.tell(), headers=build_hf_headers(), expected_size=file.num_bytes)


def _remote_file(entry: RepoFile) -> RemoteFile:
    if entry.lfs is not None:
        # Git stores only a pointer to such a file, whose name does not depend on the content.
        return RemoteFile(entry.path, entry.lfs.size, entry.lfs.sha256)
    git_sha1 = entry.blob_id if GIT_SHA1.fullmatch(entry.blob_id) else None
    return RemoteFile(entry.path, entry.size, None, git_sha1)


@contextmanager
def _explained(model: HubModel) -> Iterator[None]:
    try:
        yield
    except (LoaderError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise explain(error, model) from error


def explain(error: Exception, model: HubModel) -> LoaderError:
    """The library's many errors as one of ours."""
    name, endpoint = f"`{model.repository}`", constants.ENDPOINT
    status = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None
    if isinstance(error, GatedRepoError):
        message = f"{name} is gated at {endpoint}. Accept its terms there. {CREDENTIALS}."
        return LoaderError("Unauthorized", message)
    if isinstance(error, RevisionNotFoundError):
        return LoaderError("ModelNotFound", f"{name} has no revision `{model.revision}`. Name a branch, tag or commit.")
    if status in LOGIN_STATUSES:
        message = f"{endpoint} does not let these credentials read {name} (status {status}), or it does not exist."
        return LoaderError("Unauthorized", f"{message} {CREDENTIALS}, and check the name.")
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        return LoaderError("ModelNotFound", f"{endpoint} has no {name}. Check the name; a private one needs a token.")
    if isinstance(error, HfHubHTTPError | httpx2.HTTPError | ConnectionError | TimeoutError):
        cause = f"status {status}" if status is not None else f"{type(error).__name__}: {error}"
        message = f"{endpoint} cannot be reached or does not answer as it should ({cause[:300]})."
        return LoaderError("HubUnreachable", f"{message} Check the network, or name a mirror in HF_ENDPOINT.")
    if isinstance(error, OSError):
        return explain_disk(error)
    return LoaderError("HubUnreachable", f"{endpoint}: {type(error).__name__}: {str(error)[:300]}")


def explain_disk(error: OSError) -> LoaderError:
    if error.errno in DISK_FULL:
        return LoaderError("DiskFull", f"The volume is full ({error.strerror}). Raise spec.model.cache.size.")
    path = f" {error.filename}" if error.filename else ""
    return LoaderError("VolumeUnusable", f"The volume cannot be written:{path}: {error.strerror or error}.")
