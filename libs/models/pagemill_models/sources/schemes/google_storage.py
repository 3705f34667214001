"""`gs://`: buckets of Google Cloud Storage."""

from __future__ import annotations

from pagemill_models.sources import settings
from pagemill_models.sources.base import Credential, Repository, SourceKind
from pagemill_models.sources.schemes.object_store import (
    BucketRepository,
    bucket_fault,
    client_options,
    parse_bucket,
)
from pagemill_models.sources.schemes.s3 import NEEDS_OBSTORE
from pagemill_protocol.source_errors import FetchError


class GoogleStorage(SourceKind):
    scheme = "gs"
    where = "network"
    form = "gs://BUCKET/PREFIX[/FILE.gguf]"
    about = (
        "The files directly below a prefix of a bucket, or one GGUF file. Without credentials requests are unsigned."
    )
    credentials = (Credential("GOOGLE_SERVICE_ACCOUNT_KEY"),)

    def fault(self, source: str) -> str | None:
        return bucket_fault(source, self.form)

    def file_of(self, source: str) -> str | None:
        at = parse_bucket(source)
        return at.file if at else None

    def server_of(self, source: str) -> str:
        return "" if settings.google_endpoint_is_plain() else "https://storage.googleapis.com"

    def open(self, source: str) -> Repository:
        try:
            from obstore.exceptions import BaseError
            from obstore.store import GCSStore
        except ImportError:
            raise FetchError("SourceUnavailable", f"`{source}` {NEEDS_OBSTORE}") from None
        self.check(source, "model.source")
        at = parse_bucket(source)
        assert at is not None
        options = client_options(allows_http=settings.google_endpoint_is_plain())
        try:
            store = GCSStore(at.bucket, skip_signature=not settings.google_is_signed(), **options)
        except BaseError as error:
            cause = str(error).split("\n")[0][:200]
            message = f"`{source}`: the credentials cannot be used ({cause}). Give the JSON key of a service account."
            raise FetchError("Unauthorized", message) from error
        return BucketRepository(store, at, source, "Google Cloud Storage")
