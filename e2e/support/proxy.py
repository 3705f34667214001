"""An HTTP proxy that runs as a pod of a case: it opens tunnels (CONNECT) to the names that it is given, and logs each.

python proxy.py PORT NAME=HOST...        a tunnel to NAME goes to HOST, at the port that the client names
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys


async def serve(port: int, hosts: dict[str, str]) -> None:
    async def tunnel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method, target, _ = (await reader.readline()).decode().split(" ", 2)
        while (await reader.readline()).strip():
            pass
        name, _, to_port = target.rpartition(":")
        print(method, target, flush=True)
        if method != "CONNECT" or name not in hosts:
            writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
            writer.close()
            return
        far_reader, far_writer = await asyncio.open_connection(hosts[name], int(to_port))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))

    server = await asyncio.start_server(tunnel, None, port)
    await server.serve_forever()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
    except ConnectionError:
        pass  # the tunnel ends with either side
    finally:
        target.close()


if __name__ == "__main__":
    # A container's first process ignores the signal without an explicit handler.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    asyncio.run(serve(int(sys.argv[1]), dict(each.split("=", 1) for each in sys.argv[2:])))
