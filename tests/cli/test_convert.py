"""`pagemill convert`: the document is what the operator plans, and nothing of the original is dropped in silence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pagemill.main import app
from pagemill.up.loading import load_files

KSERVE = """
apiVersion: serving.kserve.io/v1alpha1
kind: LLMInferenceService
metadata: {name: qwen, namespace: team}
spec:
  model:
    uri: hf://Qwen/Qwen3-32B
    name: Qwen/Qwen3-32B
    lora:
      maxRank: 32
      adapters: [{name: support, uri: "hf://acme/support"}]
  replicas: 3
  parallelism: {tensor: 4, data: 2}
  router: {route: {}, gateway: {}, scheduler: {}}
  template:
    nodeSelector: {pool: gpu}
    containers:
      - name: main
        env:
          - {name: VLLM_ADDITIONAL_ARGS, value: "--max-model-len 8192 --gpu-memory-utilization 0.95"}
          - name: HF_TOKEN
            valueFrom: {secretKeyRef: {name: hub, key: token}}
          - {name: TZ, value: UTC}
          - {name: VLLM_LOGGING_LEVEL, value: DEBUG}
        resources:
          limits: {nvidia.com/gpu: "4", cpu: "8", memory: 64Gi}
"""
KUBEAI = """
apiVersion: kubeai.org/v1
kind: Model
metadata: {name: llama-8b}
spec:
  features: [TextGeneration]
  url: hf://meta-llama/Llama-3.1-8B-Instruct
  engine: VLLM
  resourceProfile: nvidia-gpu-l4:2
  args: ["--max-model-len=16384", "--enable-prefix-caching", "--max-num-seqs 64"]
  env: {HF_HUB_OFFLINE: "1"}
  minReplicas: 0
  maxReplicas: 5
  targetRequests: 32
  scaleDownDelaySeconds: 60
  loadBalancing: {strategy: PrefixHash}
  adapters: [{name: fr, url: "hf://acme/french"}]
"""


def converted(what: str, tmp_path: Path) -> tuple[dict[str, Any], str]:
    """Return the document and the notes, which name what the operator refuses."""
    done = CliRunner().invoke(app, ["convert", what])
    assert done.exit_code == 0, done.stderr
    file = tmp_path / "converted.yaml"
    file.write_text(done.stdout)
    for finding in load_files([file], backend="kubernetes").findings:
        assert f": {finding.field}: {finding.message} (The operator refuses" in done.stderr
    for line in done.stderr.splitlines():
        assert line.partition(": ")[2] in done.stdout, "each note is a comment of the document too"
    return yaml.safe_load(done.stdout), done.stderr


def test_a_command_of_vllm_becomes_fields_and_notes(tmp_path: Path) -> None:
    command = (
        "vllm serve Qwen/Qwen3-8B --served-model-name qwen qwen3 --max-model-len 32768 --max-num-seqs=128 -tp 2 "
        "--kv-cache-dtype fp8_e4m3 --enable-prefix-caching --tool-call-parser qwen3_coder --enable-auto-tool-choice "
        "--enable-lora --max-loras 4 --max-lora-rank 64 --lora-modules sql=acme/sql-lora --seed 3 --port 9000 "
        "--gpu-memory-utilization 0.9 --enable-expert-parallel --no-such-option a b "
        """--speculative-config '{"method": "eagle3", "model": "acme/head", "num_speculative_tokens": 3}'"""
    )
    document, notes = converted(command, tmp_path)
    assert document["metadata"] == {"name": "qwen"}
    assert document["spec"] == {
        "model": {
            "source": "hf://Qwen/Qwen3-8B",
            "name": "qwen",
            "aliases": ["qwen3"],
            "adapters": [{"name": "sql", "source": "hf://acme/sql-lora"}],
            "toolCallParser": "qwen3-coder",
        },
        "engine": {
            "maxModelLen": 32768,
            "maxNumSeqs": 128,
            "tensorParallel": 2,
            "kvCacheDtype": "fp8",
            "prefixCaching": {"enabled": True},
            "lora": {"maxLoras": 4, "maxLoraRank": 64},
            "speculative": {"method": "eagle3", "source": "hf://acme/head", "numTokens": 3},
            "extraArgs": ["--seed=3"],
        },
        "resources": {"gpus": 2},
    }
    assert "--port 9000: Clients use the gateway's port" in notes
    assert "--gpu-memory-utilization 0.9: " in notes
    assert "--enable-expert-parallel" in notes
    assert "--no-such-option a b: Is no option" in notes
    assert "--enable-lora: Adapters are served without it" in notes


def test_a_service_of_kserve_keeps_model_adapters_placement_and_credentials(tmp_path: Path) -> None:
    file = tmp_path / "kserve.yaml"
    file.write_text(KSERVE)
    document, notes = converted(str(file), tmp_path)
    spec = document["spec"]
    assert document["metadata"] == {"name": "qwen", "namespace": "team"}
    assert spec["model"] == {
        "source": "hf://Qwen/Qwen3-32B",
        "name": "Qwen/Qwen3-32B",
        "adapters": [{"name": "support", "source": "hf://acme/support"}],
        "credentialsSecretRef": {"name": "hub", "key": "token"},
    }
    assert (spec["engine"]["tensorParallel"], spec["engine"]["maxModelLen"], spec["replicas"]) == (4, 8192, 3)
    assert spec["engine"]["lora"] == {"maxLoraRank": 32}
    assert spec["engine"]["env"] == [{"name": "TZ", "value": "UTC"}]
    assert spec["resources"] == {"cpu": "8", "memory": "64Gi", "gpus": 4}
    assert spec["template"]["spec"] == {"nodeSelector": {"pool": "gpu"}}
    for what in ("--gpu-memory-utilization 0.95", "parallelism.data", "router", "env VLLM_LOGGING_LEVEL"):
        assert f"qwen: {what}: " in notes


def test_a_model_of_kubeai_keeps_its_scaling(tmp_path: Path) -> None:
    file = tmp_path / "kubeai.yaml"
    file.write_text(KUBEAI)
    document, notes = converted(str(file), tmp_path)
    spec = document["spec"]
    assert spec["model"]["source"] == "hf://meta-llama/Llama-3.1-8B-Instruct"
    assert spec["model"]["name"] == "llama-8b"
    assert spec["model"]["adapters"] == [{"name": "fr", "source": "hf://acme/french"}]
    assert spec["engine"]["env"] == [{"name": "HF_HUB_OFFLINE", "value": "1"}]
    assert (spec["engine"]["maxModelLen"], spec["engine"]["maxNumSeqs"]) == (16384, 64)
    assert spec["autoscaling"] == {"minReplicas": 0, "maxReplicas": 5, "scaleToZeroAfter": "60s"}
    assert spec["resources"] == {"gpus": 2}
    for what in ("targetRequests", "loadBalancing", "features", "resourceProfile nvidia-gpu-l4:2"):
        assert f"llama-8b: {what}: " in notes


def test_several_resources_of_a_file_become_several_documents(tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    file.write_text(f"{KSERVE}---{KUBEAI}")
    done = CliRunner().invoke(app, ["convert", str(file)])
    assert [each["metadata"]["name"] for each in yaml.safe_load_all(done.stdout)] == ["qwen", "llama-8b"]


def test_a_command_is_read_from_standard_input_with_its_line_breaks(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["convert", "-"], input="python -m vllm.entrypoints.openai.api_server \\\n --model a/b"
    )
    assert yaml.safe_load(done.stdout)["spec"] == {"model": {"source": "hf://a/b"}, "resources": {"gpus": 1}}


def test_what_the_operator_would_refuse_is_noted(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["convert", "vllm serve a/b --block-size 24"])
    assert done.exit_code == 0
    assert "spec.engine.blockSize: " in done.stderr
    assert "The operator refuses the result until then." in done.stderr


def test_the_command_of_the_page_is_converted(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "come-from-other-platforms.md"
    (command,) = re.findall(r"^\.venv/bin/pagemill convert '([^']*)' > smollm2.yaml$", page.read_text(), re.MULTILINE)
    document, _ = converted(command, tmp_path)
    assert document["spec"]["engine"]["maxModelLen"] == 2048


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no-such-file.yaml", "no-such-file.yaml: cannot be read"),
        ("vllm serve --port 3", "The command names no model"),
        ("vllm serve 'a", "cannot be split into words"),
        ("apiVersion: v1\nkind: Pod\n", "kind Pod of v1 cannot be converted"),
        ("apiVersion: [\n", "The file is not YAML"),
        ("apiVersion: kubeai.org/v1\nkind: Model\nmetadata: {name: a}\n", "a: spec.url is missing"),
        ("apiVersion: serving.kserve.io/v1alpha1\nkind: LLMInferenceService\n", "spec.model.uri is missing"),
    ],
)
def test_what_cannot_be_read_is_refused(what: str, words: str) -> None:
    done = CliRunner().invoke(app, ["convert", what])
    assert (done.exit_code, words in done.stderr) == (2, True), done.stderr
