"""What `radixkv report` reports on: a running server, a request log or a trace."""

from __future__ import annotations

from pathlib import Path

import msgspec

from radixkv.report.kv_size import kv_size
from radixkv.report.live_page import live_page
from radixkv.report.logged_request import LoggedRequest
from radixkv.report.page_html import html_page
from radixkv.report.report import Report, fetch_report
from radixkv.report.tokens_text import Show, as_ids, as_text
from radixkv.report.trace import Progress, read_records
from radixkv.report.workload import WorkloadReport
from radixkv.report.workload_page import workload_page


def report_on(
    source: str,
    *,
    capacity_blocks: int | None = None,
    model: str | None = None,
    reading: Progress | None = None,
    simulating: Progress | None = None,
) -> Report | WorkloadReport:
    """A server's counters where ``source`` is a URL, else the workload in a file.

    Raises ``ValueError`` for what is neither, or holds something else, ``OSError`` where it or the model can't be read or reached.
    """
    if source.startswith(("http://", "https://")):
        if capacity_blocks is not None or model is not None:
            option = "--model" if capacity_blocks is None else "--capacity-blocks"
            raise ValueError(f"{option} is for request logs and traces: a server knows its own")
        return fetch_report(source)
    path = Path(source)
    if not path.is_file():
        raise ValueError(f"SOURCE must be a URL that begins with http:// or https://, or a file that is there, got {source!r}")
    kv = None if model is None else kv_size(model)
    records = list(read_records(path, progress=reading))
    has_tokens = any(isinstance(record, LoggedRequest) and record.token_ids is not msgspec.UNSET for record in records)
    show = as_ids if model is None or not has_tokens else _text_of(model)
    return WorkloadReport.of(records, path.name, capacity_blocks=capacity_blocks, kv=kv, show=show, progress=simulating)


def write_html(report: Report | WorkloadReport, path: Path) -> None:
    """One page that loads nothing.  Raises ``OSError`` where it can't be written."""
    page = live_page(report) if isinstance(report, Report) else workload_page(report)
    path.write_text(html_page(page), encoding="utf-8")


def _text_of(model: str) -> Show:
    from radixkv.model.loader import resolve_model
    from radixkv.model.tokenizer import load_tokenizer

    return as_text(load_tokenizer(resolve_model(model)))
