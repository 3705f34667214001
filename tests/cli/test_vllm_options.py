"""`pagemill serve` accepts the options of `vllm serve` by their names; unsupported ones get a note or a remedy."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pagemill.main import LazyCommand, app
from pagemill.vllm_options import is_flag, rewritten
from pagemill_engine.vllm_arguments import ARGUMENTS, lora_module


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("MODEL --served-model-name a b --port 1", "MODEL --served-name a --served-name b --port 1"),
        ("MODEL --served-model-name=a", "MODEL --served-name a"),
        ("--dtype half MODEL", "--dtype float16 MODEL"),
        ("--dtype=bfloat16", "--dtype bfloat16"),
        ("--max_model_len 512 --max-num-seqs=4", "--max-model-len 512 --max-num-seqs=4"),
        ("--enable-prefix-caching --enforce-eager MODEL", "--prefix-caching --no-cuda-graphs MODEL"),
        ("--no-enable-prefix-caching", "--no-prefix-caching"),
        ("--scheduling-policy priority", "--policy priority"),
        ("--tool-call-parser llama3_json", "--tool-call-parser llama3-json"),
        ("--reasoning-parser deepseek_r1", "--reasoning-parser think"),
        ("--kv-cache-memory-bytes 1048576", "--kv-cache-memory 1048576"),
        ("--quantization awq", "--quantization none"),
        ("--ssl-keyfile k.pem --ssl-certfile=c.pem", "--tls-key-file k.pem --tls-cert-file c.pem"),
        ("-tp 2 -pp=3", "--tensor-parallel-size 2 --pipeline-parallel-size=3"),
        ("MODEL --host 0.0.0.0 --seed -1 -- --dtype half", "MODEL --host 0.0.0.0 --seed -1 -- --dtype half"),
    ],
)
def test_options_are_translated_to_those_of_pagemill(given: str, ours: str) -> None:
    notes: list[str] = []
    assert rewritten(given.split(), notes.append) == ours.split()
    assert notes == []


def test_adapters_are_given_as_to_vllm() -> None:
    given = ["MODEL", "--enable-lora", "--lora-modules", "a=/a", '{"name": "b", "path": "/b"}', "--max-loras", "4"]
    assert rewritten([*given, "--max_cpu_loras=8"], lambda line: None) == [
        "MODEL", "--enable-lora", "--lora-modules", "a=/a", "--lora-modules", '{"name": "b", "path": "/b"}',
        "--max-loras", "4", "--max-cpu-loras=8",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("name", "it lacks a name or a path"),
        ("=path", "it lacks a name or a path"),
        ('{"name": "a"}', "it lacks a name or a path"),
        ('{"name": "a", "path": "b", "rank": 8}', "unknown key `rank`"),
        ('{"name": "a"', "Expecting"),
    ],
)
def test_an_adapter_that_cannot_be_read_is_refused_with_its_forms(given: str, why: str) -> None:
    with pytest.raises(ValueError, match="Write NAME=PATH") as refused:
        lora_module(given)
    assert why in str(refused.value)


def test_options_without_effect_are_accepted_with_a_note_each() -> None:
    notes: list[str] = []
    given = "--trust-remote-code MODEL --data-parallel-size 1 --gpu-memory-utilization 0.9 --swap-space=4 "
    given += "--disable-log-requests --enable-auto-tool-choice --uvicorn-log-level info"
    assert rewritten(given.split(), notes.append) == ["MODEL"]
    assert len(notes) == 7
    assert "--gpu-memory-utilization 0.9 has no effect. The KV cache takes" in notes[2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--data-parallel-size 2", "--data-parallel-size 2 is not supported. One engine computes a model"),
        ("--no-enable-chunked-prefill", "--no-enable-chunked-prefill is not supported. Long prompts"),
        ("--task embed", "--task embed is not supported. The model's files say whether it"),
        ("--num-gpu-blocks-override 9", "--kv-cache-memory sets it"),
        ("--api-key", "--api-key needs a key"),
    ],
)
def test_unsupported_options_are_refused_with_the_remedy(given: str, message: str) -> None:
    with pytest.raises(typer.BadParameter) as refused:
        rewritten(given.split(), lambda line: None)
    assert message in str(refused.value)


def test_a_key_is_translated_to_a_private_file_with_its_hash() -> None:
    notes: list[str] = []
    option, path = rewritten(["--api-key", "secret"], notes.append)
    assert option == "--api-keys-file"
    assert Path(path).read_text().split()[0] == hashlib.sha256(b"secret").hexdigest()
    assert Path(path).stat().st_mode & 0o077 == 0
    assert "command-line arguments" in notes[0]


def test_every_option_in_the_table_is_an_option_of_serve() -> None:
    command = LazyCommand("serve", help="", callback=lambda: None).load()
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    assert {f"--{each.option}" for each in ARGUMENTS.values() if each.option} <= known
    assert is_flag(ARGUMENTS["trust_remote_code"])
    assert not is_flag(ARGUMENTS["tokenizer"])


def test_a_refusal_is_shown_like_other_errors_of_the_command_line() -> None:
    done = CliRunner().invoke(app, ["serve", "model", "--data-parallel-size", "2"], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert "--data-parallel-size 2 is not supported" in done.stderr


def test_more_processes_than_there_can_be_are_refused_before_any_starts() -> None:
    done = CliRunner().invoke(app, ["serve", "model", "-tp", "33", "-pp", "2"], env={"COLUMNS": "200"})
    assert done.exit_code == 1
    assert "must be at most 64 processes, got 33 x 2" in done.stderr


def test_for_a_mistyped_command_a_similar_one_is_suggested() -> None:
    done = CliRunner().invoke(app, ["serv"])
    assert done.exit_code == 2
    assert "No such command 'serv'. Did you mean 'serve'?" in done.stderr
