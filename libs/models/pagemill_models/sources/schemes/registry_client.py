"""The pull half of the OCI distribution protocol: tokens, manifests checked by digest, blobs by range.

Plain HTTP is used only for this machine and the registries in `PAGEMILL_PLAIN_HTTP_REGISTRIES`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import orjson

from pagemill_models.sources.base import RemoteFile
from pagemill_models.sources.settings import is_plain_registry, registry_login
from pagemill_protocol.source_errors import FetchError

MANIFEST_TYPES = ", ".join(
    f"application/vnd.{name}+json"
    for name in (
        "oci.image.manifest.v1",
        "oci.image.index.v1",
        "docker.distribution.manifest.v2",
        "docker.distribution.manifest.list.v2",
    )
)
MAX_MANIFEST_BYTES = 4 * 1024 * 1024
TIMEOUT_S = 60.0
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_LOGIN = (
    "Give a docker configuration that may pull it: `docker login`, in a cluster the dockerconfigjson Secret that "
    "spec.model.credentialsSecretRef names"
)


class RegistryClient:
    def __init__(self, host: str, repository: str, name: str) -> None:
        """Make a client of one repository. `name`: the source, for messages."""
        self._host = host
        self._repository = repository
        self._name = name
        self._headers: dict[str, str] = {}
        self._base = f"{registry_url(host)}/v2/{repository}"
        self._client: Any = None

    def manifest(self, reference: str) -> tuple[dict[str, Any], str]:
        """Return the manifest and its digest. Raises `FetchError`."""
        with self._explained(), self._get(f"/manifests/{reference}", {"Accept": MANIFEST_TYPES}) as response:
            body = b""
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > MAX_MANIFEST_BYTES:
                    raise FetchError("ModelUnreadable", f"{self._name}: its manifest has more than 4 MiB.")
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if reference.startswith("sha256:") and digest != reference:
            message = f"{self._name}: {self._host} answered with the manifest {digest}. Do not trust that registry."
            raise FetchError("ModelCorrupt", message)
        try:
            content = orjson.loads(body)
        except orjson.JSONDecodeError:
            content = None
        if not isinstance(content, dict):
            raise FetchError("ModelUnreadable", f"{self._name}: its manifest is not a JSON object.")
        return content, digest

    def fetch(self, file: RemoteFile, out: BinaryIO) -> None:
        """Append the missing part of a blob to `out`; a registry without ranges sends it from the beginning."""
        headers = {"Range": f"bytes={out.tell()}-"} if out.tell() else {}
        headers["Accept-Encoding"] = "identity"
        with self._explained(), self._get(f"/blobs/{file.address}", headers) as response:
            if "Range" in headers and response.status_code == 200:
                out.truncate(0)
                out.seek(0)
            for chunk in response.iter_raw():
                out.write(chunk)

    def read_range(self, file: RemoteFile, start: int, end: int) -> bytes:
        """Return a range of a blob, also from a registry without ranges, of which no more is read than needed."""
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        found = bytearray()
        with self._explained(), self._get(f"/blobs/{file.address}", headers) as response:
            skipped = 0 if response.status_code == 206 else start
            for chunk in response.iter_raw():
                found += chunk
                if len(found) >= skipped + end - start:
                    break
        return bytes(found[skipped : skipped + end - start])

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    @contextmanager
    def _get(self, path: str, headers: dict[str, str]) -> Iterator[Any]:
        client = self._opened()
        for attempt in (1, 2):
            with client.stream("GET", self._base + path, headers={**headers, **self._headers}) as response:
                if response.status_code == 401 and attempt == 1:
                    challenge = response.headers.get("WWW-Authenticate", "")
                else:
                    self._check(response, path)
                    yield response
                    return
            self._headers = self._authorization(challenge)

    def _opened(self) -> Any:
        if self._client is None:
            import httpx2

            self._client = httpx2.Client(timeout=TIMEOUT_S, follow_redirects=True)
        return self._client

    def _authorization(self, challenge: str) -> dict[str, str]:
        import httpx2

        login = registry_login(self._host)
        if challenge.lower().startswith("basic"):
            if login is None:
                raise self._refused("asks for a password")
            request = next(httpx2.BasicAuth(*login).auth_flow(httpx2.Request("GET", self._base)))
            return {"Authorization": request.headers["Authorization"]}
        fields = dict(_CHALLENGE.findall(challenge))
        if "realm" not in fields:
            raise self._refused("answers 401 without naming how to log in")
        query = {"scope": fields.get("scope") or f"repository:{self._repository}:pull"}
        if "service" in fields:
            query["service"] = fields["service"]
        answer = self._opened().get(fields["realm"], params=query, auth=httpx2.BasicAuth(*login) if login else None)
        if answer.status_code in (401, 403):
            raise self._refused(f"does not accept these credentials (status {answer.status_code} of its token server)")
        answer.raise_for_status()
        token = answer.json()
        return {"Authorization": f"Bearer {token.get('token') or token.get('access_token')}"}

    def _check(self, response: Any, path: str) -> None:
        status = response.status_code
        if status in (401, 403):
            raise self._refused(f"does not let these credentials pull it (status {status})")
        if status == 404:
            what = "has no such repository or tag" if "/manifests/" in path else f"has no blob {path.rsplit('/')[-1]}"
            raise FetchError("ModelNotFound", f"{self._name}: {self._host} {what}. Check the name and the tag.")
        response.raise_for_status()

    def _refused(self, how: str) -> FetchError:
        return FetchError("Unauthorized", f"{self._name}: {self._host} {how}. {_LOGIN}.")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        import httpx2

        try:
            yield
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            cause = f"{type(error).__name__}: {error}"[:300]
            raise FetchError(
                "SourceUnreachable",
                f"{self._name}: {self._host} cannot be reached or does not answer as it should ({cause}). Check the "
                "network and the registry's name.",
            ) from error


def registry_url(host: str) -> str:
    return f"{'http' if is_plain_registry(host) else 'https'}://{host}"
