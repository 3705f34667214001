"""`pagemill gateway`: one OpenAI-compatible URL in front of engines that already run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
import typer

from pagemill.command import CommandWithOptions
from pagemill.secret_options import refuse_argument, token_in
from pagemill_gateway.config import EngineTLSConfig, GatewayConfig, SettingsError, load_config
from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_servers.keys.file import KeysFileError, check_keys_file
from pagemill_servers.tls.config import TLSConfig, tls_files


@dataclass(frozen=True)
class GatewayCommand(CommandWithOptions):
    """Run a gateway in front of engines that already run."""

    settings: Annotated[
        Path | None, typer.Option(help="JSON file with a GatewayConfig; the other options override its fields.")
    ] = None
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of an engine's data port, such as http://10.0.0.5:8000, and, after a comma, of its control port "
            "(default: the next port). May be repeated."
        ),
    ] = None
    model: Annotated[str, typer.Option(help="Name by which clients request the engines' model.")] = ""
    engine_token: Annotated[
        str,
        typer.Option(
            envvar="PAGEMILL_INTERNAL_TOKEN",
            callback=refuse_argument,
            help="Internal token of the engines; can be set in the environment only (default: the tokens that engines "
            "on this machine created).",
        ),
    ] = ""
    engine_token_file: Annotated[Path | None, typer.Option(help="File with the internal token of the engines.")] = None
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None
    port: Annotated[int | None, typer.Option(help="Port for clients.")] = None
    control_port: Annotated[int | None, typer.Option(help="Port for status, catalog and metrics.")] = None
    tls_cert_file: Annotated[
        Path | None,
        typer.Option(
            help="PEM file with the data port's certificate chain; turns on HTTPS. It is read again when it changes."
        ),
    ] = None
    tls_key_file: Annotated[Path | None, typer.Option(help="PEM file with the private key of --tls-cert-file.")] = None
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin whose web pages may call this gateway from a browser (CORS), or `*` for all. May be repeated."
        ),
    ] = None
    engine_ca_file: Annotated[
        Path | None,
        typer.Option(
            help="PEM file with the CA certificates for engines with https URLs (default: those of this machine)."
        ),
    ] = None
    engine_server_name: Annotated[
        str, typer.Option(help="Host name to expect in the engines' certificates (default: the host of each URL).")
    ] = ""
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host name that clients use for this gateway, for example that of a proxy in front of it; needed "
            "only without API keys. May be repeated."
        ),
    ] = None
    workers: Annotated[
        int | None,
        typer.Option(help="Number of processes that serve clients; raise it if one CPU core is too little."),
    ] = None
    max_connections: Annotated[
        int | None,
        typer.Option(help="Maximum number of open connections of clients; one client has at most half of them."),
    ] = None
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            help="Address or network of a proxy whose header X-Forwarded-For names the client, such as 10.0.0.0/8. "
            "May be repeated."
        ),
    ] = None
    api_keys_file: Annotated[
        Path | None,
        typer.Option(
            envvar="PAGEMILL_API_KEYS_FILE",
            help="File with the SHA-256 and the limits of one API key per line; needed if other machines can connect.",
        ),
    ] = None

    def run(self) -> None:
        try:
            config = self.config()
            from pagemill_gateway.__main__ import run

            run(config)
        except SettingsError as error:
            typer.echo(f"pagemill gateway: {error}", err=True)
            raise typer.Exit(1) from error

    def config(self) -> GatewayConfig:
        """Return the gateway's settings: the file's, changed by the other options. Raises `SettingsError`."""
        config = load_config(self.settings) if self.settings is not None else GatewayConfig()
        changes: dict[str, object] = {
            "host": self.host,
            "port": self.port,
            "control_port": self.control_port,
            "allowed_hosts": self.allowed_host,
            "allowed_origins": self.allowed_origin,
            "tls": _tls(self.tls_cert_file, self.tls_key_file),
            "engine_tls": _engine_tls(config.engine_tls, self.engine_ca_file, self.engine_server_name),
            "workers": self.workers,
            "max_connections": self.max_connections,
            "trusted_proxies": self.trusted_proxy,
        }
        if self.engine:
            token = _token(self.engine_token_file) if self.engine_token_file is not None else self.engine_token
            changes["catalog"] = _catalog(self.engine, self.model, token)
        else:
            self._refuse_without_engines()
        if self.api_keys_file is not None:
            changes["api_keys_file"] = _keys_file(self.api_keys_file)
        given = {name: value for name, value in changes.items() if value is not None}
        config = msgspec.structs.replace(config, **given).checked()
        if not config.catalog.models:
            raise SettingsError("engine: there is no engine. Pass --engine URL and --model NAME, or --settings FILE.")
        return config

    def _refuse_without_engines(self) -> None:
        given = {"--model": self.model or None, "--engine-token-file": self.engine_token_file}
        for option, value in given.items():
            if value is not None:
                raise SettingsError(
                    f"{option} {value}: concerns the engines of --engine. Pass --engine URL, or remove it."
                )


def _tls(cert_file: Path | None, key_file: Path | None) -> TLSConfig | None:
    try:
        return tls_files(cert_file, key_file)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _engine_tls(before: EngineTLSConfig, ca_file: Path | None, server_name: str) -> EngineTLSConfig:
    return msgspec.structs.replace(
        before,
        ca_file=before.ca_file if ca_file is None else str(ca_file),
        server_name=server_name or before.server_name,
    )


def _token(path: Path) -> str:
    try:
        return token_in(path)
    except ValueError as error:
        raise SettingsError(f"engine_token_file: {error}") from error


def _catalog(urls: list[str], model: str, token: str) -> Catalog:
    if not model:
        raise SettingsError("model: --engine needs --model NAME, the name by which clients request the model.")
    endpoints = [_endpoint(index, url) for index, url in enumerate(urls)]
    served = CatalogModel(deployment="cli", name=model, takes_names=True, engine_token=token, endpoints=endpoints)
    return Catalog(models=[served])


def _endpoint(index: int, url: str) -> Endpoint:
    data_url, _, control_url = url.partition(",")
    return Endpoint(
        id=f"engine-{index}",
        data_url=data_url.rstrip("/"),
        control_url=(control_url or _next_port(data_url)).rstrip("/"),
    )


def _next_port(url: str) -> str:
    try:
        parts = urlsplit(url)
        if parts.hostname and parts.port:
            host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
            return f"{parts.scheme}://{host}:{parts.port + 1}"
    except ValueError:
        pass
    raise SettingsError(f"engine: {url!r} must be like http://127.0.0.1:8000 or http://HOST:8000,http://HOST:8001.")


def _keys_file(path: Path) -> str:
    try:
        check_keys_file(path)
    except KeysFileError as error:
        raise SettingsError(f"api_keys_file: {error}") from error
    return str(path)
