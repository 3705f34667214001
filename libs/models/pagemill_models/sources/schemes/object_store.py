"""Buckets of object stores, through `obstore`: lists a prefix, reads by range, and explains the store's errors.

The kinds `s3://` and `gs://` use it and make the library's store. Requests name the entity tag of the listing, so a
file that is replaced meanwhile is never mixed with its successor.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, BinaryIO, NamedTuple

from pagemill_models.sources.base import Listing, RemoteFile
from pagemill_models.sources.schemes.ranges import NUM_RANGES, read_in_order
from pagemill_protocol.source_errors import FetchError

CHUNK_BYTES = 1024 * 1024
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}")
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,200})")
_EXPIRED = ("ExpiredToken", "TokenRefreshRequired", "ExpiredTokenException", "RequestExpired")
_REFUSED = ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthenticationRequired")


class BucketPath(NamedTuple):
    bucket: str
    prefix: str
    """Without a slash at either end; for a single file, its folder."""
    file: str | None
    """A single GGUF file below the prefix."""


def parse_bucket(source: str) -> BucketPath | None:
    """Return the parts of `SCHEME://BUCKET/PREFIX[/FILE.gguf]`, or None for another form."""
    bucket, _, path = source.partition("://")[2].partition("/")
    parts = [part for part in path.split("/") if part]
    if not _BUCKET.fullmatch(bucket) or ".." in parts or "?" in source or "#" in source:
        return None
    if parts and parts[-1].endswith(".gguf"):
        return BucketPath(bucket, "/".join(parts[:-1]), parts[-1])
    return BucketPath(bucket, "/".join(parts), None)


def bucket_fault(source: str, form: str) -> str | None:
    return None if parse_bucket(source) else f"`{source}` is not of the form `{form}`."


def client_options(*, allows_http: bool) -> dict[str, Any]:
    return {
        "client_options": {"allow_http": allows_http, "connect_timeout": "15s", "read_timeout": "60s", "timeout": "1d"},
        "retry_config": {"max_retries": 4, "retry_timeout": timedelta(seconds=60)},
    }


class BucketRepository:
    """The files directly below one prefix of a bucket."""

    def __init__(self, store: Any, at: BucketPath, source: str, server: str) -> None:
        """Wrap the library's store. `server`: name in messages."""
        self.name = f"`{source}`"
        self.connections = NUM_RANGES
        self._store = store
        self._at = at
        self._server = server

    def list_files(self) -> Listing:
        with self._explained():
            found = self._store.list_with_delimiter(self._at.prefix or None)
        files = [_remote_file(entry, self._at.prefix) for entry in found["objects"]]
        if not files:
            raise FetchError(
                "ModelNotFound",
                f"{self.name}: {self._server} has no file below that prefix. Check the bucket and the prefix; the "
                "model's files must lie directly below it.",
            )
        content = "\n".join(sorted(f"{file.path} {file.num_bytes} {file.etag}" for file in files))
        return Listing(hashlib.sha256(content.encode()).hexdigest()[:40], files)

    def fetch(self, file: RemoteFile, version: str, out: BinaryIO) -> None:
        with self._explained(file):
            read = functools.partial(self._read, file)
            for chunk in read_in_order(read, out.tell(), file.num_bytes, self.connections):
                out.write(chunk)

    def read_range(self, file: RemoteFile, version: str, start: int, num_bytes: int) -> bytes:
        end = min(start + num_bytes, file.num_bytes)
        if end <= start:
            return b""
        with self._explained(file):
            return b"".join(map(bytes, self._read(file, start, end)))

    def close(self) -> None:
        """Do nothing: the library keeps its connections."""

    def _read(self, file: RemoteFile, start: int, end: int) -> Iterator[Any]:
        options: dict[str, Any] = {"range": (start, end)}
        if file.etag is not None:
            options["if_match"] = file.etag
        yield from self._store.get(file.address, options=options).stream(min_chunk_size=CHUNK_BYTES)

    @contextmanager
    def _explained(self, file: RemoteFile | None = None) -> Iterator[None]:
        import obstore.exceptions

        try:
            yield
        except (obstore.exceptions.BaseError, FileNotFoundError) as error:  # the type depends on the call
            raise self._explain(error, file) from error

    def _explain(self, error: Exception, file: RemoteFile | None) -> FetchError:
        """Return the cause of an error. The library distinguishes causes only by their text."""
        import obstore.exceptions

        text = str(error)
        status, code = _first(_STATUS, text), _first(_CODE, text)
        what = f"{self.name}: `{file.path}`" if file else self.name
        said = (
            f"{code}: {_first(_MESSAGE, text)}" if code else f"status {status}" if status else text.split("\n")[0][:300]
        )
        if isinstance(error, obstore.exceptions.PreconditionError) or status == "412":
            return FetchError("SourceChanged", f"{what} was replaced while it was fetched. It will be fetched again.")
        if code in _EXPIRED:
            message = f"{what}: the credentials have expired ({said}). Renew them in the Secret that"
            return FetchError("Unauthorized", f"{message} spec.model.credentialsSecretRef names, or in the variables.")
        if status in ("401", "403") or code in _REFUSED or ("token" in text.lower() and "oauth" in text.lower()):
            message = f"{what}: {self._server} does not let these credentials read it ({said}). Give ones that may list"
            # Not every server says that credentials are refused because they have expired.
            remedy = "and read the bucket, and have not expired: in environment variables, or in a cluster in "
            remedy += "spec.model.credentialsSecretRef."
            return FetchError("Unauthorized", f"{message} {remedy}")
        if isinstance(error, obstore.exceptions.NotFoundError | FileNotFoundError) or status == "404":
            return FetchError("ModelNotFound", f"{what}: {self._server} has none of that name ({said}). Check it.")
        return FetchError(
            "SourceUnreachable",
            f"{what}: {self._server} cannot be reached or does not answer as it should ({said}). Check the network and "
            "the endpoint.",
        )


def _remote_file(entry: Any, prefix: str) -> RemoteFile:
    address = str(entry["path"])
    path = address.removeprefix(prefix).lstrip("/") if prefix else address
    return RemoteFile(path, int(entry["size"]), etag=entry["e_tag"], address=address)


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""
