"""The command line.  Commands import what they need when they run, so that ``radixkv --help`` loads no torch."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.validators import Number

from radixkv import __version__, settings
from radixkv.config import EngineConfig

app = App(
    name="radixkv",
    version=__version__,
    help_format="markdown",
    help="""LLM inference whose prompts share their key-value cache, and which shows where the hits come from.

    Serve a small real model on this machine, ask it something, see what the cache saved:

        radixkv serve
        curl -X POST http://127.0.0.1:8000/v1/completions \\
             -d '{"prompt": "The capital of France is"}'
        radixkv report

    Without a server: `radixkv generate "The capital of France is"`. Without a model: `radixkv replay TRACE.jsonl` tells what hit
    rate a recorded workload would reach at a given cache size. `radixkv COMMAND --help` explains each.
    """,
    suppress_keyboard_interrupt=False,
    print_error=False,
    exit_on_error=False,
    result_action="return_value",
)

MODEL = Group("Model", sort_key=1)
CACHE = Group("Cache", help="What is kept of earlier prompts, and in how much memory; docs/cache.md.", sort_key=2)
SCHEDULING = Group("Scheduling", help="Who runs when; docs/scheduling.md.", sort_key=3)
SERVER = Group("Server", help="Where it listens, and how much it takes on; docs/operations.md.", sort_key=4)
SECURITY = Group("Security", help="Who may use the server; docs/security.md.", sort_key=5)
OPERATIONS = Group("Operations", help="How it is set up, stopped and watched; docs/operations.md.", sort_key=6)

_ENGINE_GROUPS = {
    MODEL: ("model", "dtype", "device", "num_threads", "max_model_len"),
    CACHE: ("kv_cache_tokens", "block_size", "enable_prefix_caching", "eviction_policy"),
    SCHEDULING: ("policy", "aging_tokens_per_second", "max_batch_tokens", "max_num_seqs"),
}


def _grouped(config: type[EngineConfig]) -> Any:
    """The same, with each field in its group of the help, which the engine's own configuration need not know."""
    hints = get_type_hints(config)
    groups = {field: group for group, fields in _ENGINE_GROUPS.items() for field in fields}
    annotations = {
        field.name: Annotated[hints[field.name], Parameter(group=groups[field.name])] for field in dataclasses.fields(config)
    }
    grouped = type(config.__name__, (config,), {"__annotations__": annotations, "__doc__": config.__doc__})
    return dataclasses.dataclass(frozen=True, kw_only=True)(grouped)


_GroupedConfig = _grouped(EngineConfig)
Engine = Annotated[_GroupedConfig, Parameter(name="*")]  # type: ignore[valid-type]
DEFAULTS: EngineConfig = _GroupedConfig()


@app.command(config=(settings.from_environment, settings.from_file))
def serve(
    *,
    host: Annotated[str, Parameter(group=SERVER)] = "127.0.0.1",
    port: Annotated[int, Parameter(group=SERVER, validator=Number(gte=0, lte=65535))] = 8000,
    zmq: Annotated[str | None, Parameter(group=SERVER)] = None,
    workers: Annotated[int, Parameter(group=SERVER, validator=Number(gte=1, lte=256))] = 1,
    drain_timeout: Annotated[float, Parameter(group=OPERATIONS, validator=Number(gte=0, lte=86400))] = 20.0,
    hang_timeout: Annotated[float, Parameter(group=OPERATIONS, validator=Number(gte=2, lte=86400))] = 120.0,
    api_keys: Annotated[Path | None, Parameter(group=SECURITY)] = None,
    zmq_server_key: Annotated[Path | None, Parameter(group=SECURITY)] = None,
    zmq_client_keys: Annotated[Path | None, Parameter(group=SECURITY)] = None,
    max_waiting: Annotated[int, Parameter(group=SERVER, validator=Number(gte=1))] = 2048,
    request_timeout: Annotated[float | None, Parameter(group=SERVER, validator=Number(gt=0))] = None,
    show_prompts: Annotated[bool, Parameter(group=SECURITY, negative="")] = False,
    log_format: Annotated[Literal["text", "json"], Parameter(group=OPERATIONS)] = "text",
    request_log: Annotated[Path | None, Parameter(group=OPERATIONS)] = None,
    request_log_key: Annotated[Path | None, Parameter(group=OPERATIONS)] = None,
    log_tokens: Annotated[bool, Parameter(negative="", group=OPERATIONS)] = False,
    config_file: Annotated[Path | None, Parameter(name=settings.FILE_OPTION, group=OPERATIONS)] = None,
    config: Engine = DEFAULTS,
) -> None:
    """Serve a model over the OpenAI HTTP API, and over ZeroMQ if asked.

    The first start fetches the default model (about 100 MB) into your cache folder. Ctrl-C stops the server and its worker.

    Each option can be set in the environment, too (`--hang-timeout` as `RADIXKV_SERVE_HANG_TIMEOUT`), or in a TOML file that
    `--config` names (`hang-timeout = 60`). The command line comes before the environment, that before the file.

    Parameters
    ----------
    host
        Address to listen on. Any but a loopback address needs API keys.
    port
        Port to listen on.
    zmq
        ZeroMQ endpoint to offer as well, as in `ipc:///tmp/radixkv.sock` or `tcp://127.0.0.1:5555`. None if not given.
    workers
        Processes that run the model, each with weights, a KV cache and a share of the CPU's cores of its own. A request goes to the
        one that has most of its prompt cached, unless that one is far busier than another.
    drain_timeout
        Seconds that open requests have to end after SIGTERM; new ones are refused meanwhile. Ctrl-C does not wait.
    hang_timeout
        Replace a worker that is busy and has said nothing for so many seconds. Loading the model does not count.
    api_keys
        File of the keys that HTTP clients must send: one a line, or a key and the one namespace it is for. Keys may come in the
        environment variable RADIXKV_API_KEY as well. No keys are asked for if neither is given.
    zmq_server_key
        The server's CURVE key pair, a `.key_secret` file; with it, `--zmq` may be TCP on any address. Nothing is encrypted if not
        given.
    zmq_client_keys
        Folder of the `.key` files of the clients that the ZeroMQ endpoint lets in. Goes with `--zmq-server-key`; if not given, all
        come in who reach it.
    max_waiting
        Sequences of one namespace that may wait for their first token, fewer where others wait, too; further requests are told to
        come again (429).
    request_timeout
        Seconds after which a request is ended with an error. Unlimited if not given.
    show_prompts
        Let the live page at `/` and `radixkv report` show parts of prompts, to whoever may see the metrics. Lengths only if not
        given.
    log_format
        How the log on standard error looks: lines of text, or one JSON object a line. Neither ever holds a prompt.
    request_log
        File to append a line of JSON to for each request that ends: lengths, times, what was cached, why the rest was not, and
        keyed hashes of its blocks. `radixkv report` and `radixkv replay` read it; docs/reports.md. None is written if not given.
    request_log_key
        File of 16 to 64 bytes that key the hashes, so that logs of several runs can be put together. A key that nobody knows, new
        in each run, if not given.
    log_tokens
        Write prompts' token ids into the request log as well. They tell what was asked.
    config_file
        TOML file with options. None is read if not given.
    """
    from radixkv.server.launcher import serve as launch

    launch(
        config,
        host=host,
        port=port,
        zmq=zmq,
        workers=workers,
        drain_timeout=drain_timeout,
        hang_timeout=hang_timeout,
        api_keys=api_keys,
        zmq_server_key=zmq_server_key,
        zmq_client_keys=zmq_client_keys,
        max_waiting=max_waiting,
        request_timeout=request_timeout,
        show_prompts=show_prompts,
        log_format=log_format,
        request_log=request_log,
        request_log_key=request_log_key,
        log_tokens=log_tokens,
    )


@app.command
def generate(
    prompt: str,
    /,
    *,
    chat: Annotated[bool, Parameter(negative="")] = False,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    stop: tuple[str, ...] = (),
    ignore_eos: Annotated[bool, Parameter(negative="")] = False,
    config: Engine = DEFAULTS,
) -> None:
    """Complete a prompt with a model in this process, and print the text as it comes.

    Parameters
    ----------
    prompt
        The text to continue; `-` reads it from standard input.
    chat
        Ask through the model's chat template instead of continuing the text.
    max_tokens
        Longest output in tokens.
    temperature
        0 always takes the most probable token.
    top_p
        Draw from the smallest set of tokens whose probability reaches this.
    top_k
        Draw from this many most probable tokens; 0 is all.
    min_p
        Leave out tokens less probable than this times the most probable one.
    repetition_penalty
        Above 1, makes tokens less probable that have occurred.
    seed
        The same seed gives the same output.
    stop
        Strings that end the output; may be given more than once.
    ignore_eos
        Go on past the model's end-of-sequence token.
    """
    from dataclasses import asdict

    from radixkv.sampling_params import SamplingParams

    try:
        if prompt == "-":
            prompt = sys.stdin.read()
        prompt.encode()  # bytes of the command line that are no UTF-8 come as halves of surrogate pairs
    except UnicodeError as error:
        raise ValueError(f"prompt must be text in UTF-8: {error}") from None
    if not prompt:
        raise ValueError("prompt must not be empty")
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
    ).validate()

    from radixkv.llm import LLM

    llm = LLM(**asdict(config))
    token_ids = llm.render_chat([{"role": "user", "content": prompt}]) if chat else llm.tokenizer.encode(prompt)
    for delta in llm.stream([token_ids], params):
        print(delta.text, end="", flush=True)
    print()


@app.command
def report(
    source: str = "http://127.0.0.1:8000",
    /,
    *,
    html: Path | None = None,
    capacity_blocks: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    model: str | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Say where the hits come from and where they went: of a running server, of a request log, or of a trace.

    How much prefill the cache saved, which prefixes earn it, where the misses went and why, what to do about them with the
    arithmetic of it, by namespace, over time, and at other sizes of the cache. Totals of a server are all it has counted; what
    needs prompts is of its newest requests, as many as it remembers, and says so.

    Parameters
    ----------
    source
        Where the server is, or a file: a log of `radixkv serve --request-log FILE`, or a trace as `radixkv replay` takes it.
    html
        Write the report into this file, one page that opens offline.
    capacity_blocks
        Size of the cache in blocks, for a trace or another one than the log says. A trace's is unbounded if not given.
    model
        Model to say sizes in GiB, and to show as text what a log with tokens holds: an alias, a folder, a hub id or a `.gguf` file.
    json
        Print JSON instead of text.
    """
    from rich.console import Console
    from rich.progress import Progress

    from radixkv.report.source import report_on, write_html

    if html is not None and not html.parent.is_dir():
        raise ValueError(f"--html must name a file in a folder that is there, got {html}")
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        reading, simulating = bar.add_task("reading"), bar.add_task("simulating", total=None)
        result = report_on(
            source,
            capacity_blocks=capacity_blocks,
            model=model,
            reading=lambda done, total: bar.update(reading, completed=done, total=total),
            simulating=lambda done, total: bar.update(simulating, completed=done, total=total),
        )
    if html is not None:
        write_html(result, html)
    if json:
        _print_json(result)
    elif html is None:
        Console().print(result)
    else:
        Console().print(f"Wrote {html}", markup=False, highlight=False)


# By its path, because the policies and the progress bar that its parameters need are imported with it: not for `--help`.
app.command(
    "radixkv.report.command:replay",
    help="""Simulate the prefix cache over a recorded workload: what hit rate would a cache of this size reach? And of any size?

    No model is needed. The workload is a JSON-lines file, either a request log of `radixkv serve`, or a trace in the format of the
    Mooncake traces: a line is one request with `timestamp` in milliseconds, `input_length` and `output_length` in tokens, and
    `hash_ids`, one id for each 512-token block of the prompt, where equal ids mean an equal block after an equal prefix.

    How large should the cache be? Draw the hit rate at every capacity, and see what the knee takes of GPU memory:

        radixkv replay TRACE.jsonl --plot curve.html --model smollm2-135m

    docs/reports.md says how block sizes are converted and how a request log looks.
    """,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, 2 for bad input, 130 after Ctrl-C, 141 where nobody reads the output, or 1."""
    try:
        app(_dash_last(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output has seen enough.  Python would flush the rest when it ends, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except CycloptsError as error:
        return _fail(2, f"{error}\nTry `radixkv --help`.")
    except ValueError as error:
        return _fail(2, str(error))
    except (OSError, RuntimeError) as error:
        return _fail(1, str(error))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "radixkv":
            raise
        return _fail(1, f"this command needs the Python package {error.name!r}: pip install 'radixkv[server]'")
    return 0


def _dash_last(argv: Sequence[str]) -> list[str]:
    """A lone ``-`` behind ``--``: to cyclopts it would be an unknown option."""
    if "-" not in argv or "--" in argv:
        return list(argv)
    at = list(argv).index("-")
    return [*argv[:at], *argv[at + 1 :], "--", "-"]


def _fail(code: int, message: str) -> int:
    print(f"radixkv: {message}", file=sys.stderr)
    return code


def _print_json(result: object) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(result)).decode())


if __name__ == "__main__":
    sys.exit(main())
