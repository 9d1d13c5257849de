"""The request log: a line of JSON for each sequence that ended, written by a thread of its own.

What the event loop does for a line is to put it into a queue.  Where lines come faster than the disk takes them, the queue is full
after a while; then lines are dropped, and the next line that is written says how many.
"""

from __future__ import annotations

import io
import logging
import os
import queue
import threading
from logging.handlers import RotatingFileHandler
from pathlib import Path

import msgspec

from radixkv.report.logged_request import LoggedRequest
from radixkv.server.block_hashes import BlockHashes

log = logging.getLogger("radixkv.server")

FILE_BYTES = 256 * 2**20
"""A file that would grow beyond this becomes ``FILE.1``, that one ``FILE.2`` and so on."""
OLD_FILES = 4
"""The one before them is deleted: with the present one they take 1.25 GiB at most."""
MAX_WAITING_LINES = 4096
MAX_WAITING_TOKENS = 4 * 2**20
"""Of the prompts in the queue, which keeps them in memory."""
CLOSE_SECONDS = 5.0


class RequestLog:
    """Owns the file and the thread.  :meth:`write` and :meth:`close` belong to one thread, the event loop's."""

    def __init__(
        self,
        path: Path,
        hashes: BlockHashes,
        *,
        log_tokens: bool = False,
        file_bytes: int = FILE_BYTES,
        max_waiting_lines: int = MAX_WAITING_LINES,
    ) -> None:
        """Append to ``path``, which only its owner can read if it is new.  Raises ``OSError`` where it can't be written."""
        self._hashes = hashes
        self._log_tokens = log_tokens
        self._file = _File(path, maxBytes=file_bytes, backupCount=OLD_FILES, encoding="utf-8")
        self._num_failed = 0
        self._queue: queue.Queue[tuple[LoggedRequest, list[int]] | None] = queue.Queue(max_waiting_lines)
        self._put_tokens = self._written_tokens = 0  # one counter of each thread, so that neither needs a lock
        self._dropped = 0
        """Lines since the last one that found room."""
        self._thread = threading.Thread(target=self._run, name="request log", daemon=True)
        self._thread.start()

    def write(self, line: LoggedRequest, token_ids: list[int]) -> None:
        """Have a line written, with hashes of the prompt's whole blocks.  Never waits; the list must not change any more."""
        line.dropped = self._dropped
        full = self._put_tokens - self._written_tokens + len(token_ids) > MAX_WAITING_TOKENS
        try:
            if full and not self._queue.empty():
                raise queue.Full
            self._queue.put_nowait((line, token_ids))
        except queue.Full:
            if not self._dropped:
                log.warning("the request log can't be written as fast as requests end: lines are dropped, and counted in the next")
            self._dropped += 1
        else:
            self._put_tokens += len(token_ids)
            self._dropped = 0

    def close(self) -> None:
        """Write what waits, for :data:`CLOSE_SECONDS` at most."""
        try:
            self._queue.put(None, timeout=CLOSE_SECONDS)
            self._thread.join(CLOSE_SECONDS)
        except queue.Full:
            pass
        left = self._dropped + self._queue.qsize() + self._num_failed
        if left:
            log.warning("the request log lacks %d lines that were dropped or could not be written", left)
        if not self._thread.is_alive():
            self._file.close()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._write(*item)
            except Exception:  # a full disk, say, must not end the thread, nor fill the other log
                if not self._num_failed:
                    log.exception("a line of the request log could not be written")
                self._num_failed += 1
            self._written_tokens += len(item[1])

    def _write(self, line: LoggedRequest, token_ids: list[int]) -> None:
        line.block_hashes = list(self._hashes(token_ids, line.block_size, line.namespace))
        if self._log_tokens:
            line.token_ids = token_ids
        self._file.emit(logging.makeLogRecord({"msg": msgspec.json.encode(line).decode()}))


class _File(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """``emit`` has caught what went wrong; the thread is to see it."""
        raise

    def _open(self) -> io.TextIOWrapper:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=_private)  # type: ignore[return-value]


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
