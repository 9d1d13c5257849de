"""``python -m bench NAME``: finds the benchmark and hands it the rest of the command line."""

from __future__ import annotations

import importlib
import sys

BENCHES = {
    "cache": "the prefix cache's bookkeeping: microseconds a request beside its peers', and how costs grow with size",
    "cpu-kernels": "the native CPU kernels: matrix products and paged attention against the memory's speed",
    "engine": "what the engine does beside the model: microseconds a step by part, up to 256 sequences",
    "exact": "whether batch, cache, chunks or tree attention change a bit of any request's logits",
    "kernels": "the Triton kernels: timed on a GPU, or compiled for GPUs that are not there: registers, spills, shared memory",
    "local": "the serving benchmark against a radixkv server started for it",
    "memory": "KV waste, sequences that fit, table bytes and speed: blocks of 1 to 128 against contiguous reservation",
    "order": "hit tokens of each queue policy as a share of the optimum, when a burst exceeds the cache",
    "peers": "the serving workloads against radixkv and another server in turn",
    "pictures": "no benchmark: the README's pictures of the live page and of the capacity curve",
    "reporting": "what the request log, the live page and the attribution of misses take of a server's throughput",
    "tree-attention": "what a longer shared prefix costs a decode step, read once or by each sequence",
    "workers": "the hit rate of several workers beside one's",
    "serving": "an OpenAI-compatible server under a shared prefix, agent loops, and prompts that share nothing",
}


def main(argv: list[str]) -> int:
    """Run a benchmark; returns its exit code, or 2 if there is none of that name."""
    if argv and argv[0] in BENCHES:
        return importlib.import_module(f"bench.{argv[0].replace('-', '_')}").main(argv[1:]) or 0
    listing = "\n".join(f"  {name:<16}{line}" for name, line in BENCHES.items())
    usage = f"usage: python -m bench NAME [options]   (NAME --help shows the options)\n\n{listing}"
    if argv and argv[0] not in ("--help", "-h"):
        print(f"no benchmark is named {argv[0]!r}\n{usage}", file=sys.stderr)
        return 2
    print(usage)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
