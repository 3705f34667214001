"""`s3://` and `gs://` with a real server: whole models, interrupted downloads, and clear errors."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from s3_server import KEY, LEASED_KEY, LEASED_SECRET, SECRET, CuttingProxy, S3Server, running_s3_server
from tiny_files import gguf_file, model_files, safetensors
from waiting import wait_until

from pagemill_models.files.safetensors_header import INDEX_FILE, read_index
from pagemill_models.sources import FetchError, find_kind, resolve_source
from pagemill_models.sources.headers import can_read_header, fetch_header
from pagemill_models.sources.schemes.ranges import RANGE_BYTES
from pagemill_models.sources.store.cache import ModelCache

FILES = model_files()
Load = Callable[[str], Path]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running_s3_server(tmp_path_factory.mktemp("s3")) as server:
        server.put("models", {f"tiny/{name}": content for name, content in FILES.items()})
        server.put("public", {f"a/b/{name}": content for name, content in FILES.items()})
        yield server


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "PAGEMILL_MODEL_CACHE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def signed(monkeypatch: pytest.MonkeyPatch, server: S3Server) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def fetch(source: str) -> Path:
        return ModelCache(tmp_path / "models").fetch(find_kind(source), source, lambda **_: None)

    return fetch


def fault(load: Load, source: str, tmp_path: Path) -> FetchError:
    with pytest.raises(FetchError) as caught:
        load(source)
    assert not [path for path in (tmp_path / "models").iterdir() if not path.name.startswith(".")]
    return caught.value


def assert_is_whole(folder: Path) -> None:
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES


@pytest.mark.slow
def test_a_model_of_several_files_is_downloaded_from_a_bucket(load: Load, signed: None) -> None:
    assert_is_whole(load("s3://models/tiny"))


def test_the_header_of_a_model_is_read_without_its_weights(server: S3Server, signed: None, tmp_path: Path) -> None:
    server.put("models", {"one/config.json": FILES["config.json"], "one/model.safetensors": safetensors(900_000)})
    assert can_read_header("s3://models/one")
    fetch_header("s3://models/one", tmp_path)
    assert read_index(tmp_path).num_bytes == 900_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", INDEX_FILE]


def test_a_public_bucket_needs_no_credentials(load: Load, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    assert_is_whole(load("s3://public/a/b/"))


def test_credentials_may_come_from_a_profile(
    load: Load, server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_PROFILE", "work")
    (tmp_path / ".aws").mkdir()
    lines = ["[work]", f"aws_access_key_id = {KEY}", f"aws_secret_access_key = {SECRET}"]
    (tmp_path / ".aws" / "credentials").write_text("\n".join(lines))
    assert_is_whole(load("s3://models/tiny"))


def test_google_buckets_are_read_with_the_same_protocol(
    load: Load, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = {"gcs_base_url": server.url, "disable_oauth": True, "client_email": "", "private_key": ""}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key | {"private_key_id": ""}))
    assert_is_whole(load("gs://public/a/b"))


def test_one_gguf_file_of_a_bucket_is_a_model(load: Load, server: S3Server, signed: None) -> None:
    server.put("models", {"gguf/m.gguf": gguf_file(4096), "gguf/other.gguf": b"GGUF"})
    folder = load("s3://models/gguf/m.gguf")
    assert (folder / "m.gguf").read_bytes() == gguf_file(4096)
    assert not (folder / "other.gguf").exists()


def test_serve_accepts_a_bucket_like_a_path(signed: None, tmp_path: Path, server: S3Server) -> None:
    path = resolve_source("s3://models/tiny")
    assert_is_whole(path)
    assert path.is_relative_to(tmp_path)
    assert resolve_source("s3://models/tiny") == path


def test_an_interrupted_download_is_resumed(
    load: Load, server: S3Server, signed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.put("models", {"big/config.json": FILES["config.json"], "big/model.safetensors": safetensors(6_000_000)})
    proxy = CuttingProxy(server.port, cut_bytes=2_000_000, num_cuts=2)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    folder = load("s3://models/big")
    assert (folder / "model.safetensors").read_bytes() == safetensors(6_000_000)
    assert proxy.num_cuts == 0
    assert proxy.sent_bytes < 9_000_000, "received bytes must not be downloaded again"
    proxy.close()


def test_a_large_file_is_downloaded_over_several_connections_in_order(
    load: Load, server: S3Server, signed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = safetensors(5 * RANGE_BYTES)
    server.put("models", {"wide/config.json": FILES["config.json"], "wide/model.safetensors": content})
    proxy = CuttingProxy(server.port, cut_bytes=RANGE_BYTES // 2, num_cuts=3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    folder = load("s3://models/wide")
    assert (folder / "model.safetensors").read_bytes() == content
    assert proxy.num_cuts == 0
    ranges = {match for request in proxy.requests for match in re.findall(rb"range: bytes=(\d+)-", request)}
    assert {b"%d" % (RANGE_BYTES * number) for number in range(1, 5)} <= ranges
    proxy.close()


def test_files_of_a_killed_loader_are_not_downloaded_again(
    load: Load, server: S3Server, signed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    content = safetensors(9_000_000)
    server.put("models", {"left/config.json": FILES["config.json"], "left/model.safetensors": content})
    stalling = CuttingProxy(server.port, cut_bytes=6_000_000, num_cuts=1, stalls=True)
    target = tmp_path / "models" / "one"
    command = [
        sys.executable,
        "-m",
        "pagemill_engine.fetching",
        "--source",
        "s3://models/left",
        "--target",
        str(target),
    ]
    loader = subprocess.Popen(command, env=os.environ | {"AWS_ENDPOINT_URL": stalling.url}, stdout=subprocess.DEVNULL)
    part = tmp_path / "models" / ".one.loading" / "model.safetensors.part"
    wait_until(lambda: part.exists() and part.stat().st_size > 4_000_000)
    loader.kill()
    loader.wait()
    stalling.close()
    kept = part.stat().st_size
    proxy = CuttingProxy(server.port)
    loaded = subprocess.run(command, env=os.environ | {"AWS_ENDPOINT_URL": proxy.url}, capture_output=True, timeout=120)
    proxy.close()
    assert loaded.returncode == 0, loaded.stderr
    assert (target / "model.safetensors").read_bytes() == content
    assert proxy.sent_bytes < len(content) - kept + 100_000


def test_versions_of_a_file_that_is_replaced_during_its_download_are_never_mixed(
    load: Load, server: S3Server, signed: None, tmp_path: Path
) -> None:
    source = "s3://models/replaced"
    server.put(
        "models", {"replaced/config.json": FILES["config.json"], "replaced/model.safetensors": safetensors(9000)}
    )
    kind = find_kind(source)
    repository = kind.open(source)
    listing = repository.list_files()
    server.put("models", {"replaced/model.safetensors": safetensors(9000, seed=1)})
    (file,) = [file for file in listing.files if file.path == "model.safetensors"]
    with (tmp_path / "part").open("ab") as out, pytest.raises(FetchError, match="was replaced") as caught:
        repository.fetch(file, listing.version, out)
    assert caught.value.reason == "SourceChanged"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", safetensors(9000)),
        ("model.gguf", gguf_file(9000)),
        ("tokenizer.json", b'{"model": {"vocab": {}}}'),
        ("generation_config.json", b'{"eos_token_id": 2}'),
    ],
)
def test_a_partly_uploaded_file_is_detected_before_ready(
    load: Load, server: S3Server, signed: None, tmp_path: Path, name: str, content: bytes
) -> None:
    """The file is not kept: once the upload is complete, the next attempt loads it."""
    prefix = f"half-{name.replace('.', '-')}"
    head = {} if name.endswith(".gguf") else {f"{prefix}/config.json": FILES["config.json"]}
    server.put("models", {**head, f"{prefix}/{name}": content[: len(content) // 2]})
    error = fault(load, f"s3://models/{prefix}", tmp_path)
    assert error.reason == "ModelUnreadable"
    assert f"`{name}`" in error.message
    assert "upload the file again" in error.message
    assert str(tmp_path) not in error.message
    server.put("models", {f"{prefix}/{name}": content})
    assert (load(f"s3://models/{prefix}") / name).read_bytes() == content


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        (
            {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}},
            "UnsupportedArchitecture",
            ("`own`", "`auto_map`", "never run", "`pagemill.models`"),
        ),
        (
            # transformers would use its own class for that type; the code that the model names computes something else.
            {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}},
            "UnsupportedArchitecture",
            ("`OwnForCausalLM`", "`auto_map`", "never run", "`pagemill.models`"),
        ),
        (
            {"quantization_config": {"quant_method": "aqlm"}},
            "UnsupportedQuantization",
            ("`aqlm`", "`quantization_config`", "gptq", "GGUF"),
        ),
    ],
)
def test_an_unsupported_model_is_refused_before_its_weights_are_downloaded(
    load: Load, server: S3Server, signed: None, tmp_path: Path, changes: dict[str, Any], reason: str, words: list[str]
) -> None:
    config = json.dumps(json.loads(FILES["config.json"]) | changes).encode()
    content = {**FILES, "config.json": config, "modeling_own.py": b"raise SystemExit"}
    prefix = hashlib.sha256(config).hexdigest()[:8]
    server.put("models", {f"{prefix}/{name}": each for name, each in content.items()})
    error = fault(load, f"s3://models/{prefix}", tmp_path)
    assert error.reason == reason, error.message
    assert [word for word in words if word not in error.message] == [], error.message
    assert not [path for path in tmp_path.rglob("*.safetensors*") if not path.name.endswith(".index.json")]
    assert not list(tmp_path.rglob("*.py"))


def test_a_shard_that_the_index_names_must_exist(load: Load, server: S3Server, signed: None, tmp_path: Path) -> None:
    server.put("models", {f"gap/{name}": text for name, text in FILES.items() if name != "model-1.safetensors"})
    error = fault(load, "s3://models/gap", tmp_path)
    assert error.reason == "ModelUnreadable"
    assert "lacks model-1.safetensors" in error.message


@pytest.mark.parametrize(
    ("source", "reason", "words"),
    [
        ("s3://no-such-bucket/tiny", "ModelNotFound", "NoSuchBucket"),
        ("s3://models/nothing", "ModelNotFound", "no file below that prefix"),
        ("s3://models/tiny/x.gguf", "ModelNotFound", "has no file `x.gguf`"),
    ],
)
def test_a_missing_object_is_named(
    load: Load, signed: None, tmp_path: Path, source: str, reason: str, words: str
) -> None:
    error = fault(load, source, tmp_path)
    assert (error.reason, words in error.message) == (reason, True), error.message


def test_wrong_credentials_are_not_a_missing_model(
    load: Load, signed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-one")
    error = fault(load, "s3://models/tiny", tmp_path)
    assert error.reason == "Unauthorized"
    assert "credentialsSecretRef" in error.message
    assert "wrong-one" not in error.message


def test_a_refusal_names_expired_credentials_among_the_causes(
    signed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SeaweedFS answers `AccessDenied`, as for a client without the permission."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", LEASED_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", LEASED_SECRET)

    def refused() -> FetchError | None:
        anew = ModelCache(Path(tempfile.mkdtemp(dir=tmp_path)))
        try:
            anew.fetch(find_kind("s3://models/tiny"), "s3://models/tiny", lambda **_: None)
        except FetchError as error:
            return error
        return None

    error = wait_until(refused, every_s=0.2)
    assert error.reason == "Unauthorized"
    assert "AccessDenied" in error.message
    assert "have not expired: in environment variables, or in a cluster in spec.model." in error.message
    assert LEASED_SECRET not in error.message


def test_an_expired_credential_is_reported_as_expired(
    load: Load, signed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error is that of Amazon for a session that has expired."""

    class Expired(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
            self.send_response(400)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None: ...

    answering = ThreadingHTTPServer(("127.0.0.1", 0), Expired)
    thread = Thread(target=answering.serve_forever, args=(0.02,))
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{answering.server_address[1]}")
    error = fault(load, "s3://models/tiny", tmp_path)
    answering.shutdown()
    thread.join()
    answering.server_close()
    assert error.reason == "Unauthorized"
    assert "have expired" in error.message
    assert "Renew them" in error.message


def test_an_unreachable_server_is_reported(
    load: Load, signed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    error = fault(load, "s3://models/tiny", tmp_path)
    assert error.reason == "SourceUnreachable"
    assert "http://127.0.0.1:9" in error.message
