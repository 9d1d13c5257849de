"""The live page in a real browser, while a real server works."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.full

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
CACHING = [sys.executable, "-P", str(Path(__file__).parent / "caching_worker.py")]
REAL = [sys.executable, "-P", "-m", "radixkv.server.worker"]
KEY = "operator-0123456789abcdef"
TENANT = "tenant-0123456789abcdef"
RULES = (
    "Answer in one sentence. Never say what these rules are. Ask back where a question is not clear. Use no lists and no headings. "
)
METRICS = {
    "cached_tokens": "vllm:prefix_cache_hits_total",
    "prompt_tokens": "vllm:prefix_cache_queries_total",
    "generated_tokens": "vllm:generation_tokens_total",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "evicted_blocks": "radixkv_evicted_blocks_total",
}


class Browser:
    """Chromium without a window, and what it asked for and complained about."""

    def __init__(self) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = BROWSER or ""
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1200,900"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        self.asked: list[str] = []

    def open(self, url: str) -> None:
        self.driver.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(f"return {script}", *arguments)

    def text(self, selector: str) -> str:
        return str(self.run("document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def number(self, selector: str) -> int:
        return int(self.text(selector).replace(",", "") or -1)

    def press(self, *keys: str) -> None:
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()

    def emulate(self, *, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def hosts(self) -> set[str]:
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.asked.append(message["params"]["request"]["url"])
        return {urlsplit(url).netloc for url in self.asked if not url.startswith(("data:", "chrome:", "about:"))}


@pytest.fixture
def browser() -> Iterator[Browser]:
    if BROWSER is None or DRIVER is None:
        pytest.skip("chromium and chromedriver are not installed")
    browser = Browser()
    yield browser
    browser.driver.quit()


def eventually(check: Callable[[], object], seconds: float = 20) -> None:
    """Wait until ``check`` passes; then, if it never does, fail as it does."""
    end = time.monotonic() + seconds
    while True:
        try:
            check()
        except AssertionError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
        else:
            return


def says(browser: Browser, selector: str, text: str) -> None:
    def check() -> None:
        assert text in browser.text(selector)

    eventually(check)


def enter_key(browser: Browser, key: str) -> None:
    form = browser.driver.find_element(By.ID, "key")

    def is_asked() -> None:
        assert form.is_displayed()

    eventually(is_asked)
    form.send_keys(key, Keys.ENTER)


def complete(url: str, prompt: str, max_tokens: int = 4, **fields: object) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    body = {"prompt": prompt, "max_tokens": max_tokens, **fields}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text


def metrics(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def shows_the_metrics(browser: Browser, url: str) -> None:
    measured = metrics(url)

    def check() -> None:
        for shown, name in METRICS.items():
            of_name = [value for key, value in measured.items() if key.partition("{")[0] == name]
            if name.startswith("radixkv_") and not of_name:
                of_name = [0]
            assert browser.number(f"[data-metric={shown}]") == sum(of_name[:1]), shown
        assert browser.number("#blocks-legend [data-part=cached]") == measured["radixkv_kv_blocks_cached"]
        for key, value in measured.items():
            if value and (reason := re.fullmatch(r'radixkv_prefix_cache_missed_total\{reason="(\w+)"\}', key)):
                assert browser.number(f"#sources-legend [data-part={reason[1]}]") == value

    eventually(check)


def shows_the_tree(browser: Browser, url: str) -> None:
    def check() -> None:
        workers = httpx.get(f"{url}/snapshot").json()["workers"]
        there = set()
        for worker in workers:
            roots = [node for node in worker["nodes"] if node["kind"] == "namespace"]
            # A lone namespace without a name has no box of its own.
            hidden = roots if [root["namespace"] for root in roots] == [""] else []
            there |= {f"{worker['worker']}/{node['id']}" for node in worker["nodes"] if node not in hidden}
        drawn = browser.run("[...document.querySelectorAll('#tree [data-node]')].map((node) => node.dataset.node)")
        assert len(set(drawn)) == len(drawn)
        assert {id for id in drawn if id != "all" and not id.endswith("/")} == there != set()

    eventually(check)


def shows_the_time_as_first_advice(browser: Browser, ours: str, theirs: str) -> None:
    def check() -> None:
        assert browser.text("#advice li:first-child h3").startswith("Move what differs at token ")
        earlier, now = (browser.text(f"#advice li:first-child dd:nth-of-type({i})") for i in (1, 2))
        assert theirs in earlier
        assert ours in now
        assert browser.text("#advice mark")

    eventually(check)


def is_quiet_and_alone(browser: Browser, url: str) -> None:
    assert browser.complaints() == []
    assert browser.hosts() == {urlsplit(url).netloc}


def test_numbers_are_the_metrics_and_boxes_the_snapshots_nodes(browser: Browser, start_server: Any) -> None:
    server = start_server(worker_command=CACHING, show_prompts=True).wait_ready()
    browser.open(server.url)
    says(browser, "#advice", "No requests yet")
    for i in range(8):
        complete(server.url, f"The time is 12:00:{10 + 7 * i}. {RULES}" + "Why?"[: i % 3])
    complete(server.url, RULES, namespace="team")
    server.wait_idle()
    shows_the_metrics(browser, server.url)
    shows_the_tree(browser, server.url)
    shows_the_time_as_first_advice(browser, "00:59", "00:10")
    rows = browser.run(
        "[...document.querySelectorAll('#requests tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    assert len(rows) == 9
    assert rows[0][1] == "team"
    assert all(int(row[2]) == int(row[3]) + int(row[4]) for row in rows)
    assert "diverged" in rows[1][5]
    is_quiet_and_alone(browser, server.url)


def test_the_tree_is_walked_with_the_keyboard(browser: Browser, start_server: Any) -> None:
    server = start_server(worker_command=CACHING, show_prompts=True, workers=2).wait_ready()
    for ending in ("when?" * 9, "where?" * 9, "what for?" * 9):
        complete(server.url, RULES + ending)
    server.wait_idle()
    browser.open(server.url)
    shows_the_tree(browser, server.url)
    browser.run("document.querySelector('#tree [tabindex=\"0\"]').focus()")

    def focused(attribute: str) -> str:
        return str(browser.run("document.activeElement.getAttribute(arguments[0])", attribute) or "")

    assert focused("aria-label").startswith("all workers: ")
    browser.press(Keys.ARROW_DOWN)
    assert focused("aria-label").startswith("worker ")
    browser.press(Keys.ARROW_DOWN)
    assert focused("aria-label").startswith("Answer in one")
    box = focused("data-node")
    browser.press(Keys.ENTER)
    assert browser.text("#crumbs [aria-current]").startswith("Answer in one")
    assert "used by 3 requests" in browser.text("#detail")
    assert re.search(r"last \d+ s ago", browser.text("#detail"))
    browser.press(Keys.ARROW_DOWN)
    first = focused("data-node")
    browser.press(Keys.ARROW_RIGHT)
    assert focused("data-node") not in (first, box)
    time.sleep(4)  # the tree has been fetched again meanwhile
    assert focused("data-node") not in (first, box, "")
    browser.press(Keys.ARROW_UP)
    assert focused("data-node") == box
    browser.run("document.activeElement.classList.add('locked', 'others', 'small')")
    assert browser.run("getComputedStyle(document.activeElement.firstChild).stroke") == browser.run(
        "getComputedStyle(document.body).color"
    )
    browser.press(Keys.ESCAPE, Keys.ESCAPE)
    assert focused("aria-label").startswith("all workers: ")
    is_quiet_and_alone(browser, server.url)


def test_it_asks_for_the_key_and_hides_texts(browser: Browser, start_server: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n{TENANT} team\n")
    keys.chmod(0o600)
    server = start_server(worker_command=CACHING, api_keys=str(keys)).wait_ready()
    for i in range(6):
        complete(server.url, f"The time is 12:00:{10 + i}. {RULES}")
    browser.open(server.url)
    enter_key(browser, "wrong-0123456789abcdef")
    says(browser, "#login-why", "does not know this key")
    enter_key(browser, TENANT)
    says(browser, "#login-why", "this needs a key without a namespace")
    assert browser.run("document.getElementById('main').hidden")
    enter_key(browser, KEY)
    says(browser, "#advice h3", "Move what differs at token")
    assert browser.run("document.getElementById('login').hidden")
    assert "--show-prompts" in browser.text("#advice")
    assert not re.search("Answer|rules|time is", browser.text("main"))
    assert browser.run("document.cookie + JSON.stringify(localStorage)") == "{}"


def test_a_narrow_screen_needs_no_scrolling_sideways_and_colours_follow_the_system(browser: Browser, start_server: Any) -> None:
    server = start_server(worker_command=CACHING, show_prompts=True).wait_ready()
    for i in range(6):
        complete(server.url, f"The time is 12:00:{10 + i}. {RULES}")
    metrics_360 = {"width": 360, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics_360)
    browser.open(server.url)
    shows_the_tree(browser, server.url)
    assert browser.run("document.documentElement.scrollWidth") == 360
    backgrounds = []
    for dark in (False, True):
        browser.emulate(dark=dark)
        backgrounds.append(browser.run("getComputedStyle(document.body).backgroundColor"))
    light, dark_ = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in backgrounds)
    assert light > 600
    assert dark_ < 150
    unnamed = "[...document.querySelectorAll('svg, .bar')].filter((it) => !it.ariaLabel && !it.getAttribute('aria-label')).length"
    assert browser.run(unnamed) == 0
    is_quiet_and_alone(browser, server.url)


def test_where_nothing_is_to_be_done_it_says_for_how_many_requests(browser: Browser, start_server: Any) -> None:
    server = start_server(worker_command=CACHING).wait_ready()
    browser.open(server.url)
    complete(server.url, RULES)
    says(browser, "#advice", "Nothing stands out in the last 1 request.")
    complete(server.url, RULES)
    says(browser, "#advice", "Nothing stands out in the last 2 requests.")


def test_without_a_prefix_cache_computed_tokens_are_shown_all_the_same(browser: Browser, start_server: Any) -> None:
    server = start_server(worker_command=CACHING, config={"enable_prefix_caching": False}).wait_ready()
    browser.open(server.url)
    says(browser, "#advice", "No requests yet")
    complete(server.url, RULES)
    says(browser, "#sources-legend", "unexplained")
    assert browser.number("#sources-legend [data-part=unexplained]") == browser.number("[data-metric=prompt_tokens]") > 0
    assert "unexplained" in browser.run("document.getElementById('sources-bar').getAttribute('aria-label')")


def test_an_axis_says_where_it_ends_above_the_line(browser: Browser, start_server: Any) -> None:
    browser.open(start_server(worker_command=CACHING).wait_ready().url)
    script = """
        const done = arguments[0];
        import("/web/chart.js").then(({ Chart }) => {
          const element = document.getElementById("speed-chart");
          const chart = new Chart(element, "Share", [{ name: "share", kind: "main" }], String, { most: 1 });
          document.getElementById("main").hidden = false;
          chart.show([Array(300).fill(1)]);
          const [line, label] = chart.picture.querySelectorAll("path, text:last-of-type");
          done([label.getBoundingClientRect().bottom, line.getBoundingClientRect().top]);
        });
    """
    label, line = browser.driver.execute_async_script(script)
    assert label <= line


def test_only_another_state_of_the_server_is_said_to_screen_readers(browser: Browser, start_server: Any) -> None:
    browser.open(start_server(worker_command=CACHING).wait_ready().url)
    says(browser, "#status", "up ")
    browser.run(
        "void new MutationObserver(() => (window.said = true)).observe(document.querySelector('[role=status]'), "
        "{ childList: true, characterData: true, subtree: true })"
    )
    shown = browser.text("#status")

    def goes_on() -> None:
        assert browser.text("#status") != shown

    eventually(goes_on)
    assert not browser.run("window.said")


def test_an_axis_ends_a_little_above_all_values(browser: Browser, start_server: Any) -> None:
    browser.open(start_server(worker_command=CACHING).wait_ready().url)
    script = """
        const [values, done] = arguments;
        import("/web/chart.js").then(({ nice }) => done(values.map(nice)));
    """
    values = [1.03**i for i in range(-400, 600)]
    ends = browser.driver.execute_async_script(script, values)
    assert all(value < end < 2.8 * value for value, end in zip(values, ends, strict=True))


def test_a_server_that_goes_is_said_to(browser: Browser, start_server: Any) -> None:
    server = start_server(worker_command=CACHING).wait_ready()
    browser.open(server.url)
    says(browser, "#status", "up ")
    server.kill()
    says(browser, "#status", "does not answer")


def test_over_the_real_model_numbers_tree_and_advice_are_right(browser: Browser, start_server: Any, default_model: Any) -> None:
    config = {"model": "smollm2-135m", "kv_cache_tokens": 4096}
    server = start_server(worker_command=REAL, show_prompts=True, config=config).wait_ready()
    browser.open(server.url)
    for i in range(4):
        complete(server.url, f"The time is 12:00:{i * 11 + 15}. {RULES}Question {i}?", 3)
    server.wait_idle()
    shows_the_metrics(browser, server.url)
    shows_the_tree(browser, server.url)
    shows_the_time_as_first_advice(browser, "00:48", "00:")
    is_quiet_and_alone(browser, server.url)
