"""Starts, watches and restarts the workers, and runs the doors: what ``radixkv serve`` does."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvicorn
import uvloop
import zmq.asyncio
from rich.console import Console
from zmq import IPC_PATH_MAX_LEN

from radixkv.config import EngineConfig
from radixkv.model.loader import ModelSource, load_model_config, resolve_model
from radixkv.model.tokenizer import load_tokenizer
from radixkv.server import logs
from radixkv.server.access import API_KEY_VARIABLE, ApiKeys, is_loopback
from radixkv.server.access_log import AccessLog
from radixkv.server.block_hashes import BlockHashes
from radixkv.server.curve import CurveServer
from radixkv.server.errors import Unavailable
from radixkv.server.frontend import DEFAULT_MAX_WAITING, Frontend
from radixkv.server.http_api import create_app
from radixkv.server.http_protocol import MAX_HEAD_BYTES, WRITE_SECONDS, TimedProtocol
from radixkv.server.messages import BEAT_SECONDS, Hello, Ready
from radixkv.server.request_log import RequestLog
from radixkv.server.routing import Router
from radixkv.server.worker_client import WorkerClient
from radixkv.server.zmq_api import ZmqDoor, check_endpoint

log = logging.getLogger("radixkv.server")

WORKER_COMMAND = (sys.executable, "-P", "-m", "radixkv.server.worker")
STOP_SECONDS = 5.0
"""What a worker gets to finish its step and close its engine before it is killed."""
READ_SECONDS = 2.0
"""What clients get to read the end of their answers when the server stops."""
MAX_FAILURES = 10
"""Workers in a row that did not start, or died without having given anybody a token, until the server gives up.

It does not while another worker lives.
"""
SETTLED_SECONDS = 60.0
"""A worker that lives so long is no failure, even if there was nothing to do."""
MAX_RESTART_DELAY = 30.0
MAX_TIMEOUT = 86400.0
MAX_WORKERS = 256
MAX_OPEN_FILES = 65536
"""Asked of the system, for connections; it may allow fewer."""
M = TypeVar("M", Hello, Ready)


def serve(
    config: EngineConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    zmq: str | None = None,
    workers: int = 1,
    drain_timeout: float = 20.0,
    hang_timeout: float = 120.0,
    api_keys: Path | str | None = None,
    zmq_server_key: Path | str | None = None,
    zmq_client_keys: Path | str | None = None,
    max_waiting: int = DEFAULT_MAX_WAITING,
    request_timeout: float | None = None,
    show_prompts: bool = False,
    log_format: logs.LogFormat = "text",
    request_log: Path | str | None = None,
    request_log_key: Path | str | None = None,
    log_tokens: bool = False,
    worker_command: Sequence[str] = WORKER_COMMAND,
) -> None:
    """Serve ``config.model`` over HTTP, and over ZeroMQ if an endpoint is given, until SIGINT or SIGTERM.

    Port 0 takes any free one.  Each of the ``workers`` has weights and a cache of its own, as ``config`` says, and an equal share
    of the CPU's cores where ``config`` gives no number.  After SIGTERM open requests have ``drain_timeout`` seconds to end.  A
    worker that is busy and says nothing for ``hang_timeout`` seconds is replaced.  ``api_keys`` is a file for :class:`ApiKeys`, the
    two after it are what :class:`CurveServer` loads, the three after those the frontend's.  ``log_format`` is how the log on
    standard error looks, the workers' as well.  ``request_log`` is where :class:`RequestLog` writes, ``request_log_key`` a file for
    its :class:`BlockHashes`, ``log_tokens`` has it write prompts' tokens.  Raises ``ValueError`` or ``OSError`` with a text for
    users where it can't start, ``OSError`` also where worker after worker fails.
    """
    logs.set_up(log_format)
    # What can go wrong at once goes wrong here, before the model is fetched or loaded.
    for name, value, least in (
        ("drain_timeout", drain_timeout, 0.0),
        ("hang_timeout", hang_timeout, 2 * BEAT_SECONDS),  # in which a worker that is busy says something
    ):
        if not least <= value <= MAX_TIMEOUT:
            raise ValueError(f"{name} must be between {least:g} and {MAX_TIMEOUT:g} seconds, got {value}")
    if not 1 <= workers <= MAX_WORKERS:
        raise ValueError(f"workers must be between 1 and {MAX_WORKERS}, got {workers}")
    if workers > 1 and config.num_threads is None:
        config = replace(config, num_threads=max(1, _num_cores() // workers))
    keys = ApiKeys.load(None if api_keys is None else Path(api_keys))
    if (zmq_server_key is None) != (zmq_client_keys is None):
        raise ValueError("zmq-server-key and zmq-client-keys must be given both or neither")
    curve = None
    if zmq_server_key is not None and zmq_client_keys is not None:
        curve = CurveServer.load(Path(zmq_server_key), Path(zmq_client_keys))
    if zmq is not None:
        check_endpoint(zmq, secured=curve is not None, keys=keys is not None)
    if max_waiting < 1:
        raise ValueError(f"max-waiting must be at least 1, got {max_waiting}")
    if request_timeout is not None and not 0 < request_timeout < float("inf"):
        raise ValueError(f"request-timeout must be above 0 seconds, got {request_timeout}")
    if request_log is None and (log_tokens or request_log_key is not None):
        option = "log-tokens" if log_tokens else "request-log-key"
        raise ValueError(f"{option} is for a request log: give --request-log FILE as well")
    hashes = BlockHashes.load(None if request_log_key is None else Path(request_log_key))
    _raise_open_files()
    with _bind(host, port) as listener, contextlib.suppress(KeyboardInterrupt):
        _check_reach(listener, keys)
        doors = _Doors(listener, keys, zmq, curve)
        signals = _Signals()
        source = resolve_model(config.model)
        load_model_config(source)
        with contextlib.ExitStack() as stack:
            requests = None
            if request_log is not None:
                requests = RequestLog(Path(request_log), hashes, log_tokens=log_tokens)
                stack.callback(requests.close)
            runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
            patience = _Patience(drain_timeout, hang_timeout, request_timeout)
            runner.run(
                signals.run(
                    lambda: _serve(
                        config,
                        source,
                        doors,
                        workers,
                        max_waiting,
                        patience,
                        worker_command,
                        signals,
                        log_format,
                        show_prompts,
                        requests,
                    )
                )
            )


@dataclass(frozen=True)
class _Doors:
    """Where clients come in, and what they have to show there."""

    listener: socket.socket
    keys: ApiKeys | None
    zmq: str | None
    curve: CurveServer | None


@dataclass(frozen=True)
class _Patience:
    """Seconds: for open requests after SIGTERM, for a busy worker that says nothing, and for a request (None: for ever)."""

    drain: float
    hang: float
    request: float | None


class _Signals:
    """Has the first SIGINT or SIGTERM stop what runs, so that all it holds is released.  Later ones must not cut that short.

    SIGTERM does :attr:`terminate`, which is the same until there may be requests to wait for.

    Not the event loop's own handlers: when it closes, it gives signals back to the system, which would end the process half-way.
    """

    _NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.terminate: Callable[[], object] = self.stop
        self._stop: Callable[[], object] = _interrupt
        for number in self._NUMBERS:
            signal.signal(number, self._on_signal)

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do ``work``, which a signal cancels.  Before, a signal raises ``KeyboardInterrupt``; after, none does anything."""
        task = asyncio.ensure_future(work())
        self._stop = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            pass
        finally:
            self._stop = self.terminate = _nothing
            for number in self._NUMBERS:  # Python, too, gives signals back to the system when it ends
                signal.signal(number, signal.SIG_IGN)

    def stop(self) -> None:
        stop, self._stop = self._stop, _nothing
        stop()

    def _on_signal(self, number: int, _: object) -> None:
        if number == signal.SIGTERM:
            self.terminate()
        else:
            self.stop()


def _interrupt() -> None:
    raise KeyboardInterrupt


def _nothing() -> None:
    pass


async def _serve(
    config: EngineConfig,
    source: ModelSource,
    doors: _Doors,
    num_workers: int,
    max_waiting: int,
    patience: _Patience,
    worker_command: Sequence[str],
    signals: _Signals,
    log_format: logs.LogFormat,
    show_prompts: bool,
    request_log: RequestLog | None,
) -> None:
    as_json = log_format == "json"
    console = Console(stderr=True, highlight=False, quiet=as_json)
    began = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        context = stack.enter_context(zmq.asyncio.Context())
        door = None if doors.zmq is None else ZmqDoor(context, doors.zmq, doors.curve)
        if door is not None:
            stack.callback(door.close)
        supervisors = [
            Supervisor(context, config, worker_command, patience.hang, index, f" {index}" if num_workers > 1 else "")
            for index in range(num_workers)
        ]
        stack.push_async_callback(lambda: asyncio.gather(*(supervisor.stop() for supervisor in supervisors)))
        router: Router[WorkerClient] | None = None
        if num_workers > 1:
            router = Router(config.block_size if config.enable_prefix_caching else None)
        with console.status(f"Loading {config.model}"):
            # The workers load their weights meanwhile, in their own processes.
            loading = asyncio.create_task(_start_all(supervisors))
            stack.callback(loading.cancel)
            tokenizer, model = await asyncio.to_thread(lambda: (load_tokenizer(source), load_model_config(source)))
            frontend = Frontend(
                source.name, tokenizer, model.vocab_size,
                max_waiting=max_waiting, request_timeout=patience.request, router=router, show_prompts=show_prompts,
                request_log=request_log,
            )  # fmt: skip
            logs.take_over("transformers")
            started = await loading
        stack.callback(frontend.detach, Unavailable("the server is shutting down"))
        try:
            doors.listener.listen(1024)
        except OSError as error:  # another server has bound the port, too, and listened first
            raise OSError(f"can't listen on {_address(doors.listener)}: {error.strerror}") from None
        try:
            async with asyncio.TaskGroup() as group:
                for supervisor, (worker, stats) in zip(supervisors, started, strict=True):
                    group.create_task(supervisor.run(frontend, worker, stats))
                address = _address(doors.listener)
                group.create_task(_serve_http(frontend, doors))
                if door is not None:
                    group.create_task(door.run(frontend))
                    address += f" and {door.endpoint}"
                group.create_task(_drain_when_terminated(frontend, signals, patience.drain))
                took = f"{time.monotonic() - began:.1f} s"
                for line in (
                    f"Loaded {config.model} in {took}: context {stats['max_model_len']} tokens",
                    f"Serving on {address}  (Ctrl-C stops)",
                ):
                    if as_json:
                        log.info(line)
                    else:
                        console.print(line, soft_wrap=True)
        except ExceptionGroup as failures:
            for failure in failures.exceptions:
                if isinstance(failure, GaveUp):
                    raise failure from None
            raise


async def _start_all(supervisors: Sequence[Supervisor]) -> list[tuple[WorkerProcess, dict[str, Any]]]:
    """Raises what the first that fails does."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(supervisor.start()) for supervisor in supervisors]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _drain_when_terminated(frontend: Frontend, signals: _Signals, timeout: float) -> None:
    """On SIGTERM refuse new requests, and stop when the open ones are over; they fail if they aren't in time."""
    terminated = asyncio.Event()
    signals.terminate = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, terminated.set)
    await terminated.wait()
    shutting_down = "the server is shutting down"
    try:
        await asyncio.wait_for(frontend.drain(Unavailable(f"{shutting_down} and takes no new requests")), timeout)
    except TimeoutError:
        frontend.detach(Unavailable(f"{shutting_down}, and the request was not over within {timeout:g} s"))
    signals.stop()


async def _serve_http(frontend: Frontend, doors: _Doors) -> None:
    config = uvicorn.Config(
        AccessLog(create_app(frontend, doors.keys), frontend.metrics),
        http=TimedProtocol,
        ws="none",
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
    )
    server = _HttpServer(config)
    serving = asyncio.create_task(server.serve(sockets=[doors.listener]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        # What is still open gets its error and ends; then the server closes its connections itself, but for those not read.
        frontend.detach(Unavailable("the server is shutting down"))
        server.should_exit = True
        await asyncio.wait({serving}, timeout=READ_SECONDS)
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        await serving
        raise


class _HttpServer(uvicorn.Server):
    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """Signals are the launcher's."""
        return contextlib.nullcontext()


@dataclass(frozen=True)
class WorkerProcess:
    """A worker that has been started, and the frontend's end of its socket."""

    process: asyncio.subprocess.Process
    client: WorkerClient

    async def expect(self, kind: type[M]) -> M:
        """Wait for a message that it sends while it starts.  Raises ``OSError`` with its reason if it fails instead."""
        message = asyncio.create_task(self.client.expect(kind))
        died = asyncio.create_task(self.process.wait())
        try:
            await asyncio.wait({message, died}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({message}, timeout=1.0)  # its last words may still be on their way
            if not message.done():
                raise OSError(f"the engine process {_how_it_ended(died.result())} while it loaded its model")
            return message.result()
        except Unavailable as error:
            raise OSError(error.message) from None
        finally:
            message.cancel()
            died.cancel()

    async def stop(self) -> None:
        """End it: politely by closing its standard input, after :data:`STOP_SECONDS` by killing it."""
        self.client.close(Unavailable("the server is shutting down"))
        if self.process.returncode is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                await asyncio.wait_for(self.process.wait(), STOP_SECONDS)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()


class GaveUp(OSError):
    """Worker after worker failed; the text says how the last one did."""


class Supervisor:
    """Keeps one worker alive.  Every worker gets a socket of its own, so a new one never sees what was meant for the last."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        config: EngineConfig,
        command: Sequence[str],
        hang_timeout: float,
        index: int,
        label: str,
    ) -> None:
        """``index`` is the worker's among all of the server, ``label`` what the log calls it by."""
        self._index = index
        self._label = label
        self._context = context
        self._config = config
        self._command = command
        self._hang_timeout = hang_timeout
        self._worker: WorkerProcess | None = None

    async def start(self) -> tuple[WorkerProcess, dict[str, Any]]:
        """Start a worker and wait until it is ready; its engine's stats come with it.  Raises ``OSError`` where it can't."""
        # Closed to other users, and gone as soon as the worker has connected: only who is killed before that leaves it behind.
        directory = _socket_directory()
        endpoint = f"ipc://{directory.name}/worker"
        client = WorkerClient(self._context, endpoint, self._index)
        process = None
        try:
            # In a session of its own: what a terminal sends to all processes in it is the launcher's to act on.
            process = await asyncio.create_subprocess_exec(
                *self._command, endpoint, str(os.getpid()), stdin=asyncio.subprocess.PIPE, start_new_session=True
            )
            self._worker = worker = WorkerProcess(process, client)
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(self._config) + b"\n")
            await worker.expect(Hello)
            directory.cleanup()
            return worker, (await worker.expect(Ready)).stats
        except BaseException:
            client.close(Unavailable("the engine process did not start"))
            if process is not None:  # while it loads it would not see that its standard input closes, and has nothing to lose
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            raise
        finally:
            directory.cleanup()

    async def run(self, frontend: Frontend, worker: WorkerProcess, stats: dict[str, Any]) -> None:
        """Attach a started worker to ``frontend``, and each one that replaces it, until cancelled.

        Raises :class:`GaveUp` after :data:`MAX_FAILURES` in a row, unless ``frontend`` has another worker.
        """
        failures = 0
        while True:
            frontend.attach(worker.client, stats)
            attached = time.monotonic()
            how = await self._death_of(worker)
            progressed = frontend.worker_died(worker.client, how)
            if progressed or time.monotonic() - attached > SETTLED_SECONDS:
                failures = 0
            next_worker = None
            while next_worker is None:
                failures += 1
                if failures >= MAX_FAILURES and not frontend.has_worker:
                    message = f"the engine process{self._label} {how}; that was failure {failures} in a row, so the server gives up"
                    frontend.detach(Unavailable(message))
                    raise GaveUp(message)
                delay = min(MAX_RESTART_DELAY, 2.0 ** min(failures - 2, 10)) if failures > 1 else 0.0
                log.error("the engine process%s %s; starting another%s", self._label, how, f" in {delay:g} s" if delay else "")
                await asyncio.sleep(delay)
                frontend.metrics.worker_restarts.inc()
                try:
                    next_worker = await self.start()
                except OSError as error:
                    how = f"did not start: {error}"
                    frontend.no_worker_soon()
                    await self.stop()
            worker, stats = next_worker
            log.warning("the engine process%s is back", self._label)

    async def _death_of(self, worker: WorkerProcess) -> str:
        """Serve through a worker until it dies; kill it where it hangs, or can't be listened to.  Returns how it ended."""
        receiving = asyncio.create_task(worker.client.run())
        hung = asyncio.create_task(worker.client.hung(self._hang_timeout))
        died = asyncio.create_task(worker.process.wait())
        try:
            await asyncio.wait({receiving, hung, died}, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                return _how_it_ended(died.result())
            worker.process.kill()
            await died
            if receiving.done():
                log.error("a message of the engine process%s could not be handled", self._label, exc_info=receiving.exception())
                return "said what the server failed on, so it was killed"
            hung.result()
            return f"was busy and said nothing for {self._hang_timeout:g} s, so it was killed"
        finally:
            for task in (receiving, hung, died):
                task.cancel()

    async def stop(self) -> None:
        if self._worker is not None:
            await self._worker.stop()


def _raise_open_files() -> None:
    """Every connection is one, and most systems give a process no more than 1,024 unless it asks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _num_cores() -> int:
    """Of the CPU, that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _socket_directory() -> tempfile.TemporaryDirectory[str]:
    """In /tmp where the path of a socket in the temporary directory would be longer than the system allows."""
    path = Path(tempfile.gettempdir(), "radixkv-________", "worker")
    return tempfile.TemporaryDirectory(prefix="radixkv-", dir="/tmp" if len(bytes(path)) > IPC_PATH_MAX_LEN else None)  # noqa: S108


def _how_it_ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _bind(host: str, port: int) -> socket.socket:
    """A TCP socket that is bound but does not listen yet, so that clients are refused, not kept waiting, while the model loads."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise OSError(f"host {host!r} is no address of this machine: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: the system itself gives up a client that takes nothing, or has vanished
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * WRITE_SECONDS))
        listener.bind(address)
    except OSError as error:
        listener.close()
        hint = "; choose another with --port" if error.errno == errno.EADDRINUSE else ""
        raise OSError(f"can't listen on {host} port {port}: {error.strerror}{hint}") from None
    return listener


def _check_reach(listener: socket.socket, keys: ApiKeys | None) -> None:
    """Raise ``ValueError`` where other machines could use a server that asks for no keys."""
    host = listener.getsockname()[0]
    if keys is None and not is_loopback(host):
        raise ValueError(
            f"host must be a loopback address, as 127.0.0.1 is, unless API keys are set, got {host}: all who reach it could use "
            f"the server. Write a key into a file of your own (chmod 600) and give --api-keys FILE, or set {API_KEY_VARIABLE}"
        )


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
