"""Workers that die: who goes on, who waits and who is refused, simulated and with real processes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.request import RequestOutput
from radixkv.server.client import Client
from radixkv.server.errors import ServerError, Unavailable
from radixkv.server.messages import Generate
from radixkv.server.metrics import Metrics
from radixkv.server.recovery import PARTS, Recovery
from radixkv.server.routing import Router
from radixkv.server.worker_client import Sink

LENGTH = 100


class SimulatedWorker:
    """Token ``i`` of a request is ``i``; each ``step`` gives every request that it runs one, unless one of them kills it."""

    def __init__(self, killers: dict[str, int]) -> None:
        self._killers = killers
        self.running: dict[str, tuple[int, Sink]] = {}
        self.given: dict[str, int] = {}

    def generate(self, request: Generate, sink: Sink) -> None:
        assert request.request_id not in self.given, "an id that may still have tokens under way"
        self.running[request.request_id] = len(request.output_token_ids), sink
        self.given[request.request_id] = 0
        assert request.output_token_ids == list(range(len(request.output_token_ids)))

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def step(self) -> bool:
        """False where it died."""
        for id in self.running:
            if self._killers.get(id.partition("-")[0]) == self.given[id]:
                return False
        for id, (count, sink) in list(self.running.items()):
            if id not in self.running:
                continue
            finish_reason = "length" if count + 1 == LENGTH else None
            self.given[id] += 1
            self.running[id] = count + 1, sink
            if finish_reason:
                del self.running[id]
            sink(
                RequestOutput(
                    request_id=id, token_ids=[count], finish_reason=finish_reason, num_prompt_tokens=1, num_cached_tokens=0
                )
            )
        return True


class Simulation:
    """``num_workers`` workers, each replaced ``restart_steps`` steps after its death."""

    def __init__(self, killers: dict[str, int], num_workers: int = 1, restart_steps: int = 0) -> None:
        self._killers = killers
        self._restart_steps = restart_steps
        self._restarting: list[int] = []
        self.recovery = Recovery(Metrics("model"), Router(16) if num_workers > 1 else None)
        self.workers: list[SimulatedWorker] = []
        for _ in range(num_workers):
            self.start_worker()
        self.received: dict[str, list[RequestOutput | ServerError]] = {}
        self.deaths = 0

    @property
    def worker(self) -> SimulatedWorker:
        (worker,) = self.workers
        return worker

    def start_worker(self) -> None:
        self.workers.append(SimulatedWorker(self._killers))
        self.recovery.attach(self.workers[-1])  # type: ignore[arg-type]

    def submit(self, ids: Iterable[str]) -> None:
        for id in ids:
            received = self.received[id] = []
            self.recovery.generate(Generate(request_id=id, token_ids=[1], params=SamplingParams()), received.append)

    def die(self, worker: SimulatedWorker | None = None) -> None:
        self.deaths += 1
        assert self.deaths < 100
        worker = worker or self.workers[0]
        self.workers.remove(worker)
        self.recovery.worker_died(worker, "was killed")  # type: ignore[arg-type]
        self._restarting.append(self._restart_steps)
        self._restart()

    def step(self) -> None:
        for worker in self.workers.copy():
            if not worker.step():
                self.die(worker)
        self._restart()

    def _restart(self) -> None:
        for steps in self._restarting.copy():
            self._restarting.remove(steps)
            if steps:
                self._restarting.append(steps - 1)
            else:
                self.start_worker()

    def run(self) -> None:
        while self._restarting or any(worker.running for worker in self.workers):
            self.step()
        assert not self.recovery.trying

    def check(self) -> None:
        """Everybody got each token once and in order; killers may have got an error, and did if they never got past a token."""
        for id, received in self.received.items():
            tokens = [token for output in received if isinstance(output, RequestOutput) for token in output.token_ids]
            assert tokens == list(range(len(tokens)))
            refused = isinstance(received[-1], ServerError)
            assert len(received) == len(tokens) + refused
            assert refused if self._killers.get(id) == 0 else not refused or id in self._killers
            assert refused or len(tokens) == LENGTH


@pytest.mark.parametrize("bystanders", [0, 1, PARTS, 63, 999])
def test_a_request_that_kills_workers_is_found_in_few_deaths_and_refused_alone(bystanders: int) -> None:
    simulation = Simulation({"bad": 0})
    simulation.submit(["bad", *map(str, range(bystanders))])
    simulation.run()
    simulation.check()
    # Alone, three times; in a crowd, twice with it, once for each time that a part of it is cut in parts, and twice alone.
    halvings = sum(bystanders + 1 > PARTS**i for i in (1, 2, 3))
    assert simulation.deaths == (3 if not bystanders else 4 + halvings)
    assert "died" in str(simulation.received["bad"][-1])


def test_a_request_that_gets_on_a_little_before_it_kills_is_found_too() -> None:
    simulation = Simulation({"bad": 7})
    simulation.submit(["bad", *map(str, range(20))])
    simulation.run()
    simulation.check()
    assert isinstance(simulation.received["bad"][-1], ServerError)


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(
        st.tuples(st.just({}), st.lists(st.integers(0, 30), max_size=3)),
        st.tuples(
            st.dictionaries(st.integers(0, 29).map(str), st.integers(0, 20), max_size=3), st.lists(st.integers(0, 30), max_size=1)
        ),
    ),
    st.integers(0, 20),
)
def test_only_killers_are_refused_and_no_other_request_loses_or_repeats_a_token(
    faults: tuple[dict[str, int], list[int]], later: int
) -> None:
    killers, kills = faults
    simulation = Simulation(killers)
    ids = list(map(str, range(30)))
    simulation.submit(ids[later:])
    for steps in kills:  # from outside: so few that they can't hit one request alone twice
        for _ in range(steps):
            if not simulation.worker.step():
                simulation.die()
        simulation.die()
    simulation.submit(ids[:later])
    simulation.run()
    simulation.check()


def test_a_request_that_workers_die_under_again_and_again_while_it_gets_on_is_not_refused() -> None:
    simulation = Simulation({})
    simulation.submit(["long"])
    for _ in range(4):
        for _ in range(9):
            simulation.worker.step()
        simulation.die()
    simulation.run()
    simulation.check()


def test_new_requests_wait_while_suspects_are_tried_and_a_suspect_that_is_aborted_holds_nobody_up() -> None:
    simulation = Simulation({})
    simulation.submit(["a", "b"])
    simulation.die()
    simulation.die()
    assert simulation.recovery.trying
    simulation.submit(["new"])
    assert len(simulation.worker.running) == 1
    simulation.recovery.abort(["a"])
    assert list(simulation.worker.running) == ["b-3"]
    simulation.recovery.abort(["b"])
    assert list(simulation.worker.running) == ["new-1"]


# --- several workers ---------------------------------------------------------------------------------------------------------


def test_where_one_of_two_workers_dies_its_requests_go_on_on_the_other_and_no_other_is_sent_again() -> None:
    simulation = Simulation({}, num_workers=2, restart_steps=1000)
    simulation.submit(map(str, range(8)))
    one, other = simulation.workers
    assert one.running
    theirs = dict(other.running)
    moved = {id.partition("-")[0] for id in one.running}
    simulation.step()
    simulation.die(one)
    assert list(other.running) == [*theirs, *(f"{id}-2" for id in sorted(moved))]
    assert not simulation.recovery.trying
    simulation.submit(["new"])
    assert "new-1" in other.running
    for _ in range(LENGTH):
        simulation.step()
    simulation.check()


@pytest.mark.parametrize("restart_steps", [0, 5])
@pytest.mark.parametrize("bystanders", [0, 20, 200])
def test_a_request_that_kills_workers_is_tried_on_a_new_one_while_the_others_serve(bystanders: int, restart_steps: int) -> None:
    simulation = Simulation({"bad": 0}, num_workers=3, restart_steps=restart_steps)
    simulation.submit(["bad", *map(str, range(bystanders))])
    while not simulation.received["bad"]:
        simulation.step()
        assert not simulation.recovery.trying, "all have to wait"
    simulation.run()
    simulation.check()
    assert isinstance(simulation.received["bad"][-1], ServerError)
    assert simulation.deaths <= 6


@settings(max_examples=70, deadline=None)
@given(
    killers=st.dictionaries(st.integers(0, 29).map(str), st.integers(0, 20), max_size=3),
    kills=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2)), max_size=1),
    later=st.integers(0, 20),
    num_workers=st.integers(2, 4),
    restart_steps=st.integers(0, 30),
)
def test_with_several_workers_only_killers_are_refused_and_no_other_request_loses_or_repeats_a_token(
    killers: dict[str, int], kills: list[tuple[int, int]], later: int, num_workers: int, restart_steps: int
) -> None:
    simulation = Simulation(killers, num_workers, restart_steps)
    ids = list(map(str, range(30)))
    simulation.submit(ids[later:])
    for steps, which in kills:
        for _ in range(steps):
            simulation.step()
        if simulation.workers:
            simulation.die(simulation.workers[which % len(simulation.workers)])
    simulation.submit(ids[:later])
    simulation.run()
    simulation.check()


def test_where_no_new_worker_starts_a_living_one_tries_the_suspects_once_it_has_ended_what_it_runs() -> None:
    simulation = Simulation({"bad": 0}, num_workers=3, restart_steps=10**6)
    simulation.submit(["good", "bad"])
    for _ in range(2):
        simulation.step()
    assert simulation.deaths == 2
    (last,) = simulation.workers
    simulation.submit(["other"])
    assert not any(id.startswith("bad") for id in last.running)
    simulation.recovery.no_worker_soon()
    simulation.submit(["late"])
    running = list(last.running)
    assert "other-1" in running
    assert "late-1" not in running
    while simulation.workers:
        simulation.step()
    assert isinstance(simulation.received["bad"][-1], ServerError)
    assert len(simulation.received["other"]) == LENGTH
    simulation.start_worker()
    for _ in range(LENGTH):
        simulation.step()
    simulation.check()


# --- real processes ----------------------------------------------------------------------------------------------------------


def metric(server: Any, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith((f"radixkv_{name} ", f"vllm:{name}{{"))))


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("waited for 20 seconds")


def is_ready(server: Any) -> bool:
    return httpx.get(f"{server.url}/ready").status_code == 200


def kill_worker(server: Any) -> None:
    """Kill it and wait for the next."""
    restarts = metric(server, "worker_restarts_total")
    (worker,) = server.worker_pids
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: metric(server, "worker_restarts_total") > restarts and is_ready(server))


def streamed(server: Any, **body: Any) -> tuple[str, list[Any], str]:
    """Text, token log-probabilities and finish reason."""
    text, logprobs, reason = "", [], ""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=60) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    for event in map(json.loads, events[:-1]):
        assert "error" not in event, event
        (choice,) = event["choices"]
        text += choice["text"]
        logprobs += choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
        reason = choice["finish_reason"]
    return text, logprobs, reason


def test_kills_of_the_worker_are_not_seen_in_any_answer(start_server: Any) -> None:
    server = start_server(zmq="tcp://127.0.0.1:*").wait_ready()
    endpoint = next(word for word in server.log.split() if word.startswith("tcp://"))
    characters = "🙂é"  # of several tokens each, so that a death may come in the middle of one
    with Client(endpoint, timeout=60) as client, ThreadPoolExecutor(8) as pool:
        size = client.generate(characters, SamplingParams(max_tokens=1)).usage.prompt_tokens
        assert size > len(characters)
        whole = pool.submit(httpx.post, f"{server.url}/v1/completions", json={"prompt": "abc", "max_tokens": 900}, timeout=60)
        stream = pool.submit(streamed, server, prompt="abcd", max_tokens=800, logprobs=1)
        # Its stop string comes only at the end of the prompt, which begins again and again.
        stopped = pool.submit(streamed, server, prompt="a" * 699 + "stop!", max_tokens=1000, stop="stop!")
        seeded = pool.submit(client.generate, characters, SamplingParams(max_tokens=100 * size, seed=0), n=2)
        wait_until(lambda: server.report()["running"] == 5)
        for _ in range(2):
            time.sleep(0.2)
            kill_worker(server)
        assert whole.result().json()["choices"][0]["text"] == "abc" * 300
        assert whole.result().json()["usage"]["completion_tokens"] == 900
        assert stream.result() == ("abcd" * 200, [float(-i) for i in range(800)], "length")
        assert stopped.result() == ("a" * 699, [], "stop")
        first, second = seeded.result().choices
        assert first.text == characters * 100
        assert first.token_ids == first.token_ids[:size] * 100
        assert second.token_ids == first.token_ids[1:] + first.token_ids[:1]
    server.wait_idle()
    assert metric(server, "worker_restarts_total") == 2
    assert 5 <= metric(server, "requests_resubmitted_total") <= 10
    assert "radixkv_request_failure_total{" not in httpx.get(f"{server.url}/metrics").text
    assert "Traceback" not in server.log


def test_while_the_worker_is_replaced_requests_wait_and_health_and_readiness_tell_the_truth(start_server: Any) -> None:
    server = start_server().wait_ready()
    assert httpx.get(f"{server.url}/ready").json() == {"status": "ok"}
    (worker,) = server.worker_pids
    hold = server.folder / "hold"
    hold.touch()
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: httpx.get(f"{server.url}/health").json() != {"status": "ok"})
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/health").json() == {"status": "restarting"}
    assert httpx.head(f"{server.url}/ready").status_code == 503
    for path in ("ready", "report"):
        response = httpx.get(f"{server.url}/{path}")
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "the engine process was killed by SIGKILL; another is being started"
    assert metric(server, "engine_up") == 0
    assert metric(server, "num_requests_running") == 0
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx.post, f"{server.url}/v1/completions", json={"prompt": "abc", "max_tokens": 3}, timeout=60)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        hold.unlink()
        assert waiting.result().json()["choices"][0]["text"] == "abc"
    assert is_ready(server)
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert metric(server, "requests_resubmitted_total") == 0  # it was sent to one worker only


@pytest.mark.full
def test_requests_that_kill_the_worker_are_refused_and_all_others_live(start_server: Any) -> None:
    server = start_server(constants={"MAX_RESTART_DELAY": 0.1}).wait_ready()
    with ThreadPoolExecutor(16) as pool:
        good = [pool.submit(streamed, server, prompt="abc" + chr(97 + i), max_tokens=400) for i in range(10)]
        bad = [
            pool.submit(httpx.post, f"{server.url}/v1/completions", json={"prompt": prompt, "max_tokens": 400}, timeout=60)
            for prompt in ([4, 4, 0], [4, 4, 50], [4, 5, 10])
        ]
        for future in bad:
            assert future.result().status_code == 500
            assert "died" in future.result().json()["error"]["message"]
            assert "killed by SIGKILL" in future.result().json()["error"]["message"]
        for i, future in enumerate(good):
            assert future.result()[0] == f"abc{chr(97 + i)}" * 100
    server.wait_idle()
    assert is_ready(server)


@pytest.mark.full
def test_a_worker_that_hangs_is_replaced_and_nobody_notices_but_a_long_prompt_is_no_hang(start_server: Any) -> None:
    server = start_server(hang_timeout=2).wait_ready()
    (worker,) = server.worker_pids
    long = httpx.post(f"{server.url}/v1/completions", json={"prompt": [6, 6, 28], "max_tokens": 1}, timeout=20)
    assert long.status_code == 200
    assert server.worker_pids == [worker]
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(streamed, server, prompt="abc", max_tokens=600)
        wait_until(lambda: server.report()["running"] == 1)
        os.kill(worker, signal.SIGSTOP)
        assert stream.result()[0] == "abc" * 200
    assert "said nothing for 2 s, so it was killed" in server.log
    assert server.worker_pids != [worker]


@pytest.mark.full
def test_after_several_failures_in_a_row_the_server_gives_up_and_says_why(start_server: Any) -> None:
    server = start_server(constants={"MAX_FAILURES": 3, "MAX_RESTART_DELAY": 0.5}).wait_ready()
    (worker,) = server.worker_pids
    (server.folder / "broken").touch()
    os.kill(worker, signal.SIGKILL)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx.post, f"{server.url}/v1/completions", json={"prompt": "abc"}, timeout=60)
        assert server.process.wait(20) == 1
        assert waiting.result().status_code == 503
        assert "model folder was lost; that was failure 3 in a row" in waiting.result().json()["error"]["message"]
    assert "radixkv: the engine process did not start: model folder was lost; that was failure 3 in a row" in server.log
    assert "Traceback" not in server.log


@pytest.mark.parametrize("timeout", [20, pytest.param(0.5, marks=pytest.mark.full)])
def test_sigterm_lets_open_requests_end_in_the_time_given_and_refuses_new_ones(start_server: Any, timeout: float) -> None:
    server = start_server(drain_timeout=timeout, zmq="tcp://127.0.0.1:*").wait_ready()
    endpoint = next(word for word in server.log.split() if word.startswith("tcp://"))
    body = {"prompt": "abc", "max_tokens": 600}
    with ThreadPoolExecutor(2) as pool, Client(endpoint, timeout=20) as client:
        whole = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=20)
        over_zmq = pool.submit(client.generate, "abc", SamplingParams(max_tokens=600))
        wait_until(lambda: server.report()["running"] == 2)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_ready(server))
        assert httpx.get(f"{server.url}/health").json() == {"status": "draining"}
        refused = httpx.post(f"{server.url}/v1/completions", json=body)
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "the server is shutting down and takes no new requests"
        if timeout == 20:
            assert whole.result().json()["choices"][0]["text"] == "abc" * 200
            assert over_zmq.result().text == "abc" * 200
        else:
            message = "the server is shutting down, and the request was not over within 0.5 s"
            assert whole.result().status_code == 503
            assert whole.result().json()["error"]["message"] == message
            with pytest.raises(Unavailable, match=message):
                over_zmq.result()
    assert server.process.wait(20) == 0
    assert os.listdir(server.folder) == ["log"]
    assert "Traceback" not in server.log


@pytest.mark.full
def test_ctrl_c_does_not_wait_for_a_drain_to_end(start_server: Any) -> None:
    server = start_server().wait_ready()
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(httpx.post, f"{server.url}/v1/completions", json={"prompt": "abc", "max_tokens": 2000}, timeout=20)
        wait_until(lambda: server.report()["running"] == 1)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_ready(server))
        assert server.stop(signal.SIGINT) == 0
        assert whole.result().json()["error"]["message"] == "the server is shutting down"
