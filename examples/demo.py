"""Starts a server, runs a few-shot batch, an agent loop and a parallel sample against it, and shows what the prefix cache saved."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from openai import APIError, AsyncOpenAI
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from radixkv import AsyncClient, SamplingParams
from radixkv.model.loader import resolve_model
from radixkv.model.tokenizer import load_tokenizer
from radixkv.report.report import fetch_report
from radixkv.server.errors import ServerError

MODEL = "smollm2-135m"
BLOCK_SIZE = 16
PROBLEMS = json.loads((Path(__file__).parent / "word_problems.json").read_text())
FEW_SHOT_PREFIX = "Solve each problem step by step and end with the result after four number signs.\n\n" + "".join(
    f"Question: {worked['question']}\nAnswer: {worked['answer']}\n\n" for worked in PROBLEMS["worked"]
)
CONSOLE = Console(width=None if sys.stdout.isatty() else 120)
COUNTERS = ("requests", "prompt_tokens", "hit_tokens", "computed_tokens")
T = TypeVar("T")


class DemoFailed(Exception):
    """Something did not come out as this demo says it does."""


@dataclass
class Part:
    """What one part of the demo got back, and by how much it moved the engine's counters."""

    name: str
    seconds: float
    texts: list[str]
    requests: int
    prompt_tokens: int
    hit_tokens: int
    computed_tokens: int

    @property
    def hit_share(self) -> float:
        return self.hit_tokens / self.prompt_tokens


def run_part(name: str, url: str, work: Coroutine[None, None, list[str]]) -> Part:
    """Run one part on its own, and read the engine's counters around it."""
    before = fetch_report(url)
    began = time.perf_counter()
    texts = asyncio.run(work)
    seconds = time.perf_counter() - began
    after = fetch_report(url)
    return Part(
        name,
        seconds,
        texts,
        after.requests - before.requests,
        after.prompt_tokens - before.prompt_tokens,
        after.hit_tokens - before.hit_tokens,
        after.prefill_tokens_computed - before.prefill_tokens_computed,
    )


# -- the server -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(folder: Path, *flags: str) -> Iterator[tuple[str, str]]:
    """Run ``radixkv serve`` on a free port; gives its HTTP base and ZeroMQ endpoint, and leaves nothing running."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, zmq, log = f"http://127.0.0.1:{port}", f"ipc://{folder}/zmq", folder / "server.log"
    command = [sys.executable, "-P", "-m", "radixkv.cli", "serve", "--model", MODEL, "--port", str(port), "--zmq", zmq]
    command += ["--block-size", str(BLOCK_SIZE), "--kv-cache-tokens", "32768", *flags]
    # Its own session: Ctrl-C reaches only us, and whatever the server started can be signalled as one group.
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True) as server:
        try:
            CONSOLE.print(f"[dim]$ radixkv {' '.join(command[command.index('serve') :])}[/]", soft_wrap=True)
            with CONSOLE.status("waiting for it (the very first start fetches the model, about 100 MB)"):
                _wait_until_healthy(url, server, log)
            yield url, zmq
        finally:
            _stop(server)


def _wait_until_healthy(url: str, server: subprocess.Popen[bytes], log: Path, limit: float = 300.0) -> None:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise DemoFailed(f"the server ended with exit code {server.returncode}:\n{log.read_text()[-3000:]}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):  # noqa: S310
            return
        time.sleep(0.2)
    raise DemoFailed(f"the server was not healthy after {limit:.0f} s:\n{log.read_text()[-3000:]}")


def _stop(server: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        server.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout=20)
        os.killpg(server.pid, signal.SIGKILL)  # whoever of the group has not gone by itself


# -- few-shot: many questions behind one prefix ---------------------------------------------------------------


def few_shot_prompt(question: str) -> str:
    return f"{FEW_SHOT_PREFIX}Question: {question}\nAnswer:"


async def few_shot(url: str, questions: Sequence[str]) -> list[str]:
    """Ask all questions at once over HTTP."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=0) as client:
        calls = [
            client.completions.create(model=MODEL, prompt=few_shot_prompt(question), max_tokens=40, temperature=0, stop="\n\n")
            for question in questions
        ]
        answers = await _with_progress("few-shot questions", calls)
    return [answer.choices[0].text for answer in answers]


# -- agents: a long system prompt, and histories that grow ----------------------------------------------------

STOCK = {"pencils": (240, 0.35), "candles": (36, 2.10), "notebooks": (0, 3.95), "marbles": (1200, 0.08), "kites": (9, 14.50)}
DISTANCES_KM = {"Lisbon": 1870, "Oslo": 1270, "Graz": 420, "Tallinn": 1540}


def check_stock(item: str) -> dict[str, object]:
    """Count the pieces of an item in the warehouse and say what one costs in dollars."""
    count, price = STOCK[item]
    return {"item": item, "in_stock": count, "price": price}


def delivery_days(city: str) -> dict[str, object]:
    """Estimate how many days a parcel to a city takes, one day for packing and one for every 400 kilometres."""
    return {"city": city, "days": 1 + -(-DISTANCES_KM[city] // 400)}


def quote(item: str, count: int) -> dict[str, object]:
    """Work out what a number of pieces costs in dollars, with ten per cent off from 100 pieces on."""
    price = STOCK[item][1] * count * (0.9 if count >= 100 else 1.0)
    return {"item": item, "count": count, "total": round(price, 2)}


def reserve(item: str, count: int) -> dict[str, object]:
    """Put pieces aside for a customer, or say how many are missing if there are not enough of them."""
    missing = max(count - STOCK[item][0], 0)
    return {"item": item, "reserved": 0 if missing else count, "missing": missing}


TOOLS: tuple[Callable[..., dict[str, object]], ...] = (check_stock, delivery_days, quote, reserve)
SYSTEM_PROMPT = "\n".join(
    [
        "You are the order assistant of a small shop that sells by post. Help the customer in one or two short sentences.",
        "You have these tools. Their results are sent to you in messages that begin with 'Tool result'.",
        "",
        *(f"- {tool.__name__}({', '.join(tool.__annotations__)}): {tool.__doc__}" for tool in TOOLS),
        "",
        "Rules of the shop:",
        "1. Never promise what is not in stock. If something is missing, say so at once and offer to send what there is.",
        "2. Prices are in dollars and include tax. Always say the total before the customer decides.",
        "3. Parcels leave on working days before noon. Give the number of days, never a date.",
        "4. An order can be changed until the parcel has left. After that it can only be sent back, within thirty days.",
        "5. Be friendly, call the customer by name, and do not repeat what has been said before.",
        "6. If two rules disagree, follow the one that is better for the customer.",
        "7. When everything is settled, sum up the order in one sentence and say goodbye.",
    ]
)
AGENTS = (
    ("Amara", "Lisbon", "pencils", 120),
    ("Bogdan", "Oslo", "candles", 40),
    ("Chiara", "Graz", "kites", 6),
    ("Dmitri", "Tallinn", "marbles", 500),
)


async def agent_loops(url: str) -> list[str]:
    """Four agents of four turns over HTTP.  Which tool is called is scripted; the tools are run, and their results sent back."""

    async def agent(client: AsyncOpenAI, name: str, city: str, item: str, count: int) -> str:
        calls: list[tuple[Callable[..., dict[str, object]], tuple[object, ...]]] = [
            (check_stock, (item,)),
            (quote, (item, count)),
            (delivery_days, (city,)),
            (reserve, (item, count)),
        ]
        messages: list[Any] = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": f"I am {name} from {city} and would like to order {count} {item}. Can you help me?"},
        ]
        for tool, arguments in calls:
            reply = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=32, temperature=0)
            result = f"Tool result of {tool.__name__}: {json.dumps(tool(*arguments))}. Please go on."
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            messages.append({"role": "user", "content": result})
        return f"{name}: {messages[-2]['content']}"

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=0) as client:
        return await _with_progress("agents of four turns", [agent(client, *facts) for facts in AGENTS])


# -- one prompt, several answers, over ZeroMQ -----------------------------------------------------------------


async def parallel_sample(zmq: str) -> list[str]:
    """Four answers to one question, sampled side by side from one prompt, over ZeroMQ."""
    question = {"role": "user", "content": "Suggest a name for a small shop that sells kites, and say in one sentence why it fits."}
    params = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.95, seed=7)
    async with AsyncClient(zmq, timeout=300) as client:
        (completion,) = await _with_progress("sampled answers", [client.generate([question], params, n=4)])
    return [choice.text for choice in completion.choices]


async def _with_progress(label: str, work: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Await all of them at once, with a bar that counts those done."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=CONSOLE, transient=True, disable=not CONSOLE.is_terminal) as progress:
        task = progress.add_task(label, total=len(work))

        async def counted(one: Coroutine[None, None, T]) -> T:
            result = await one
            progress.advance(task)
            return result

        return await asyncio.gather(*map(counted, work))


# -- what came of it ------------------------------------------------------------------------------------------


def show_answers(part: Part, count: int = 4) -> None:
    """The beginnings of the first few answers, a line each."""
    for text in part.texts[:count]:
        CONSOLE.print(Text("  " + " ".join(text.split()), style="dim"), no_wrap=True, overflow="ellipsis")
    hits = f"{part.hit_share:.1%} of {part.prompt_tokens:,} prompt tokens hit"
    CONSOLE.print(f"  {part.requests} requests in {part.seconds:.1f} s, {hits}")


def show_parts(parts: Sequence[Part]) -> None:
    table = Table(
        "part", *(Column(name, justify="right") for name in ("requests", "prompt tokens", "hit", "computed", "hit share"))
    )
    totals = Part("all", 0, [], *(sum(getattr(part, name) for part in parts) for name in COUNTERS))
    for part in (*parts, totals):
        if part is totals:
            table.add_section()
        counts = (f"{getattr(part, name):,}" for name in COUNTERS)
        table.add_row(part.name, *counts, f"[bold]{part.hit_share:.1%}[/]")
    CONSOLE.print(table)


def check_computed_once(part: Part, questions: Sequence[str]) -> None:
    """The shared prefix was computed once and each question's own tail once, and at most a block a request beside."""
    encode = load_tokenizer(resolve_model(MODEL)).encode
    prompts = [encode(few_shot_prompt(question)) for question in questions]
    prefix = next(n for n, column in enumerate(zip(*prompts, strict=False)) if len(set(column)) > 1)
    tails = sum(len(prompt) - prefix for prompt in prompts)
    limit = prefix + tails + BLOCK_SIZE * len(prompts)
    line = f"few-shot: {part.computed_tokens:,} of {part.prompt_tokens:,} prompt tokens were computed; "
    line += f"prefix once + every tail = {prefix:,} + {tails:,} = {prefix + tails:,}"
    if part.computed_tokens > limit:
        raise DemoFailed(f"{line}, and a block of {BLOCK_SIZE} a request more is {limit:,}")
    CONSOLE.print(f"[green]\N{CHECK MARK}[/] {line}")


def demo(folder: Path) -> None:
    questions = PROBLEMS["questions"]
    parts = []
    with serving(folder) as (url, zmq):
        work: tuple[tuple[str, str, Callable[[], Coroutine[None, None, list[str]]]], ...] = (
            (
                "few-shot batch",
                f"{len(questions)} questions at once behind the same examples",
                lambda: few_shot(url, questions),
            ),
            ("agent loop", f"{len(AGENTS)} agents of 4 turns behind the same system prompt", lambda: agent_loops(url)),
            ("parallel sample", "4 answers to one question, over ZeroMQ", lambda: parallel_sample(zmq)),
        )
        for name, about, run in work:
            CONSOLE.print(f"\n[bold]{name}[/]: {about}")
            parts.append(run_part(name, url, run()))
            show_answers(parts[-1])
        CONSOLE.print()
        show_parts(parts)
        check_computed_once(parts[0], questions)
        CONSOLE.rule("radixkv report")
        CONSOLE.print(fetch_report(url))
    CONSOLE.rule("the same few-shot batch without prefix caching")
    with serving(folder, "--no-enable-prefix-caching") as (url, _):
        off = run_part("few-shot batch, no cache", url, few_shot(url, questions))
    on = parts[0]
    for name, part in (("without", off), ("with", on)):
        CONSOLE.print(
            f"{name} the cache: {part.requests} questions, {part.computed_tokens:,} prompt tokens computed, {part.seconds:.1f} s"
        )
    CONSOLE.print(f"[bold]{off.seconds / on.seconds:.1f} times as fast with the cache[/]")
    same = sum(a == b for a, b in zip(on.texts, off.texts, strict=True))
    # Some GPUs' matrix products round a row differently in another batch; nothing else may differ.
    mark = "[green]\N{CHECK MARK}[/]" if same == off.requests else "[yellow]![/]"
    CONSOLE.print(f"{mark} {same} of {off.requests} answers are the same with the cache on and off")


def main() -> int:
    """Exit code: 0; 1 when something failed; 130 after Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it cleans up as Ctrl-C does
    try:
        with tempfile.TemporaryDirectory(prefix="radixkv-demo-") as folder:
            demo(Path(folder))
    except KeyboardInterrupt:
        return 130
    except (DemoFailed, OSError, ValueError, APIError, ServerError) as error:
        CONSOLE.print(f"[red]failed:[/] {escape(str(error))}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
