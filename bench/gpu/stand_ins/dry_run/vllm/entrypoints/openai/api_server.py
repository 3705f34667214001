"""In place of vLLM's server in a dry run: as many tokens as are asked for, streamed at once."""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = [{"choices": [{"text": "#"}]}] * asked["max_tokens"]
        usage = {"choices": [], "usage": {"completion_tokens": asked["max_tokens"]}}
        self.send_response(200)
        self.end_headers()
        for event in [*tokens, usage]:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *values: Any) -> None:
        """Say nothing."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    ThreadingHTTPServer(("127.0.0.1", parser.parse_known_args()[0].port), Handler).serve_forever()
