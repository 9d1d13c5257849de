"""An OpenAI-compatible server under load: wall time, throughput, latencies and the cached share of prompts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import aiohttp
from cyclopts import App, CycloptsError, Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from bench.workloads import WORKLOADS, Workload

STDERR = Console(stderr=True)
Count = Annotated[int, Parameter(validator=Number(gte=1))]


@dataclass
class Sample:
    """One request, timed at the client.  Times are seconds since the run began."""

    lane: int
    turn: int
    start: float
    chunk_times: list[float] = field(default_factory=list)
    """When each chunk that carries text arrived."""
    end: float = math.nan
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    """As the server's usage tells it; None where it doesn't."""
    text: str = ""
    error: str | None = None


@dataclass
class Run:
    """One pass over a workload."""

    workload: str
    concurrency: int
    wall: float
    samples: list[Sample]

    def figures(self) -> dict[str, float | int | None]:
        """The row of the table.  Latencies in seconds, over requests that succeeded; None where there is nothing to tell."""
        good = [s for s in self.samples if s.error is None]
        first = [s.chunk_times[0] - s.start for s in good if s.chunk_times]
        gaps = [b - a for s in good for a, b in pairwise(s.chunk_times)]
        told = [s for s in good if s.cached_tokens is not None]
        prompt_tokens = sum(s.prompt_tokens for s in told)
        return {
            "wall_s": self.wall,
            "requests_per_s": len(good) / self.wall,
            "output_tokens_per_s": sum(s.completion_tokens for s in good) / self.wall,
            "ttft_p50": percentile(first, 50),
            "ttft_p90": percentile(first, 90),
            "itl_p50": percentile(gaps, 50),
            "itl_p99": percentile(gaps, 99),
            "cached_share": sum(s.cached_tokens or 0 for s in told) / prompt_tokens if prompt_tokens else None,
            "errors": len(self.samples) - len(good),
        }


def percentile(values: Sequence[float], q: float) -> float | None:
    """The smallest value that at least ``q`` per cent of the values don't exceed (nearest rank); None of none."""
    if not values:
        return None
    return sorted(values)[max(math.ceil(q / 100 * len(values)), 1) - 1]


async def run_workload(
    client: aiohttp.ClientSession, body: dict[str, Any], workload: Workload, concurrency: int, progress: Progress
) -> Run:
    """Ask every prompt of ``workload``, at most ``concurrency`` at a time; within a lane one after the other.

    ``body`` is what all requests have in common.
    """
    body = {**body, "max_tokens": workload.max_tokens, "stream": True, "stream_options": {"include_usage": True}}
    room = asyncio.Semaphore(concurrency)
    task = progress.add_task(workload.name, total=workload.num_requests)
    began = time.perf_counter()

    async def lane(index: int, prompts: Sequence[str]) -> list[Sample]:
        samples = []
        for turn, prompt in enumerate(prompts):
            async with room:
                sample = Sample(lane=index, turn=turn, start=time.perf_counter() - began)
                await _complete(client, {**body, "prompt": prompt}, sample, began)
                samples.append(sample)
                progress.advance(task)
        return samples

    lanes = await asyncio.gather(*(lane(index, prompts) for index, prompts in enumerate(workload.lanes)))
    wall = time.perf_counter() - began
    progress.remove_task(task)
    return Run(workload.name, concurrency, wall, [sample for samples in lanes for sample in samples])


async def _complete(client: aiohttp.ClientSession, body: dict[str, Any], sample: Sample, began: float) -> None:
    """Stream one completion into ``sample``; what goes wrong becomes its ``error``."""
    try:
        async with client.post("v1/completions", json=body) as response:
            if response.status != 200:
                sample.error = f"HTTP {response.status}: {(await response.text(errors='replace'))[:200]}"
                return
            async for line in response.content:
                if not line.startswith(b"data:") or (data := line[5:].strip()) == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    sample.error = str(event["error"])[:200]
                    return
                for choice in event.get("choices", ()):
                    if choice.get("text"):
                        sample.chunk_times.append(time.perf_counter() - began)
                        sample.text += choice["text"]
                if usage := event.get("usage"):
                    sample.prompt_tokens = usage["prompt_tokens"]
                    sample.completion_tokens = usage["completion_tokens"]
                    sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if not sample.completion_tokens:
            sample.error = "the stream ended without usage"
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    finally:
        sample.end = time.perf_counter() - began


async def ask(client: aiohttp.ClientSession, method: str, path: str, **arguments: Any) -> bytes:
    """The body of an answer.  Raises ``aiohttp.ClientError`` where there is none, or it is of an error."""
    async with client.request(method, path, raise_for_status=True, **arguments) as response:
        return await response.read()


@contextlib.asynccontextmanager
async def connect(url: str, timeout: float = 600.0) -> AsyncIterator[tuple[aiohttp.ClientSession, dict[str, Any]]]:
    """A client of the server at ``url``, and what all greedy requests to it have in common.

    On two cores a client's work is taken from the server's: aiohttp needs half of httpx's for a streamed token.
    """
    timeouts = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=timeout)
    base = url.rstrip("/").removesuffix("/v1") + "/"
    async with aiohttp.ClientSession(base, timeout=timeouts, connector=aiohttp.TCPConnector(limit=0)) as client:
        models = json.loads(await ask(client, "GET", "v1/models"))
        body = {"model": models["data"][0]["id"], "temperature": 0, "ignore_eos": True}
        async with client.post("v1/completions", json={**body, "prompt": "Hello", "max_tokens": 1}) as probe:
            if probe.status in (400, 422):
                del body["ignore_eos"]
        yield client, body


async def _bench(
    url: str, names: Sequence[str], concurrency: int, repeat: int, cold: bool, warmup: bool, timeout: float
) -> dict[str, Any]:
    async with connect(url, timeout) as (client, body):
        runs: list[Run] = []
        with Progress(console=STDERR, transient=True, disable=not sys.stderr.isatty()) as progress:
            for name in names:
                workload = WORKLOADS[name]()
                if warmup:
                    await run_workload(client, body, workload, concurrency, progress)
                for _ in range(repeat):
                    if cold:
                        await ask(client, "POST", "reset_prefix_cache")
                    runs.append(await run_workload(client, body, workload, concurrency, progress))
    return {"url": url, "model": body["model"], "runs": runs}


def print_table(model: str, runs: Sequence[Run], console: Console) -> None:
    """One line for each pass over a workload."""
    headings = ("wall s", "req/s", "out tok/s", "TTFT p50 ms", "p90", "ITL p50 ms", "p99", "cached", "errors")
    table = Table("workload", "pass", *(Column(heading, justify="right") for heading in headings), title=model)
    passes: Counter[str] = Counter()
    for run in runs:
        passes[run.workload] += 1
        f = run.figures()
        table.add_row(
            run.workload, str(passes[run.workload]),
            f"{f['wall_s']:.2f}", f"{f['requests_per_s']:.2f}", f"{f['output_tokens_per_s']:.1f}",
            *("-" if f[key] is None else f"{f[key] * 1000:.0f}" for key in ("ttft_p50", "ttft_p90", "itl_p50", "itl_p99")),  # type: ignore[operator]
            "-" if f["cached_share"] is None else f"{f['cached_share']:.1%}", f"{f['errors']}",
        )  # fmt: skip
    console.print(table)
    if error := next((s.error for run in runs for s in run.samples if s.error), None):
        console.print(f"first error: {error}", markup=False)


app = App(name="python -m bench serving", print_error=False, exit_on_error=False, result_action="return_value")


@app.default
def serving(
    *,
    url: str = "http://127.0.0.1:8000",
    workload: Literal["fewshot", "agent", "unique", "all"] = "all",
    concurrency: Count = 16,
    repeat: Count = 1,
    cold: Annotated[bool, Parameter(negative="")] = False,
    warmup: Annotated[bool, Parameter(negative="")] = False,
    timeout: float = 600.0,
    json: Path | None = None,
) -> int:
    """Time an OpenAI-compatible server over streamed, greedy `/v1/completions`.

    fewshot: 48 questions behind one prefix of about 1,590 tokens, 32 out. agent: 8 agents x 5 turns behind one system prompt of
    about 1,200 tokens, 48 out. unique: 32 prompts of about 410 tokens that share nothing, 64 out. Servers that refuse `ignore_eos`
    are asked without it and may write less.

    Parameters
    ----------
    url
        The server's base.
    workload
        What to send.
    concurrency
        Most requests in flight at once.
    repeat
        Passes over each workload; without --cold the second and later ones find the cache warm.
    cold
        Empty the server's prefix cache before each pass, through POST /reset_prefix_cache.
    warmup
        Run each workload once before, untimed.
    timeout
        Seconds without a byte after which a request counts as failed.
    json
        File to write figures and raw samples to.
    """
    names = list(WORKLOADS) if workload == "all" else [workload]
    result = asyncio.run(_bench(url, names, concurrency, repeat, cold, warmup, timeout))
    runs: list[Run] = result["runs"]
    print_table(result["model"], runs, Console(width=None if sys.stdout.isatty() else 120))
    if json is not None:
        _write_json(json, result)
    return 1 if any(sample.error for run in runs for sample in run.samples) else 0


def _write_json(path: Path, result: dict[str, Any]) -> None:
    runs = [{"figures": run.figures(), **asdict(run)} for run in result["runs"]]
    path.write_text(json.dumps({**result, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "runs": runs}, indent=1))


def main(argv: Sequence[str]) -> int:
    """Exit code: 0; 1 if the server or some request failed; 2 for bad input; 130 after Ctrl-C."""
    try:
        code: int = app(argv) or 0
    except KeyboardInterrupt:
        return 130
    except (CycloptsError, aiohttp.InvalidURL) as error:
        print(error, file=sys.stderr)
        return 2
    except (aiohttp.ClientError, TimeoutError, KeyError, IndexError, ValueError, OSError) as error:
        hint = " (can't empty its cache; leave out --cold)" if "reset_prefix_cache" in str(error) else ""
        print(f"{type(error).__name__}: {error}{hint}", file=sys.stderr)
        return 1
    return code
