"""Who gets in, through either door, and as whom."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq
import zmq.auth
from openai import AuthenticationError, OpenAI, PermissionDeniedError

from radixkv.report.report import fetch_report
from radixkv.sampling_params import SamplingParams
from radixkv.server.access import ApiKeys, Caller, is_loopback
from radixkv.server.client import AsyncClient, Client
from radixkv.server.curve import CurveServer
from radixkv.server.errors import Forbidden, Unavailable

OPERATOR, TENANT, FROM_ENVIRONMENT = "operator-0123456789", "tenant-0123456789ab", "environment-0123456789"
SHORT = SamplingParams(max_tokens=1)


def write_keys(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


# --- key files ---------------------------------------------------------------------------------------------------------------


def test_a_file_holds_keys_namespaces_and_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXKV_API_KEY", FROM_ENVIRONMENT)
    keys = ApiKeys.load(write_keys(tmp_path / "keys", f"# ours\n\n{OPERATOR}\n  {TENANT}   team a  \n"))
    assert keys is not None
    assert keys.caller(OPERATOR) == Caller()
    assert keys.caller(TENANT) == Caller("team a")
    assert keys.caller(FROM_ENVIRONMENT) == Caller()
    assert keys.caller("") is keys.caller("#") is keys.caller(OPERATOR[:-1]) is keys.caller(OPERATOR + "x") is None


def test_keys_leave_the_environment_so_that_no_child_inherits_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXKV_API_KEY", FROM_ENVIRONMENT)
    assert ApiKeys.load(None) is not None
    assert ApiKeys.load(None) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no key"),
        ("# none\n", "holds no key"),
        ("short team\n", "line 1: a key must be 16 or more"),
        (f"{OPERATOR}\nschlüssel-0123456789\n", "line 2: a key must be .* ASCII"),
        (f"{OPERATOR}\n{OPERATOR} team\n", "line 2: this key stands on an earlier line"),
    ],
)
def test_a_file_that_is_no_list_of_keys_is_refused_without_quoting_it(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        ApiKeys.load(write_keys(tmp_path / "keys", text))
    assert not any(word in str(caught.value) for word in re.findall(r"\S{5,}", text) if word != "team")


@pytest.mark.parametrize(("mode", "fine"), [(0o600, True), (0o640, True), (0o644, False), (0o620, False), (0o602, False)])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int, fine: bool) -> None:
    path = write_keys(tmp_path / "keys", OPERATOR)
    path.chmod(mode)
    if fine:
        assert ApiKeys.load(path) is not None
    else:
        with pytest.raises(ValueError, match=rf"open to others \(mode 0{mode:o}\): chmod 600"):
            ApiKeys.load(path)


def test_a_tenant_is_held_to_its_namespace() -> None:
    tenant = Caller("team")
    assert tenant.namespace_for("") == tenant.namespace_for("team") == "team"
    with pytest.raises(Forbidden, match="namespace must be left out or 'team'"):
        tenant.namespace_for("other")
    with pytest.raises(Forbidden, match="key without a namespace"):
        tenant.check_administrator()
    assert Caller().namespace_for("other") == "other"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),  # noqa: S104
     ("10.0.0.1", False), ("fe80::1%eth0", False), ("localhost.example.org", False), ("", False), ("*", False)],
)  # fmt: skip
def test_what_is_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


# --- HTTP --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def curve_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As docs/security.md says to make them: a server, a client, a tenant, and a stranger whom the server doesn't know."""
    folder = tmp_path_factory.mktemp("curve")
    (folder / "clients").mkdir()
    for name in ("server", "client", "tenant", "stranger"):
        public, secret = map(Path, zmq.auth.create_certificates(folder, name))
        secret.chmod(0o600)
        if name in ("client", "tenant"):
            public.rename(folder / "clients" / public.name)
    tenant = folder / "clients" / "tenant.key"
    tenant.write_text(tenant.read_text().replace("metadata\n", 'metadata\n    namespace = "team"\n'))
    return folder


@pytest.fixture(scope="module")
def locked(module_start: Any, tmp_path_factory: pytest.TempPathFactory, curve_keys: Path) -> Iterator[Any]:
    """A server that asks for keys at both doors, and listens on every address of this machine."""
    keys = write_keys(tmp_path_factory.mktemp("keys") / "keys", f"{OPERATOR}\n{TENANT} team\n")
    curve = {"zmq_server_key": str(curve_keys / "server.key_secret"), "zmq_client_keys": str(curve_keys / "clients")}
    server = module_start(host="0.0.0.0", api_keys=str(keys), zmq="tcp://0.0.0.0:*", **curve).wait_ready()  # noqa: S104
    yield server
    assert server.stop() == 0
    assert "Traceback" not in server.log


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


ROUTES = [("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/v1/responses"), ("POST", "/tokenize"),
          ("POST", "/detokenize"), ("GET", "/tokenizer_info"), ("GET", "/v1/models"), ("GET", "/v1/models/x"),
          ("GET", "/metrics"), ("GET", "/report"), ("GET", "/report/recent"), ("GET", "/dashboard/data"), ("GET", "/snapshot"),
          ("POST", "/reset_prefix_cache")]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("headers", [{}, bearer("wrong-0123456789"), bearer("x"), {"authorization": f"Basic {OPERATOR}"}], ids=str)
def test_without_a_key_nothing_answers(locked: Any, method: str, path: str, headers: dict[str, str]) -> None:
    response = httpx.request(method, locked.url + path, headers=headers, content=b"{")
    assert response.status_code == 401
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
    assert "API key" in error["message"]
    assert "wrong-" not in response.text
    assert response.headers["www-authenticate"] == "Bearer"


def test_no_routes_but_health_readiness_and_the_empty_page_are_open(locked: Any) -> None:
    """Whatever routes there are: one that is added must be closed unless it says otherwise, and then stand here."""
    from radixkv.server.http_api import create_app

    app = create_app(None)  # type: ignore[arg-type]
    handlers = [handler for route in app.routes for handler in getattr(route, "route_handlers", [])]
    is_open = {path for handler in handlers if handler.opt.get("open_to_all") for path in handler.paths}
    assert is_open == {"/health", "/ready", "/", "/web/{name:str}"}  # the last two are the live page, without its data
    assert httpx.get(f"{locked.url}/health").status_code == 200


def test_openais_client_gets_in_with_its_key_and_learns_what_is_wrong_otherwise(locked: Any) -> None:
    client = OpenAI(base_url=f"{locked.url}/v1", api_key=OPERATOR, max_retries=0)
    model = client.models.list().data[0].id
    assert client.completions.create(model=model, prompt="abc", max_tokens=3).choices[0].text == "abc"
    with pytest.raises(AuthenticationError, match="not known"):
        client.with_options(api_key="wrong-0123456789").models.list()
    with pytest.raises(PermissionDeniedError, match="namespace must be left out or 'team'") as caught:
        client.with_options(api_key=TENANT).completions.create(model=model, prompt="x", extra_body={"namespace": "other"})
    assert caught.value.param == "namespace"


MESSAGES = [{"role": "user", "content": "a tenant's words"}]
PROMPTS = {
    "completions": {"prompt": "a tenant's prompt", "max_tokens": 1},
    "chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "responses": {"input": "a tenant's answer is wanted", "max_output_tokens": 1},
}


@pytest.mark.parametrize("path", PROMPTS)
def test_a_tenants_requests_run_in_its_namespace_whether_they_name_it_or_not(locked: Any, path: str) -> None:
    httpx.post(f"{locked.url}/reset_prefix_cache", headers=bearer(OPERATOR))

    def cached(key: str, **fields: Any) -> int:
        usage = httpx.post(f"{locked.url}/v1/{path}", json=PROMPTS[path] | fields, headers=bearer(key)).json()["usage"]
        details = usage["input_tokens_details" if path == "responses" else "prompt_tokens_details"]
        return int(details["cached_tokens"])

    assert cached(OPERATOR) == 0
    assert cached(TENANT) == 0
    assert cached(TENANT, namespace="team") > 0
    assert cached(OPERATOR, namespace="team") > 0
    assert cached(OPERATOR, namespace="other") == 0


@pytest.mark.parametrize("fields", [{"namespace": "other"}, {"cache_salt": "pepper"}], ids=str)
def test_a_tenant_may_not_ask_for_another_namespace(locked: Any, fields: dict[str, str]) -> None:
    for path, body in PROMPTS.items():
        response = httpx.post(f"{locked.url}/v1/{path}", json=body | fields, headers=bearer(TENANT))
        assert response.status_code == 403
        assert response.json()["error"]["param"] == next(iter(fields))
        assert "'team'" in response.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path"), ROUTES[-3:])
def test_a_tenant_is_no_administrator(locked: Any, method: str, path: str) -> None:
    assert httpx.request(method, locked.url + path, headers=bearer(TENANT)).status_code == 403
    assert httpx.request(method, locked.url + path, headers=bearer(OPERATOR)).status_code < 300


def test_the_report_command_takes_its_key_from_the_environment(locked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RADIXKV_API_KEY", raising=False)
    with pytest.raises(ConnectionError, match="set RADIXKV_API_KEY"):
        fetch_report(locked.url)
    monkeypatch.setenv("RADIXKV_API_KEY", OPERATOR)
    with pytest.raises(ValueError, match="is no radixkv server"):  # it got in: the echo worker's counters are not all there
        fetch_report(locked.url)


def test_keys_are_in_no_log_and_no_command_line(locked: Any) -> None:
    httpx.get(f"{locked.url}/report", headers=bearer(OPERATOR))
    httpx.get(f"{locked.url}/report", headers=bearer("wrong-0123456789"))
    pids = [locked.process.pid, *locked.worker_pids]
    seen = locked.log.encode() + b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)
    assert not any(key.encode() in seen for key in (OPERATOR, TENANT, "wrong-0123456789"))


@pytest.mark.parametrize(("origin", "status"), [("http://localhost:3000", 200), ("https://evil.example", 403), ("null", 403)])
def test_without_keys_pages_of_other_machines_may_not_use_a_local_server(server: Any, origin: str, status: int) -> None:
    for path in ("/v1/models", "/report"):
        assert httpx.get(server.url + path, headers={"origin": origin}).status_code == status


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"host": "0.0.0.0"}, "host must be a loopback address.* --api-keys FILE, or set RADIXKV_API_KEY"),  # noqa: S104
        ({"zmq": "tcp://0.0.0.0:5555"}, "zmq must be a loopback address.* --zmq-server-key and --zmq-client-keys"),
        ({"zmq": "tcp://127.0.0.1:5555", "api_keys": "KEYS"}, "zmq must be ipc:// where API keys are set"),
        ({"zmq_server_key": "KEYS"}, "must be given both"),
        ({"api_keys": "/no/such/file"}, "No such file"),
        ({"max_waiting": 0}, "max-waiting must be at least 1"),
        ({"request_timeout": -1}, "request-timeout must be above 0"),
    ],
    ids=str,
)
def test_a_server_that_would_be_open_to_strangers_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], problem: str
) -> None:
    from radixkv.config import EngineConfig
    from radixkv.server.launcher import serve

    monkeypatch.delenv("RADIXKV_API_KEY", raising=False)
    keys = write_keys(tmp_path / "keys", OPERATOR)
    with pytest.raises((ValueError, OSError), match=problem):
        serve(EngineConfig(model="/no/such/model"), port=0, **{k: str(keys) if v == "KEYS" else v for k, v in arguments.items()})


# --- ZeroMQ ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def endpoint(locked: Any) -> str:
    found = next(word for word in locked.log.split() if word.startswith("tcp://"))
    return found.replace("0.0.0.0", "127.0.0.1")  # noqa: S104


@pytest.fixture
def connect(endpoint: str, curve_keys: Path) -> Iterator[Any]:
    clients = []

    def open_client(name: str, server: str = "server.key") -> Client:
        clients.append(Client(endpoint, timeout=5, server_key=curve_keys / server, client_key=curve_keys / f"{name}.key_secret"))
        return clients[-1]

    yield open_client
    for client in clients:
        client.close()


def test_a_client_with_known_keys_gets_in_both_sync_and_async(connect: Any, endpoint: str, curve_keys: Path) -> None:
    assert connect("client").generate("abc", SHORT).text == "a"
    assert connect("client").stats()["requests"] > 0

    async def ask() -> str:
        keys = {"server_key": curve_keys / "server.key", "client_key": curve_keys / "client.key_secret"}
        async with AsyncClient(endpoint, timeout=5, **keys) as client:
            return (await client.generate("abc", SHORT)).text

    assert asyncio.run(ask()) == "a"


def test_a_client_is_held_to_the_namespace_that_its_public_file_names(connect: Any) -> None:
    operator, tenant = connect("client"), connect("tenant")
    prompt = "a prompt over ZeroMQ"
    assert operator.generate(prompt, SHORT).usage.cached_tokens == 0
    assert tenant.generate(prompt, SHORT).usage.cached_tokens == 0
    assert operator.generate(prompt, SHORT, namespace="team").usage.cached_tokens > 0
    with pytest.raises(Forbidden, match="'team'"):
        tenant.generate(prompt, SHORT, namespace="other")
    for administration in (tenant.stats, tenant.reset_cache):
        with pytest.raises(Forbidden, match="without a namespace"):
            administration()
    operator.reset_cache()


@pytest.mark.parametrize(("name", "server"), [("stranger", "server.key"), ("client", "stranger.key")])
def test_an_unknown_client_and_a_server_that_is_another_hear_nothing(
    connect: Any, monkeypatch: pytest.MonkeyPatch, name: str, server: str
) -> None:
    monkeypatch.setattr("radixkv.server.client.SILENCE_SECONDS", 0.5)
    with pytest.raises(Unavailable, match="no sign of life"):
        connect(name, server).stats()
    monkeypatch.undo()
    assert connect("client").generate("abc", SHORT).text == "a"


def test_a_client_without_keys_hears_nothing(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.server.client.SILENCE_SECONDS", 0.5)
    with Client(endpoint) as client, pytest.raises(Unavailable, match="no sign of life"):
        client.stats()


def test_key_files_that_are_none_are_refused(tmp_path: Path, curve_keys: Path) -> None:
    public, secret = curve_keys / "server.key", curve_keys / "server.key_secret"
    public.chmod(0o600)
    with pytest.raises(ValueError, match=r"a \.key_secret file"):
        CurveServer.load(public, curve_keys / "clients")
    with pytest.raises(ValueError, match=r"no client's \.key file"):
        CurveServer.load(secret, tmp_path)
    with pytest.raises(ValueError, match="both or neither"):
        Client("tcp://127.0.0.1:9", server_key=public)
    secret.chmod(0o644)
    with pytest.raises(ValueError, match="open to others"):
        CurveServer.load(secret, curve_keys / "clients")
    secret.chmod(0o600)
