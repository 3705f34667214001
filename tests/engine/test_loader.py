"""The model loader with a hub that has the real routes: models are complete or absent, and errors are clear."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from tiny_files import gguf_file, safetensors
from waiting import WAIT_LIMIT_S

from pagemill_engine.fetching import __main__ as program
from pagemill_engine.fetching import settings
from pagemill_engine.fetching.__main__ import main
from pagemill_engine.fetching.load import load
from pagemill_engine.fetching.settings import LoaderSettings
from pagemill_models.sources import FetchError, resolve_source
from pagemill_models.sources.base import RemoteFile
from pagemill_models.sources.selection import select_files
from pagemill_models.sources.store import cache, fetch, record
from pagemill_models.sources.store.fetch import TRIES

HUB = Path(__file__).resolve().parents[2] / "e2e" / "support" / "hub.py"
REPOSITORY = "org/tiny"
TOKEN = "hf_secret"
CONFIG = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
HEADER = json.dumps({"w": {"dtype": "U8", "shape": [2**20], "data_offsets": [0, 2**20]}}).encode()
SAFETENSORS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(range(256)) * 4096
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b"{}",
    "model.safetensors": SAFETENSORS,
    "consolidated.safetensors": b"the same once more",
    "README.md": b"# no part of the model",
    "pytorch_model.bin": b"pickled",
    "tiny.Q4.gguf": gguf_file(400_000),
}


def hub_module() -> Any:
    spec = importlib.util.spec_from_file_location("e2e_hub", HUB)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hub = hub_module()


class RecordingHandler(hub.Handler):
    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Range")))
        if self.server.busy and self.server.busy[0][0] in self.path:
            _, status, headers = self.server.busy.pop(0)
            self._text(status, "busy", headers, body=True)
            return
        if "/resolve/" in self.path and self.path.endswith(self.server.slow_file):
            self.server.slow_asked.set()
            self.server.gate.wait(300)
        elif self.server.late_file and self.path.endswith(self.server.late_file):
            self.server.slow_asked.wait(300)
        super().do_GET()

    def _json(self, value: Any, *, body: bool) -> None:
        if isinstance(value, list):
            for entry in value:
                if entry["path"] in self.server.git_sha1:
                    entry["oid"] = self.server.git_sha1[entry["path"]]
                    del entry["lfs"]
        super()._json(value, body=body)

    def _copy(self, path: Path, start: int, end: int) -> None:
        most = self.server.cut_after_bytes
        super()._copy(path, start, min(end, start + most) if most else end)
        if most and start + most < end:
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    folder = tmp_path / "repository"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    server = hub.Hub(0, REPOSITORY, TOKEN, sorted(folder.iterdir()))
    server.RequestHandlerClass = RecordingHandler
    server.asked = []
    server.busy, server.cut_after_bytes = [], 0
    server.git_sha1 = {}
    server.slow_file, server.late_file = "", ""
    server.gate, server.slow_asked = threading.Event(), threading.Event()
    server.gate.set()
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    yield server
    server.gate.set()
    server.slow_asked.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "models" / "abcd1234"


def run(source: str, target: Path) -> list[dict[str, Any]]:
    reported: list[dict[str, Any]] = []
    load(LoaderSettings(source, target), lambda **fields: reported.append(fields))
    return reported


def failure(source: str, target: Path) -> FetchError:
    with pytest.raises(FetchError) as caught:
        run(source, target)
    assert not target.exists(), "a partial model must never be visible"
    return caught.value


def test_a_whole_model_is_downloaded_without_unrelated_files(server: Any, target: Path) -> None:
    reported = run(f"hf://{REPOSITORY}", target)
    assert {path.name for path in target.iterdir()} - {record.NAME} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }
    assert all((target / name).read_bytes() == FILES[name] for name in ("config.json", "model.safetensors"))
    assert reported[-1]["event"] == "loaded"
    assert resolve_source(f"file://{target}") == target


def test_files_of_encoders_alone_are_not_downloaded(server: Any, tmp_path: Path, target: Path) -> None:
    """They are left out by the index, and neither their space nor their bytes count."""
    shards = {"text.safetensors": safetensors(300_000, 0), "seen.safetensors": safetensors(500_000, 1)}
    index = {"w0": "text.safetensors", "model.visual.w1": "seen.safetensors"}
    files = {**shards, "model.safetensors.index.json": json.dumps({"weight_map": index}).encode()}
    for name, content in files.items():
        (tmp_path / "repository" / name).write_bytes(content)
        server.files[name] = tmp_path / "repository" / name
        server.digests[name] = hashlib.sha256(content).hexdigest()
    del server.files["model.safetensors"]
    reported = run(f"hf://{REPOSITORY}", target)
    assert (target / "text.safetensors").read_bytes() == shards["text.safetensors"]
    assert not (target / "seen.safetensors").exists()
    assert not any("seen.safetensors" in path for path, _ in server.asked)
    (loading,) = (each for each in reported if each["event"] == "loading")
    assert 300_000 < loading["num_bytes"] < 500_000


def test_one_file_of_a_revision_is_downloaded(server: Any, target: Path) -> None:
    run(f"hf://{REPOSITORY}@v1/tiny.Q4.gguf", target)
    assert {path.name for path in target.iterdir()} - {record.NAME} == {"tiny.Q4.gguf"}
    assert resolve_source(f"file://{target}/tiny.Q4.gguf")
    assert any("revision/v1" in path for path, _ in server.asked)
    assert any(f"resolve/{hub.COMMIT}/" in path for path, _ in server.asked), "all files must be of one commit"


HEAD = {**CONFIG, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32}


def serve_config(server: Any, tmp_path: Path, config: dict[str, Any]) -> None:
    content = json.dumps(config).encode()
    (tmp_path / "repository" / "config.json").write_bytes(content)
    server.digests["config.json"] = hashlib.sha256(content).hexdigest()


def test_a_head_that_drafts_is_fetched_beside_its_model(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An EAGLE-3 head's architecture is no model's; what is wrong with it is named by its own field."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    serve_config(server, tmp_path, HEAD)
    model, head, log = (tmp_path / "models" / name for name in ("a", "b", "log"))
    model.parent.mkdir()
    log.touch()
    first = ["--source", f"hf://{REPOSITORY}", "--target", str(model), "--termination-log", str(log)]
    assert main([*first, "--source", f"hf://{REPOSITORY}@main", "--target", str(head)]) == 0
    assert (model / "model.safetensors").read_bytes() == (head / "model.safetensors").read_bytes() == SAFETENSORS
    serve_config(server, tmp_path, {**HEAD, "num_hidden_layers": 2})
    other = str(tmp_path / "models" / "c")
    assert main([*first, "--source", f"hf://{REPOSITORY}@main", "--target", other]) == 1
    termination = json.loads(log.read_text())
    assert (termination["reason"], termination["field"]) == (
        "UnsupportedArchitecture",
        "spec.engine.speculative.source",
    )
    assert "EAGLE-3 heads of 2 layers" in termination["message"]


def test_a_model_on_the_volume_causes_no_request(server: Any, target: Path) -> None:
    run(f"hf://{REPOSITORY}", target)
    server.asked.clear()
    assert run(f"hf://{REPOSITORY}", target)[-1]["event"] == "complete"
    assert server.asked == []


def test_the_folder_for_compiled_kernels_is_also_created_for_an_existing_model(server: Any, target: Path) -> None:
    run(f"hf://{REPOSITORY}", target)
    kernels = target.with_name("kernels")
    load(LoaderSettings(f"hf://{REPOSITORY}", target, kernels=kernels), lambda **_: None)
    assert kernels.is_dir()


def test_an_interrupted_download_is_resumed(server: Any, target: Path) -> None:
    staging = target.with_name(f".{target.name}.loading")
    staging.mkdir(parents=True)
    (staging / ".commit").write_text(hub.COMMIT)
    whole = FILES["model.safetensors"]
    (staging / "model.safetensors.part").write_bytes(whole[: len(whole) // 2])
    (staging / "config.json").write_bytes(FILES["config.json"])
    run(f"hf://{REPOSITORY}", target)
    assert (target / "model.safetensors").read_bytes() == whole
    ranges = {path.rsplit("/", 1)[1]: range_ for path, range_ in server.asked if "/resolve/" in path}
    assert ranges["model.safetensors"].startswith(f"bytes={len(whole) // 2}-")
    assert "config.json" not in ranges
    assert list(target.parent.glob(".*.loading")) == []


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("route", ["/api/models/org/tiny", "/resolve/"])
def test_a_hub_that_asks_to_wait_is_asked_again_after_that_time(
    server: Any, target: Path, monkeypatch: pytest.MonkeyPatch, status: int, route: str
) -> None:
    waited_s: list[float] = []
    monkeypatch.setattr(threading.Event, "wait", _noting(waited_s, threading.Event.wait))
    server.busy = [(route, status, {"Retry-After": "77"})] * (TRIES + 2)
    run(f"hf://{REPOSITORY}", target)
    assert (target / "model.safetensors").read_bytes() == SAFETENSORS
    assert waited_s.count(77.0) >= 1
    assert server.busy == []


def _noting(waited_s: list[float], wait: Callable[..., bool]) -> Callable[..., bool]:
    """Return `Event.wait` that notes waits of more than a minute and does not wait for them."""

    def noted(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout is None or timeout < 60:
            return wait(event, timeout)
        waited_s.append(timeout)
        return event.is_set()

    return noted


def test_a_download_whose_connection_is_cut_again_and_again_goes_on(
    server: Any, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "FIRST_PAUSE_S", 0.001)
    server.cut_after_bytes = 100_000
    run(f"hf://{REPOSITORY}", target)
    assert (target / "model.safetensors").read_bytes() == SAFETENSORS
    starts = [range_ for path, range_ in server.asked if path.endswith("model.safetensors")]
    assert len(starts) >= len(SAFETENSORS) // 100_000


def test_parts_of_another_commit_are_not_used(server: Any, target: Path) -> None:
    staging = target.with_name(f".{target.name}.loading")
    staging.mkdir(parents=True)
    (staging / ".commit").write_text("0" * 40)
    (staging / "config.json").write_bytes(b"old")
    run(f"hf://{REPOSITORY}", target)
    assert (target / "config.json").read_bytes() == FILES["config.json"]


def test_damaged_content_is_detected_and_downloaded_again(server: Any, target: Path) -> None:
    staging = target.with_name(f".{target.name}.loading")
    staging.mkdir(parents=True)
    (staging / ".commit").write_text(hub.COMMIT)
    (staging / "model.safetensors.part").write_bytes(bytes(len(FILES["model.safetensors"])))
    assert failure(f"hf://{REPOSITORY}", target).reason == "ModelCorrupt"
    run(f"hf://{REPOSITORY}", target)
    assert (target / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_files_stored_in_git_are_verified_too(server: Any, target: Path) -> None:
    content = FILES["config.json"]
    server.git_sha1["config.json"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    staging = target.with_name(f".{target.name}.loading")
    staging.mkdir(parents=True)
    (staging / ".commit").write_text(hub.COMMIT)
    (staging / "config.json.part").write_bytes(bytes(len(content)))
    error = failure(f"hf://{REPOSITORY}", target)
    assert (error.reason, "other content" in error.message) == ("ModelCorrupt", True)
    run(f"hf://{REPOSITORY}", target)
    assert (target / "config.json").read_bytes() == content


def test_files_of_a_hub_without_digests_are_verified_by_size(server: Any, target: Path) -> None:
    server.git_sha1["config.json"] = "not of git"
    run(f"hf://{REPOSITORY}", target)
    assert (target / "config.json").read_bytes() == FILES["config.json"]


def test_two_loaders_of_one_folder_do_not_interfere(server: Any, target: Path) -> None:
    errors: list[Exception] = []

    def work() -> None:
        try:
            run(f"hf://{REPOSITORY}", target)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_LIMIT_S)
    assert errors == []
    fetched = [path for path, _ in server.asked if path.endswith("model.safetensors") and "/resolve/" in path]
    assert len(fetched) == 1


@pytest.mark.parametrize(
    ("source", "reason", "words"),
    [
        ("hf://org/none", "ModelNotFound", "org/none"),
        (f"hf://{REPOSITORY}/other.gguf", "ModelNotFound", "tiny.Q4.gguf"),
        ("ftp://host/model", "SourceUnsupported", "s3://BUCKET/PREFIX"),
        ("s3://B/model", "SourceUnsupported", "s3://BUCKET/PREFIX"),
        ("pvc://claim/model", "SourceUnsupported", "remove spec.model.cache"),
        ("package://p/f.gguf", "SourceUnsupported", "remove spec.model.cache"),
        ("hf://only-a-name", "SourceUnsupported", "hf://ORG/NAME"),
    ],
)
def test_a_failed_download_is_reported_with_the_remedy(
    server: Any, target: Path, source: str, reason: str, words: str
) -> None:
    error = failure(source, target)
    assert error.reason == reason
    assert words in error.message


def test_wrong_credentials_are_not_a_missing_model(server: Any, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    error = failure(f"hf://{REPOSITORY}", target)
    assert error.reason == "Unauthorized"
    assert "credentialsSecretRef" in error.message
    assert "hf_wrong" not in error.message


def test_a_hub_that_does_not_answer_is_reported(server: Any, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    error = failure(f"hf://{REPOSITORY}", target)
    assert error.reason == "HubUnreachable"
    assert "HF_ENDPOINT" in error.message


def test_a_model_that_does_not_fit_is_refused_before_its_download(
    server: Any, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1024})
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: usage)
    error = failure(f"hf://{REPOSITORY}", target)
    assert error.reason == "DiskFull"
    assert "1 MiB more" in error.message
    assert not any("/resolve/" in path for path, _ in server.asked)


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        ({"model_type": "mamba"}, "UnsupportedArchitecture", "The model has the architecture `mamba`"),
        (
            {"rope_scaling": {"rope_type": "axial", "factor": 2.0}},
            "UnsupportedArchitecture",
            "with the rope scaling `axial`",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": None}},
            "ModelUnreadable",
            "`config.json`: `rope_scaling.factor` is null",
        ),
    ],
)
def test_an_unsupported_model_is_refused_before_its_weights_are_downloaded(
    server: Any, target: Path, tmp_path: Path, changes: dict[str, Any], reason: str, words: str
) -> None:
    serve_config(server, tmp_path, CONFIG | changes)
    error = failure(f"hf://{REPOSITORY}", target)
    assert error.reason == reason
    assert words in error.message
    fetched = {path.rsplit("/", 1)[1] for path, _ in server.asked if "/resolve/" in path}
    assert fetched == {"config.json"}


def test_the_error_for_a_full_volume_names_its_other_contents(
    server: Any, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, num_bytes in (("0ld0ld0l", 3 * 1024**2), (f".{target.name}.loading", 10), ("empty", 0)):
        (target.parent / name).mkdir(parents=True)
        (target.parent / name / "model.gguf").write_bytes(bytes(num_bytes))
    usage = type("Usage", (), {"free": 1024})
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: usage)
    error = failure(f"hf://{REPOSITORY}", target)
    assert "models of other sources: 0ld0ld0l (3 MiB); delete" in error.message
    assert (target.parent / "0ld0ld0l" / "model.gguf").exists()


def test_a_read_only_volume_is_reported(server: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(FetchError) as caught:
        run(f"hf://{REPOSITORY}", tmp_path / "file" / "model")
    assert caught.value.reason == "VolumeUnusable"


def test_the_termination_message_contains_the_reason(server: Any, target: Path, tmp_path: Path) -> None:
    (log := tmp_path / "termination").touch()
    command = [sys.executable, "-m", "pagemill_engine.fetching", "--target", str(target), "--termination-log", str(log)]
    environment = {**os.environ, "HF_ENDPOINT": server.url, "HOME": str(tmp_path)}
    done = subprocess.run(
        [*command, "--source", "hf://org/none"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    message = json.loads(log.read_text())
    assert message == json.loads(done.stderr.splitlines()[-1])
    assert message["reason"] == "ModelNotFound"
    done = subprocess.run(
        [*command, "--source", f"hf://{REPOSITORY}"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["event"] for line in done.stdout.splitlines()][-1] == "loaded"
    assert (target / "config.json").is_file()


def test_a_failure_does_not_wait_for_other_downloads(server: Any, target: Path, tmp_path: Path) -> None:
    server.slow_file, server.late_file = "model.safetensors", "tokenizer.json"
    server.gate.clear()
    server.digests["tokenizer.json"] = "0" * 64
    (log := tmp_path / "termination").touch()
    command = [sys.executable, "-m", "pagemill_engine.fetching", "--target", str(target), "--termination-log", str(log)]
    environment = {**os.environ, "HF_ENDPOINT": server.url, "HOME": str(tmp_path)}
    done = subprocess.run(
        [*command, "--source", f"hf://{REPOSITORY}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
    )
    assert not server.gate.is_set()
    assert server.slow_asked.is_set()
    assert done.returncode == 1
    assert json.loads(log.read_text())["reason"] == "ModelCorrupt"


def test_the_loader_does_not_import_torch() -> None:
    code = "import sys, pagemill_engine.fetching.load, pagemill_engine.fetching.__main__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


# -- selection ---------------------------------------------------------------------------------------------------------


def remote(*paths: str) -> list[RemoteFile]:
    return [RemoteFile(path, 10, hashlib.sha256(path.encode()).hexdigest()) for path in paths]


def selected(wanted: str | None, *paths: str) -> set[str]:
    return {file.path for file in select_files("`org/m`", wanted, remote(*paths))}


def test_folders_of_other_formats_are_skipped() -> None:
    paths = (
        "config.json",
        "model.safetensors.index.json",
        "model-1.safetensors",
        "onnx/config.json",
        "a/b.safetensors",
    )
    assert selected(None, *paths) == set(paths[:3])


def test_modules_in_folders_of_their_own_are_fetched_with_their_weights() -> None:
    modules = ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors")
    others = ("onnx/config.json", "2_Dense/pytorch_model.bin", "onnx/2_Dense/config.json")
    assert selected(None, "config.json", "modules.json", *modules, *others) == {"config.json", "modules.json", *modules}
    assert selected(None, "config.json", *modules) == {"config.json"}


def test_weights_in_the_other_layout_alone_are_downloaded_for_the_engine_to_judge() -> None:
    assert "consolidated.safetensors" in selected(None, "config.json", "consolidated.safetensors")


@pytest.mark.parametrize("path", ["../escape.gguf", "/etc/escape.gguf", "a/../../escape.gguf"])
def test_a_hub_cannot_write_outside_the_folder(path: str) -> None:
    with pytest.raises(FetchError, match="outside"):
        selected(path, path)


def test_a_repository_of_several_gguf_files_requires_a_file_name() -> None:
    with pytest.raises(FetchError, match=r"after a slash: m\.Q4\.gguf, m\.Q8\.gguf"):
        selected(None, "m.Q8.gguf", "m.Q4.gguf", "README.md")


def test_a_repository_of_one_gguf_file_requires_no_file_name() -> None:
    assert selected(None, "m.Q8.gguf", "README.md") == {"m.Q8.gguf"}
    parts = {f"m-0000{n}-of-00002.gguf" for n in (1, 2)}
    assert selected(None, *parts, "README.md") == parts


def test_a_failure_that_was_reported_is_tried_again_in_the_same_container(
    server: Any, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first run ends, so that its reason is seen; a refused credential needs a container with another one."""
    runs: list[list[str]] = []
    monkeypatch.setattr(program.os, "execv", lambda _path, argv: runs.append(argv))
    monkeypatch.setattr(program.time, "sleep", lambda _seconds: None)
    monkeypatch.delenv(settings.TRYING_SINCE, raising=False)
    arguments = ["--source", "hf://org/other", "--target", str(target)]
    assert main(arguments) == 1
    assert main(arguments) == 1
    assert runs == [], "a loader that no kubelet runs ends with its error"
    monkeypatch.setenv(settings.REPORTED, str(tmp_path / "reported"))
    assert main(arguments) == 1
    assert runs == []
    assert main(arguments) == 1
    assert [argv[1:] for argv in runs] == [["-m", "pagemill_engine.fetching", *arguments]]
    monkeypatch.setenv(settings.TRYING_SINCE, str(time.monotonic() - program.PATIENCE_S - 1))
    assert main(arguments) == 1
    monkeypatch.setenv(settings.TRYING_SINCE, str(time.monotonic()))
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    for _ in range(2):
        assert main(arguments) == 1
    assert len(runs) == 1
