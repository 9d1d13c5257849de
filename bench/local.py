"""The serving benchmark against a ``radixkv serve`` of its own, which it starts and stops."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence

from bench import serving

START_SECONDS = 300.0


RADIXKV = (sys.executable, "-P", "-m", "radixkv.cli", "serve", "--port", "{port}")


@contextlib.contextmanager
def server(command: Sequence[str]) -> Iterator[str]:
    """Run a server until the block ends; gives its base URL.  ``{port}`` in ``command`` becomes a free port.

    Raises ``OSError`` if it does not come up, and ``KeyboardInterrupt`` on SIGTERM too, so that the server goes with the benchmark.
    For the main thread.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [part.replace("{port}", str(port)) for part in command]
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True) as process:
        try:
            deadline = time.monotonic() + START_SECONDS
            while not _healthy(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise OSError(f"{' '.join(command)} did not come up:\n{log.read()[-3000:]}")
                time.sleep(0.2)
            yield url
        finally:
            signal.signal(signal.SIGTERM, before)
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # whoever of its session has not gone by itself


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):  # noqa: S310 (http by construction)
            return True
    except OSError:
        return False


def main(argv: Sequence[str]) -> int:
    """``[serving's options] [-- radixkv serve's options]``; exit codes as ``serving``'s."""
    at = list(argv).index("--") if "--" in argv else len(argv)
    mine, flags = list(argv[:at]), list(argv[at + 1 :])
    if {"--help", "-h"} & set(mine):
        print("python -m bench local [options as below, but --url] [-- options of radixkv serve]\n")
        return serving.main(["--help"])
    try:
        with server([*RADIXKV, *flags]) as url:
            return serving.main(["--url", url, *mine])
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
