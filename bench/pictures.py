"""The README's pictures: the live page of a server at work, and the capacity curve of a public trace."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
from cyclopts import App
from rich.console import Console

from bench import command_line
from bench.local import RADIXKV, server
from bench.serving import STDERR, ask, connect
from bench.workloads import NAMES, agent_turns, fewshot
from radixkv.report.curve_plot import write_plot
from radixkv.report.curve_report import CurveReport
from radixkv.report.kv_size import kv_size
from radixkv.report.stack_distance import hit_curve
from radixkv.report.trace import read_trace

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

FOLDER = Path(__file__).parents[1] / "docs" / "images"
MODEL = "smollm2-135m"

WORK_SECONDS = 75.0
"""Of work before the picture is taken.  The page's charts show five minutes."""
WIDTH, SCALE = 1016, 1.25
"""Of the page, in CSS pixels, and pixels of the picture to each."""
ROWS_SHOWN = 5
"""Of the table of requests, which ends the picture."""
BOTTOM = f"(document.querySelectorAll('#requests tr')[{ROWS_SHOWN - 1}] ?? document.body).getBoundingClientRect().bottom + scrollY"


class Team(NamedTuple):
    """Who asks: ``at_once`` lanes side by side, each of whose prompts comes ``pause`` seconds after the last one's answer."""

    namespace: str
    lanes: Sequence[Sequence[str]]
    at_once: int
    max_tokens: int
    pause: float


def teams() -> list[Team]:
    """Agents, a few-shot batch, and agents whose prompts begin with the time, so that the page has a mistake to find."""
    agents = [agent_turns(index) for index in range(len(NAMES))]
    night = [
        [f"System: It is {2 + turn}:{(17 * index) % 60:02}:{(23 * index + 11 * turn) % 60:02} at night.\n{prompt}"
         for turn, prompt in enumerate(turns)]
        for index, turns in enumerate(agents[-10:])
    ]  # fmt: skip
    questions = fewshot()
    return [
        Team("support", agents[:-10], 4, 48, pause=1.5),
        Team("homework", questions.lanes, 1, questions.max_tokens, pause=1.0),
        Team("night-shift", night, 1, 48, pause=5.0),
    ]


async def work(client: aiohttp.ClientSession, body: dict[str, Any], team: Team) -> None:
    """Ask all that a team has to ask.  Raises ``aiohttp.ClientError`` where a request failed."""
    room = asyncio.Semaphore(team.at_once)

    async def lane(prompts: Sequence[str]) -> None:
        async with room:
            for prompt in prompts:
                asked = {**body, "prompt": prompt, "max_tokens": team.max_tokens, "namespace": team.namespace}
                await ask(client, "POST", "v1/completions", json=asked)
                await asyncio.sleep(team.pause)

    await asyncio.gather(*map(lane, team.lanes))


def open_browser() -> Chrome:
    """Chromium without a window.  Raises ``OSError`` that says what to install where something is missing."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None or importlib.util.find_spec("selenium") is None:
        raise OSError(
            "the picture of the page needs chromium, chromedriver and selenium: "
            "apt install chromium chromium-driver; pip install selenium"
        )
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    chrome.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": WIDTH, "height": 900, "deviceScaleFactor": SCALE, "mobile": False}
    )
    light = {"name": "prefers-color-scheme", "value": "light"}
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [light]})
    return chrome


def picture(chrome: Chrome) -> bytes:
    """The page as it is now, from its top to the last row shown, as PNG."""
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": chrome.execute_script(f"return {BOTTOM}"), "scale": 1}
    shot = chrome.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "clip": clip})
    return base64.b64decode(shot["data"])


async def picture_of_work(url: str, chrome: Chrome) -> bytes:
    """The page of the server at ``url`` in the middle of its work."""
    async with connect(url) as (client, body):
        chrome.get(url)
        at_work = asyncio.gather(*(work(client, body, team) for team in teams()))
        await asyncio.wait([at_work], timeout=WORK_SECONDS)
        shot = await asyncio.to_thread(picture, chrome)
        at_work.cancel()
        try:
            await at_work
        except asyncio.CancelledError:
            return shot
        raise OSError(f"the server had done its work in less than {WORK_SECONDS:.0f} s: nothing was left to be seen of it")


app = App(name="python -m bench pictures", print_error=False, exit_on_error=False, result_action="return_value")


@app.default
def pictures(*, trace: Path) -> int:
    """Write docs/images/live-page.png and docs/images/capacity-curve.svg.

    The page is that of a server which works for a minute on agents, a few-shot batch, and agents whose prompts begin with the
    time, with --show-prompts. For it Chromium is needed.

    Parameters
    ----------
    trace
        The trace whose curve is drawn. The README's is one hour of a production chat service, from the Mooncake project:
        https://github.com/kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl.
    """
    curve = CurveReport.from_curve(hit_curve(read_trace(trace)), kv_size(MODEL))
    chrome = open_browser()
    try:
        command = [*RADIXKV, "--model", MODEL, "--show-prompts", "--kv-cache-tokens", "32768"]
        with STDERR.status(f"a server works, and is looked at after {WORK_SECONDS:.0f} seconds"), server(command) as url:
            shot = asyncio.run(picture_of_work(url, chrome))
    finally:
        chrome.quit()
    FOLDER.mkdir(exist_ok=True)
    page, plot = FOLDER / "live-page.png", FOLDER / "capacity-curve.svg"
    page.write_bytes(shot)
    write_plot(curve, plot, title=f"Hit rate over cache size: {trace.name}")
    for path in (page, plot):
        Console(width=None if sys.stdout.isatty() else 120).print(f"{path}: {path.stat().st_size:,} bytes")
    return 0


def main(argv: Sequence[str]) -> int:
    """Exit code: 0; 2 for bad input, or where something is missing or failed; 130 after Ctrl-C."""
    return command_line.run(app, argv, (ValueError, OSError, aiohttp.ClientError))
