"""The service's page in a browser: it fits a phone, and shows runs, what waits, and samples."""

import json
import shutil
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from automodel_rl.serve.page import page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")

STATE: dict[str, Any] = {
    "model": "<b>base</b>",
    "ready": True,
    "numbers": {"sessions": 2, "tokens trained": 12345},
    "looks": {"time": [1.0, 6.0], "waiting": [0, 3], "trained": [0, 9.5], "sampled": [0, 1], "memory": [0.1, 0.2]},
    "runs": [
        {
            "name": "a:train:0",
            "client": "me",
            "rank": 4,
            "requests": 7,
            "waiting": 1,
            "steps": 3,
            "used": 1.0,
            "state": "in progress",
            "curve": {"step": [1, 2, 3], "loss": [3.0, 2.0, 1.0], "advantage": [None, None, None]},
        }
    ],
    "orders": [{"job": "RunPass", "run": "a:train:0", "seconds": 1.5, "runs": True}],
    "samples": [{"at": 1.0, "weights": "a:kept:1", "prompt": "<i>2+2</i>", "text": "four"}],
}


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_the_page_shows_runs_and_what_waits(width: int, scheme: Any) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        errors: list[str] = []
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.route("**/state*", lambda route: route.fulfill(body=json.dumps(STATE), content_type="application/json"))
        tab.route("**/?key=k", lambda route: route.fulfill(body=page(), content_type="text/html"))
        tab.goto("http://service.test/?key=k")
        tab.locator("#runs td").first.wait_for()
        assert tab.locator("#model").inner_text() == "<b>base</b>"
        assert "12,345" in tab.locator("#numbers").inner_text()
        titles = tab.locator(".title:visible").all_inner_texts()
        assert titles == ["Tokens/s", "Queued jobs", "Memory of rank 0, GiB", "Loss per token"]
        assert "me\t4\t7\t3\t1" in tab.locator("#runs").inner_text()
        assert tab.locator("#orders td").all_inner_texts() == ["runs", "RunPass", "a:train:0", "1.5"]
        assert "<i>2+2</i>" in tab.locator(".sample").inner_text()
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        assert errors == []
        browser.close()
