"""Measures the cost of not sharing cached prompts between tenants, and what sharing would reveal.

Runs the embedded model. Tenants in turn send requests that begin with one system prompt; each ends in its own words.
Cost: prompt tokens computed and the time to the first token with `prefixCaching.scope` `tenant` and `deployment`, and
the gateway's CPU time for salt and hashes. Gain: the time to the first token of another tenant that sends a prompt
which one tenant has sent before, compared with a new prompt; if the two differ, the other tenant learns that it was
sent.
"""

from __future__ import annotations

import argparse
import time
from statistics import mean

from kv_sharing import make_prompts
from report import emit
from workload import MODEL

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.starting.factory import create_runner
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams
from pagemill_routing.brain.interface import HashScheme
from pagemill_routing.prompt_hashes import PromptHashes
from pagemill_servers.keys.caller import Caller
from pagemill_servers.keys.scope import cache_salt

SCOPES = ("deployment", "tenant")
SCHEME = HashScheme("weights", "float32", 16, 4)
HASHED_REQUESTS = 2000


def caller(number: int) -> Caller:
    return Caller(key_hash=f"{number:064x}", tenant=f"team-{number}")


class Engine:
    """An engine that answers one request at a time with a single token."""

    def __init__(self, max_model_len: int) -> None:
        config = EngineConfig(model=MODEL, num_kv_blocks=4096, max_model_len=max_model_len)
        self.core = EngineCore(config, create_runner(config, lambda phase, detail: None))
        self._num_asked = 0

    def ask(self, prompt: list[int], salt: str) -> tuple[float, int]:
        """Return the milliseconds to the first token, and the number of cached prompt tokens."""
        self._num_asked += 1
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        began_s, cached = time.perf_counter(), 0
        self.core.add(
            GenerateRequest(
                request_id=str(self._num_asked),
                model="bench",
                prompt_token_ids=prompt,
                sampling=sampling,
                cache_salt=salt,
            )
        )
        while self.core.has_work:
            cached += sum(out.num_cached_tokens for out in self.core.step().outputs)
        return (time.perf_counter() - began_s) * 1000, cached


def traffic(engine: Engine, scope: str, args: argparse.Namespace) -> tuple[float, float]:
    """Return the mean milliseconds to the first token, and the cached share of prompt tokens."""
    system, *own = make_prompts(1 + args.tenants * args.requests, args.prompt_tokens)
    times, cached, asked = [], 0, 0
    for number, words in enumerate(own):
        prompt = system + words[: args.own_tokens]
        took_ms, found = engine.ask(prompt, cache_salt(scope, scope, caller(number % args.tenants)))
        times.append(took_ms)
        cached, asked = cached + found, asked + len(prompt)
    return mean(times), cached / asked


def probe(engine: Engine, scope: str, args: argparse.Namespace) -> tuple[float, float]:
    """Return the mean milliseconds of another tenant for a prompt that was sent before, and for a new one."""
    asked, unknown = [], []
    for number, prompt in enumerate(make_prompts(2 * args.probes, args.prompt_tokens)):
        words = [number, *prompt[1:]]
        salts = [cache_salt(scope, "probe" + scope, caller(tenant)) for tenant in (1, 2)]
        if number % 2:
            engine.ask(words, salts[0])
            asked.append(engine.ask(words, salts[1])[0])
        else:
            unknown.append(engine.ask(words, salts[1])[0])
    return mean(asked), mean(unknown)


def hashing_us(scope: str, args: argparse.Namespace) -> float:
    """Return the gateway's CPU microseconds for a request's salt and hashes."""
    hashes = PromptHashes(65536)
    system, own = make_prompts(2, args.prompt_tokens)
    began_s = time.process_time()
    for number in range(HASHED_REQUESTS):
        salt = cache_salt(scope, "hashing", caller(number % args.tenants))
        hashes.hashes(SCHEME, salt, [*system, number, *own[: args.own_tokens]])
    return (time.process_time() - began_s) / HASHED_REQUESTS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--requests", type=int, default=4, help="number of requests of each tenant")
    parser.add_argument(
        "--prompt-tokens", type=int, default=256, help="number of tokens of the system prompt that all share"
    )
    parser.add_argument("--own-tokens", type=int, default=32)
    parser.add_argument("--probes", type=int, default=6)
    args = parser.parse_args()
    engine = Engine(2 * args.prompt_tokens)
    engine.ask(make_prompts(1, args.prompt_tokens)[0], "warm-up")
    rows = [
        [scope, *traffic(engine, scope, args), *probe(engine, scope, args), hashing_us(scope, args)] for scope in SCOPES
    ]
    engine.core.runner.close()
    columns = [
        "scope",
        "TTFT ms",
        "cached share",
        "stranger: asked before, ms",
        "never asked, ms",
        "gateway us a request",
    ]
    emit("tenant_isolation", columns, rows, {"rows": [dict(zip(columns, row, strict=True)) for row in rows]})


if __name__ == "__main__":
    main()
