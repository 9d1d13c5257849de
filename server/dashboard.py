"""The live page at ``/``, the data behind it, and the report on recent requests, which only administrators get."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

import msgspec
from litestar import Request, Response, get
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.params import FromPath

from radixkv.cache import Snapshot
from radixkv.server.access import ANYONE, is_loopback
from radixkv.server.activity import public
from radixkv.server.errors import Forbidden, InvalidRequest
from radixkv.server.frontend import Frontend
from radixkv.server.recent import Recent, since_start

REQUESTS = 100
"""Listed on the page, the newest ones."""
LEAST_SHARE = 0.01
"""Of the prompt tokens, what advice must gain to be worth a word on the page."""
MAX_NODES = 2000
DEFAULT_NODES = 500
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def dashboard_routes(frontend: Frontend, *, has_keys: bool) -> list[Any]:
    """The page's files, which tell nothing, are for all; what they show is not."""
    pages = {file.name: file.read_bytes() for file in (files("radixkv.server") / "web").iterdir() if file.is_file()}
    guards = [] if has_keys else [_check_host]
    recent = Recent(frontend)

    def shown() -> Callable[[Sequence[int]], str] | None:
        """What turns tokens into text, where that may be seen."""
        return frontend.prompt_text if frontend.show_prompts else None

    def page(name: str) -> Response[bytes]:
        return Response(pages[name], media_type=_TYPES[name.rpartition(".")[2]], headers=_HEADERS)

    @get("/", opt={"open_to_all": True})
    async def index() -> Response[bytes]:
        return page("index.html")

    @get("/web/{name:str}", opt={"open_to_all": True})
    async def web(name: FromPath[str]) -> Response[bytes]:
        return page(name) if name in pages else Response(b"", status_code=404)

    @get("/dashboard/data", opt={"administration": True}, guards=guards)
    async def data() -> Response[bytes]:
        stats = await frontend.stats()
        activity = frontend.activity
        activity.looked(stats)
        return _json(
            {
                "model": frontend.model,
                "status": frontend.status,
                "uptime_s": time.time() - frontend.started,
                "show_prompts": frontend.show_prompts,
                "totals": activity.totals | {"requests": activity.num_requests},
                "missed": activity.missed,
                "now": {name: stats[name] for name in ("running", "waiting", "blocks_total", "blocks_free", "blocks_cached",
                                                       "blocks_locked", "block_size", "evicted_blocks")},
                "series": activity.series(),
                "requests": [public(request, shown()) for request in islice(reversed(activity.requests), REQUESTS)],
                "advice": [advice for advice in await recent.advice(stats) if advice.share >= LEAST_SHARE],
            }
        )  # fmt: skip

    @get("/report/recent", opt={"administration": True}, guards=guards)
    async def report() -> Response[bytes]:
        """What ``radixkv report URL`` asks for beside the counters of ``/report``."""
        stats = await frontend.stats()
        return _json(
            {
                "since_start": since_start(frontend.activity, stats) | {"uptime_s": time.time() - frontend.started},
                "over_time": frontend.activity.timeline.parts(),
                "recent": await recent.report(stats),
            }
        )

    @get("/snapshot", opt={"administration": True}, guards=guards)
    async def snapshot(request: Request[Any, Any, Any]) -> Response[bytes]:
        max_nodes = _number(request.query_params.get("max_nodes", DEFAULT_NODES))
        snapshots = await frontend.snapshots(max_nodes)
        return _json(
            {
                "show_prompts": frontend.show_prompts,
                "workers": [_snapshot(snapshot) | {"worker": index} for index, snapshot in snapshots.items()],
            }
        )

    def _snapshot(snapshot: Snapshot) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.to_builtins(snapshot)  # asdict() would hold the event loop for 50 ms
        for node in fields["nodes"]:
            ids = node.pop("first_tokens")
            if (show := shown()) is not None:
                node["text"] = show(ids)
        return fields

    return [index, web, data, report, snapshot]


def _number(given: Any) -> int:
    try:
        number = int(given)
    except ValueError:
        number = 0
    if not 1 <= number <= MAX_NODES:
        raise InvalidRequest(f"max_nodes must be between 1 and {MAX_NODES}, got {str(given)[:80]!r}", param="max_nodes")
    return number


async def _check_host(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """Without keys, a browser on this machine may look, but not for the page of another host whose name now points here."""
    assert connection.state.caller is ANYONE
    host = connection.headers.get("host", "")
    if not is_loopback(urlsplit(f"//{host}").hostname or ""):
        raise Forbidden(f"the live page is not shown to {host[:80]!r}: without API keys it is for this machine only")


def _json(value: Any) -> Response[bytes]:
    return Response(msgspec.json.encode(value), media_type="application/json", headers={"cache-control": "no-store"})
