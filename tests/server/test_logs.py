"""What the server logs: every line whole in the format asked for, one for each request, and nothing that was said in one."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio
from openai import OpenAI

from radixkv.sampling_params import SamplingParams
from radixkv.server import logs
from radixkv.server.access import ANYONE
from radixkv.server.client import Client
from radixkv.server.launcher import serve
from radixkv.server.messages import Submit
from radixkv.server.zmq_api import ZmqDoor

SECRET = "what-nobody-else-may-read"  # noqa: S105


@pytest.fixture(scope="module")
def json_server(module_start: Any) -> Iterator[Any]:
    server = module_start(log_format="json", zmq="tcp://127.0.0.1:*")
    lines = wait_for(lambda: [line for line in lines_of(server) if "Serving on" in line["message"]])
    words = lines[0]["message"].split()
    server.url, server.endpoint = words[2].removesuffix("/v1"), words[4]
    return server


def wait_for(condition: Callable[[], Any]) -> Any:
    for _ in range(1000):
        if result := condition():
            return result
        time.sleep(0.02)
    raise AssertionError("waited for 20 seconds")


def lines_of(server: Any) -> list[dict[str, Any]]:
    """All lines, every one of which must be a JSON object."""
    return [json.loads(line) for line in server.log.splitlines()]


def line_of(server: Any, request_id: str) -> dict[str, Any]:
    """The one access line of a request."""
    lines = wait_for(
        lambda: [line for line in lines_of(server) if line["logger"] == "radixkv.access" and line["request_id"] == request_id]
    )
    assert len(lines) == 1
    return lines[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_one_line_that_says_what_it_was_and_how_it_went(json_server: Any, stream: bool) -> None:
    name = f"told-{stream}"
    body = {"prompt": f"{name} {SECRET}", "max_tokens": 5, "stream": stream}
    response = httpx.post(f"{json_server.url}/v1/completions", json=body, headers={"x-request-id": name})
    assert response.headers["x-request-id"] == name
    line = line_of(json_server, name)
    assert (line["level"], line["message"]) == ("info", "POST /v1/completions 200")
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/completions", 200)
    assert line["completion_tokens"] == 5
    assert line["cached_tokens"] == 0
    assert line["prompt_tokens"] > 5
    assert 0 < line["ttft"] <= line["duration"] < 20
    assert "error" not in line
    assert line["time"].endswith("+00:00")


def test_what_is_refused_or_left_by_its_client_says_so(json_server: Any) -> None:
    def post(name: str, body: Any, path: str = "/v1/completions", **options: Any) -> dict[str, Any]:
        httpx.post(f"{json_server.url}{path}", json=body, headers={"x-request-id": name}, **options)
        return line_of(json_server, name)

    assert post("bad", {"prompt": "x", "max_tokens": 0})["error"] == "invalid_request"
    assert post("other", {"prompt": "x", "model": "other"})["error"] == "model_not_found"
    no_path = post("no-path", {}, f"/v1/{SECRET}")
    assert (no_path["route"], no_path["status"], no_path["error"]) == ("none", 404, "invalid_request")
    refused = post("refused", {"prompt": [3, 3, 3]})
    assert (refused["status"], refused["error"]) == (400, "invalid_request")
    with httpx.stream("POST", f"{json_server.url}/v1/completions", json={"prompt": "x", "max_tokens": 2000, "stream": True},
                      headers={"x-request-id": "left"}) as stream:  # fmt: skip
        next(stream.iter_lines())
    left = line_of(json_server, "left")
    assert (left["status"], left["error"]) == (200, "aborted")
    assert 1 <= left["completion_tokens"] < 2000


def test_a_client_that_leaves_before_its_body_is_whole_is_no_failure_of_the_server(json_server: Any) -> None:
    with socket.create_connection(("127.0.0.1", int(json_server.url.rpartition(":")[2]))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: cut\r\ncontent-length: 100\r\n\r\n{")
    line = line_of(json_server, "cut")
    assert (line["status"], line["error"]) == (499, "aborted")
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="5xx"}' not in httpx.get(
        f"{json_server.url}/metrics"
    ).text  # fmt: skip


def test_a_method_that_nobody_knows_is_not_repeated_in_logs_and_labels(json_server: Any) -> None:
    for path in ("/v1/completions", "/nowhere", "/health"):
        response = httpx.request(SECRET.upper(), json_server.url + path, headers={"x-request-id": f"method{path}"})
        assert response.status_code in (404, 405)
        line = line_of(json_server, f"method{path}")
        assert (line["method"], line["error"]) == ("other", "invalid_request")
    assert SECRET.upper() not in httpx.get(f"{json_server.url}/metrics").text + json_server.log


@pytest.mark.parametrize("name", ["", "a b", "a\tb", "x" * 65, "naïve", '"quoted"', "{}"])
def test_an_id_that_is_too_long_or_could_break_a_line_is_replaced(json_server: Any, name: str) -> None:
    response = httpx.get(f"{json_server.url}/v1/models", headers=[(b"x-request-id", name.encode())])
    assert response.status_code == 200
    given = response.headers["x-request-id"]
    assert given != name
    assert len(given) == 32
    assert line_of(json_server, given)["route"] == "/v1/models"


def test_the_openai_package_finds_the_id_in_answers_and_in_errors(json_server: Any) -> None:
    with OpenAI(base_url=f"{json_server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        answer = client.completions.create(model=client.models.list().data[0].id, prompt="x", max_tokens=1)
        assert answer._request_id is not None
        assert line_of(json_server, answer._request_id)["route"] == "/v1/completions"


def test_a_request_over_zeromq_has_a_line_too(json_server: Any) -> None:
    def count() -> int:
        return len([line for line in lines_of(json_server) if line["message"] == "zmq submit"])

    before = count()
    with Client(json_server.endpoint, timeout=20) as client:
        client.generate(SECRET, SamplingParams(max_tokens=3))
    wait_for(lambda: count() == before + 1)
    line = next(line for line in reversed(lines_of(json_server)) if line["message"] == "zmq submit")
    assert line["completion_tokens"] == 3
    assert line["request_id"]


def test_what_is_refused_over_zeromq_says_so(json_server: Any) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.connect(json_server.endpoint)

        def send(**message: Any) -> None:
            client.send_multipart([b"radixkv/1", msgspec.msgpack.encode(message)])

        send(type="submit", id="zmq-misspelt", promt=SECRET)
        assert line_of(json_server, "zmq-misspelt")["error"] == "invalid_request"
        send(type="submit", id="zmq-bad", prompt=SECRET, params={"max_tokens": 0})
        assert line_of(json_server, "zmq-bad")["error"] == "invalid_request"


def test_a_request_cancelled_over_zeromq_before_it_generates_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Busy:
        async def submit(self, *_: object, **__: object) -> None:
            await asyncio.sleep(60)

    async def run() -> None:
        with zmq.asyncio.Context() as context:
            door = ZmqDoor(context, f"ipc://{tmp_path}/s")
            serving = asyncio.create_task(door._serve(Busy(), b"client", ANYONE, Submit(id="left", prompt="x")))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            serving.cancel()
            await asyncio.wait([serving])
            door.close()

    with caplog.at_level(logging.INFO, "radixkv.access"):
        asyncio.run(run())
    (record,) = caplog.records
    assert record.fields["error"] == "aborted"  # type: ignore[attr-defined]


def test_the_worker_logs_the_same_way_and_names_the_request(json_server: Any) -> None:
    response = httpx.post(f"{json_server.url}/v1/completions", json={"prompt": [7, 7, 7]}, headers={"x-request-id": "seven"})
    assert response.status_code == 500
    assert line_of(json_server, "seven")["error"] == "internal"
    line = next(line for line in lines_of(json_server) if line["logger"] == "radixkv.worker")
    assert line["level"] == "error"
    assert "request seven." in line["message"]
    assert "RuntimeError: three sevens" in line["exception"]


def test_probes_and_scrapes_have_no_line(json_server: Any) -> None:
    before = len(lines_of(json_server))
    for path in ("/health", "/ready", "/metrics"):
        assert httpx.get(json_server.url + path).headers["x-request-id"]
    httpx.get(f"{json_server.url}/v1/models", headers={"x-request-id": "last"})
    line_of(json_server, "last")
    assert len(lines_of(json_server)) == before + 1


def test_what_the_launcher_says_of_a_dead_worker_is_json_and_no_line_holds_a_prompt(json_server: Any) -> None:
    import os

    os.kill(json_server.worker_pids[0], signal.SIGKILL)
    wait_for(lambda: [line for line in lines_of(json_server) if line["message"] == "the engine process is back"])
    assert json_server.stop() == 0
    lines_of(json_server)
    assert SECRET not in json_server.log


def test_text_is_the_default_and_shows_the_same_fields(http: httpx.Client, server: Any) -> None:
    body = {"prompt": "x", "max_tokens": 2}
    assert http.post("/v1/completions", json=body, headers={"x-request-id": "as-text"}).status_code == 200
    line = wait_for(lambda: [line for line in server.log.splitlines() if "as-text" in line])[0]
    assert "radixkv.access INFO: POST /v1/completions 200 request_id=as-text " in line
    assert " completion_tokens=2" in line


def test_a_record_outside_of_requests_has_no_request_id_and_an_exception_stays_in_its_line() -> None:
    try:
        raise RuntimeError("a\nb")
    except RuntimeError:
        record = logging.LogRecord("a.logger", logging.ERROR, "file", 1, "it %s", ("failed",), sys.exc_info())
    line = json.loads(logs.JsonFormatter().format(record))
    assert {name: line[name] for name in ("level", "logger", "message")} == {
        "level": "error", "logger": "a.logger", "message": "it failed"}  # fmt: skip
    assert "RuntimeError: a\nb" in line["exception"]
    assert "request_id" not in line
    assert "\n" not in logs.JsonFormatter().format(record)
    assert logs.TextFormatter().format(record).splitlines()[0].endswith("a.logger ERROR: it failed")


def test_another_format_is_refused_naming_the_option() -> None:
    from radixkv.config import EngineConfig

    with pytest.raises(ValueError, match="log-format must be text or json, got 'xml'"):
        serve(EngineConfig(), log_format="xml")  # type: ignore[arg-type]
