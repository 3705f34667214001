"""`pagemill up`: serves LLMDeployment files on this machine, the way a cluster would."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def up(
    files: Annotated[list[Path], typer.Option("--file", "-f", help="YAML file with LLMDeployments; may be repeated.")],
    port: Annotated[int, typer.Option(help="Port of the gateway; 0 takes a free one.")] = 8080,
    host: Annotated[str, typer.Option(help="Address of the gateway.")] = "127.0.0.1",
    api_keys_file: Annotated[
        Path | None,
        typer.Option(
            envvar="PAGEMILL_API_KEYS_FILE",
            help="File with the SHA-256 of each API key and its limits, one a line; needed for addresses other "
            "machines can reach.",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Name by which clients address the gateway, as behind a proxy; needed without keys."),
    ] = None,
    gateway_workers: Annotated[
        int, typer.Option(min=1, max=64, help="Processes of the gateway, for more than a core of traffic.")
    ] = 1,
    batches_directory: Annotated[
        Path | None, typer.Option(help="Take files and batches, and keep them in this directory.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Go on serving where no terminal is attached.")] = False,
    dashboards: Annotated[
        bool,
        typer.Option("--dashboards", help="Run Prometheus, and Grafana where it is installed, with all dashboards."),
    ] = False,
) -> None:
    """Serve LLMDeployment files on this machine."""
    import asyncio

    import psutil

    from pagemill.up.loading import load_files
    from pagemill.up.screen import make_screen, report_errors
    from pagemill.up.session import UpRequest, run_up
    from pagemill_operator.backends.local import LocalSettings

    result = load_files(files)
    if result.findings:
        report_errors(str(finding) for finding in result.findings)
        raise typer.Exit(2)
    try:
        _check_keys(api_keys_file, host)
    except ValueError as error:
        report_errors([str(error)])
        raise typer.Exit(2) from None
    settings = LocalSettings(
        host=host,
        port=port,
        api_keys_file=api_keys_file,
        allowed_hosts=tuple(allowed_host or ()),
        batches_directory=batches_directory,
        gateway_workers=gateway_workers,
    )
    request = UpRequest(files, keep, psutil.Process().create_time(), settings, dashboards)
    raise typer.Exit(asyncio.run(run_up(request, result.loaded, make_screen())))


def _check_keys(path: Path | None, host: str) -> None:
    """Raises `ValueError` for a file that cannot be used, and for none where other machines can connect."""
    from pagemill_protocol.keys.file import KeysFileError, check_keys_file

    if path is None:
        if host not in ("127.0.0.1", "::1", "localhost"):
            raise ValueError(
                f"--host {host} can be reached by other machines; name a file of API keys with --api-keys-file"
            )
        return
    try:
        check_keys_file(path)
    except KeysFileError as error:
        raise ValueError(f"--api-keys-file: {error}") from None
