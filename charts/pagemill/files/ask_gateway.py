"""The program of `helm test`: it asks the gateway for its models, and a model for one answer.

It uses the standard library only, because it runs in the gateway's image as `python -c`. Without a key it checks that
the gateway refuses it. A model without a ready engine is reported but is no failure, unless `--model` names it.
"""

from __future__ import annotations

import argparse
import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from typing import Any, NamedTuple

PAUSE_S = 2.0


class Answer(NamedTuple):
    status: int
    body: dict[str, Any]


class Gateway:
    def __init__(self, url: str, key: str, timeout_s: float, certificate: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._tls = _trusting(certificate) if certificate else None
        self._key = key
        self._deadline = time.monotonic() + timeout_s

    def left_s(self) -> float:
        return max(1.0, self._deadline - time.monotonic())

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Answer:
        """Send a request and return the answer; repeat it on connection errors until the time is up."""
        while True:
            try:
                return self._ask(path, body)
            except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
                if time.monotonic() > self._deadline:
                    raise SystemExit(f"FAILED: {self._url}{path} does not answer: {error}") from error
                time.sleep(PAUSE_S)

    def _ask(self, path: str, body: dict[str, Any] | None) -> Answer:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self._url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.left_s(), context=self._tls) as response:
                return Answer(response.status, json.load(response))
        except urllib.error.HTTPError as error:
            return Answer(error.code, _json(error.read()))


def _trusting(certificate: str) -> ssl.SSLContext:
    """Return a context that trusts only the gateway's own certificate, whatever names it has: the Service's may be
    missing.
    """
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _json(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def message(answer: Answer) -> str:
    error = answer.body.get("error")
    return str(error.get("message")) if isinstance(error, dict) else "no OpenAI error"


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def check_refusal(gateway: Gateway) -> None:
    """Check that the gateway refuses a request without a key with an OpenAI error."""
    answer = gateway.ask("/v1/models")
    if answer.status != 401 or "error" not in answer.body:
        raise SystemExit(f"FAILED: /v1/models without a key answered {answer.status}, 401 was expected")
    say("ok: the gateway answers, and refuses a request without an API key")
    say("set tests.apiKeySecret to have a model asked too")


def chat(gateway: Gateway, model: str) -> Answer:
    question = {
        "model": model,
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 4,
        "temperature": 0,
    }
    return gateway.ask("/v1/chat/completions", question)


def check_models(gateway: Gateway, wanted: str) -> None:
    listed = gateway.ask("/v1/models")
    if listed.status != 200:
        raise SystemExit(f"FAILED: /v1/models answered {listed.status}: {message(listed)}")
    models = [str(card["id"]) for card in listed.body["data"]]
    say(f"ok: the gateway lists {len(models)} models: {', '.join(models[:20])}")
    if wanted and wanted not in models:
        raise SystemExit(f"FAILED: {wanted!r} is not among them")
    for model in [wanted] if wanted else models:
        answer = chat(gateway, model)
        if answer.status == 200:
            say(f"ok: {model} answered {answer.body['choices'][0]['message']['content']!r}")
            return
        if wanted or answer.status not in (429, 503):
            raise SystemExit(f"FAILED: {model} answered {answer.status}: {message(answer)}")
        say(f"{model} has no engine that is ready: {message(answer)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--timeout-s", type=float, default=120.0)
    parser.add_argument("--model", default="")
    parser.add_argument("--certificate")
    parser.add_argument("--anonymous", action="store_true")
    arguments = parser.parse_args()
    key = os.environ.get("PAGEMILL_API_KEY", "")
    gateway = Gateway(arguments.url, key, arguments.timeout_s, arguments.certificate)
    if key or arguments.anonymous:
        check_models(gateway, arguments.model)
    else:
        check_refusal(gateway)


if __name__ == "__main__":
    main()
