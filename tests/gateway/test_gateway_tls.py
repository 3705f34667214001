"""HTTPS on the gateway's data port: answers, streams, and certificates that change."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from certificates import write_certificate as write_files
from waiting import WAIT_LIMIT_S, eventually

from pagemill_servers.tls.config import TLSConfig


def write_certificate(folder: Path) -> TLSConfig:
    cert_file, key_file = write_files(folder)
    return TLSConfig(cert_file=cert_file, key_file=key_file)


@asynccontextmanager
async def gateway(tmp_path: Path, tls: TLSConfig, catalog: Any, workers: int) -> AsyncIterator[str]:
    """Start a gateway and yield its URL."""
    settings = {"port": 0, "control_port": 0, "workers": workers, "catalog": catalog}
    settings["tls"] = {"cert_file": tls.cert_file, "key_file": tls.key_file}
    (path := tmp_path / "settings.json").write_text(json.dumps(settings))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pagemill_gateway", "--settings", str(path), stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        while (line := json.loads(await process.stderr.readline())).get("event") != "listening":
            pass
        yield line["url"]
    finally:
        process.terminate()
        await asyncio.wait_for(process.communicate(), WAIT_LIMIT_S)


async def certificate_of(url: str) -> str:
    host, port = url.removeprefix("https://").split(":")
    return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
async def test_the_data_port_speaks_https_with_certificates_that_may_change(
    tmp_path: Path, engines: Any, fake: Any, workers: int
) -> None:
    tls = write_certificate(tmp_path)
    catalog = msgspec.to_builtins(fake.catalog_of(engines[0]))
    body = {"model": "tiny", "prompt": "a", "stream": True}
    async with gateway(tmp_path, tls, catalog, workers) as url:
        assert url.startswith("https://")
        trusting = ssl.create_default_context(cafile=tls.cert_file)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as session:

            async def is_served() -> bool:
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    return response.status == 200 and (await response.read()).endswith(b"data: [DONE]\n\n")

            await eventually(is_served)
            with pytest.raises(aiohttp.ClientError):
                await session.get(url.replace("https", "http") + "/livez")
            write_certificate(tmp_path)
            new = await asyncio.to_thread(Path(tls.cert_file).read_text)

            async def is_new() -> bool:
                return await certificate_of(url) == new

            await eventually(is_new)
            assert await is_served(), "open connections must stay open"
