"""Measures TTFT and tokens/s of every routing policy: three replicas on CPU, conversations of 16 turns.

`pagemill up` starts anew with the embedded model for each policy, so that each begins with empty caches. A client has
one conversation: it waits for an answer, thinks, and sends the whole conversation with the next question. Each KV cache
holds about half of all conversations, so that the choice of the replica matters. Engines, gateway and clients share the
machine's cores. Exits with 1 if an answer failed.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

from gateway_routing import figures
from local_replicas import serving
from report import emit, progress
from routers.catalogue import MODEL
from routers.chats import Chats, words
from workload import MODEL as SOURCE

from pagemill_routing.policies.cost import CostPolicy
from pagemill_routing.policies.registry import AUTO, BUILT_IN
from pagemill_simulator.conversations import Conversation, Turn

POLICIES = (AUTO, *(each.name for each in BUILT_IN if each is not CostPolicy))
NUM_REPLICAS = 3
SYSTEM_TOKENS = 64
QUESTION_TOKENS = (16, 48)
PAUSE_S = (0.1, 0.6)
DEPLOYMENT = """\
apiVersion: pagemill.dev/v1beta1
kind: LLMDeployment
metadata:
  name: {name}
spec:
  model: {{source: "{source}", name: {name}}}
  engine: {{maxModelLen: 1408, maxNumSeqs: 8, kvCacheMemory: {cache}}}
  resources: {{gpus: 0}}
  replicas: {replicas}
  routing: {{policy: {policy}}}
"""


def main() -> None:
    args = _arguments()
    vocabulary = words()
    rounds: dict[str, list[dict[str, Any]]] = {policy: [] for policy in args.policies}
    for number in range(args.rounds):
        for policy in args.policies:
            values = measure(
                policy, conversations(args.conversations, args.turns, args.tokens, number), args, vocabulary
            )
            rounds[policy].append(values)
            progress(f"{policy}, round {number}: {values}")
    report(rounds)


def measure(
    policy: str, traffic: list[Conversation], args: argparse.Namespace, vocabulary: list[str]
) -> dict[str, Any]:
    document = DEPLOYMENT.format(name=MODEL, source=SOURCE, cache=args.cache, replicas=NUM_REPLICAS, policy=policy)
    with serving(document, NUM_REPLICAS) as (_, url):
        start = time.perf_counter()
        reported = Chats([url], vocabulary, 1.0).run(traffic, seed=1)
        took_s = time.perf_counter() - start
    num_tokens = sum(turn.num_output_tokens for each in traffic for turn in each.turns)
    return {**figures(reported), "seconds": took_s, "tokens_per_s": num_tokens / took_s if not reported.faults else 0.0}


def conversations(count: int, num_turns: int, num_tokens: int, seed: int) -> list[Conversation]:
    """Return conversations that share a system prompt and begin at about the same time."""
    draw = random.Random(seed)

    def said(num: int) -> list[int]:
        return [draw.randrange(2**16) for _ in range(num)]

    system = said(SYSTEM_TOKENS)
    return [
        Conversation(
            draw.uniform(*PAUSE_S),
            system,
            [Turn(said(draw.randint(*QUESTION_TOKENS)), num_tokens, draw.uniform(*PAUSE_S)) for _ in range(num_turns)],
        )
        for _ in range(count)
    ]


def middle(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the round with the median mean TTFT, among those without a failure if there are any."""
    good = [each for each in rounds if not each["num_failed"]] or rounds
    return sorted(good, key=lambda each: each["ttft_mean_ms"])[(len(good) - 1) // 2]


def report(rounds: dict[str, list[dict[str, Any]]]) -> None:
    columns = ["policy", "mean TTFT ms", "p50", "p99", "ms/token", "tokens/s", "from caches", "failed"]
    keys = ("ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms", "tpot_mean_ms", "tokens_per_s", "cached_share")
    found = {policy: middle(each) for policy, each in rounds.items()}
    rows = [[policy, *(values[key] for key in keys), values["num_failed"]] for policy, values in found.items()]
    emit("real_routing", columns, rows, {"policies": found, "rounds": rounds})
    failed = [policy for policy, each in rounds.items() if any(values["num_failed"] for values in each)]
    if failed:
        raise SystemExit(f"answers failed with {', '.join(failed)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16, help="number of tokens of every answer")
    parser.add_argument("--cache", default="64Mi", help="KV cache of a replica, as in `engine.kvCacheMemory`")
    parser.add_argument("--rounds", type=int, default=1, help="number of rounds over all policies; the median counts")
    return parser.parse_args()


if __name__ == "__main__":
    main()
