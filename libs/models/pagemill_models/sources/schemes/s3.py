"""`s3://`: buckets of Amazon S3 and of servers with its protocol (`AWS_ENDPOINT_URL`)."""

from __future__ import annotations

from pagemill_models.sources import settings
from pagemill_models.sources.base import Credential, Repository, SourceKind
from pagemill_models.sources.schemes.object_store import (
    BucketRepository,
    bucket_fault,
    client_options,
    parse_bucket,
)
from pagemill_protocol.source_errors import FetchError

DEFAULT_REGION = "us-east-1"
NEEDS_OBSTORE = "needs the package `obstore`: pip install obstore, or give a local path."


class S3(SourceKind):
    scheme = "s3"
    where = "network"
    form = "s3://BUCKET/PREFIX[/FILE.gguf]"
    about = (
        "The files directly below a prefix of a bucket, or one GGUF file. Without credentials requests are unsigned."
    )
    credentials = (
        Credential("AWS_ACCESS_KEY_ID", "AWS_ACCESS_KEY_ID"),
        Credential("AWS_SECRET_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY"),
        Credential("AWS_SESSION_TOKEN", "AWS_SESSION_TOKEN", is_optional=True),
    )
    variables = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")

    def fault(self, source: str) -> str | None:
        return bucket_fault(source, self.form)

    def file_of(self, source: str) -> str | None:
        at = parse_bucket(source)
        return at.file if at else None

    def server_of(self, source: str) -> str:
        region = settings.s3_region() or DEFAULT_REGION
        return settings.s3_settings().endpoint or f"https://s3.{region}.amazonaws.com"

    def open(self, source: str) -> Repository:
        try:
            from obstore.store import S3Store
        except ImportError:
            raise FetchError("SourceUnavailable", f"`{source}` {NEEDS_OBSTORE}") from None
        self.check(source, "model.source")
        at, chosen = parse_bucket(source), settings.s3_settings()
        assert at is not None
        options = dict(chosen.options) | client_options(allows_http=(chosen.endpoint or "").startswith("http://"))
        if chosen.endpoint:
            options["endpoint"] = chosen.endpoint
        store = S3Store(
            at.bucket,
            region=settings.s3_region() or DEFAULT_REGION,
            skip_signature=not chosen.is_signed,
            **options,
        )
        return BucketRepository(store, at, source, chosen.endpoint or "Amazon S3")
