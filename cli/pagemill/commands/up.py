"""`pagemill up`: serves the LLMDeployments of YAML files on this machine, as a cluster would."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagemill.command import CommandWithOptions

if TYPE_CHECKING:
    from pagemill.up.session import UpRequest


@dataclass(frozen=True)
class UpCommand(CommandWithOptions):
    """Serve LLMDeployment files on this machine.

    Ctrl-C, SIGTERM and the end of the terminal stop all processes; a second one stops them at once. A signal that is
    already ignored at the start stays ignored: SIGHUP under `nohup`, SIGINT in the background of a script (use
    SIGTERM).
    """

    files: Annotated[list[Path], typer.Option("--file", "-f", help="YAML file with LLMDeployments. May be repeated.")]
    port: Annotated[int, typer.Option(help="Port of the gateway; 0 picks a free one.")] = 8080
    host: Annotated[
        str, typer.Option(help="Address for the gateway to listen on; other than loopback needs --api-keys-file.")
    ] = "127.0.0.1"
    api_keys_file: Annotated[
        Path | None,
        typer.Option(
            envvar="PAGEMILL_API_KEYS_FILE",
            help="File with the SHA-256 and the limits of one API key per line; needed if other machines can connect.",
        ),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host name that clients use for the gateway, for example that of a proxy in front of it; needed only "
            "without API keys. May be repeated."
        ),
    ] = None
    gateway_workers: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            help="Number of gateway processes that serve clients; raise it if one CPU core is too little.",
        ),
    ] = 1
    batches_directory: Annotated[
        Path | None,
        typer.Option(help="Turn on the Files and Batches APIs, and store their files in this directory."),
    ] = None
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="Keep serving if no terminal is attached (default: exit once all replicas are ready).",
        ),
    ] = False
    dashboards: Annotated[
        bool,
        typer.Option(
            "--dashboards", help="Also run Prometheus, and Grafana if it is installed, with the dashboards of Pagemill."
        ),
    ] = False

    def run(self) -> None:
        import asyncio

        from pagemill.up.loading import load_files
        from pagemill.up.screen import make_screen, report_errors
        from pagemill.up.session import missing_for, run_up

        result = load_files(self.files)
        if result.findings:
            report_errors(str(finding) for finding in result.findings)
            raise typer.Exit(2)
        try:
            _check_keys(self.api_keys_file, self.host)
        except ValueError as error:
            report_errors([str(error)])
            raise typer.Exit(2) from None
        request = self.request()
        if missing := list(missing_for(result.loaded, request.settings)):
            report_errors(missing)
            raise typer.Exit(2)
        raise typer.Exit(asyncio.run(run_up(request, result.loaded, make_screen())))

    def request(self) -> UpRequest:
        """Return what the options ask for."""
        import psutil

        from pagemill.up.session import UpRequest
        from pagemill_operator.backends.local import LocalSettings
        from pagemill_servers.process.settings import logs_folder

        settings = LocalSettings(
            host=self.host,
            port=self.port,
            api_keys_file=self.api_keys_file,
            allowed_hosts=tuple(self.allowed_host or ()),
            batches_directory=self.batches_directory,
            gateway_workers=self.gateway_workers,
            logs_folder=logs_folder(),
        )
        return UpRequest(self.files, self.keep, psutil.Process().create_time(), settings, self.dashboards)


def _check_keys(path: Path | None, host: str) -> None:
    """Raise `ValueError` if the file of API keys is invalid, or missing although other machines can connect."""
    from pagemill_servers.keys.file import KeysFileError, check_keys_file

    if path is None:
        if host not in ("127.0.0.1", "::1", "localhost"):
            raise ValueError(
                f"--host {host} can be reached from other machines; name a file of API keys with --api-keys-file"
            )
        return
    try:
        check_keys_file(path)
    except KeysFileError as error:
        raise ValueError(f"--api-keys-file: {error}") from None
