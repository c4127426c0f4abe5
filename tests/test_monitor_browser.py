"""The page in a real headless browser: live numbers, no errors, no sideways scrolling, and what it says at the end."""

import threading
from contextlib import contextmanager

import pytest
from helpers_browser import Browser, find_browser
from helpers_monitor import HOSTILE, SimulatedRun, hostile_state

from dflash_train.monitor.app import Monitor
from dflash_train.monitor.state import RunState

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_browser() is None, reason="no Chromium here (apt-get install chromium)"),
]
LOADED = "document.getElementById('figures').children.length > 0"


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


@contextmanager
def running(steps: int = 400):
    """A simulated run that goes on while its page is open."""
    run, stop = SimulatedRun(num_workers=8), threading.Event()
    for _ in range(steps):
        run.step()
    thread = threading.Thread(target=run.keep_running, args=(stop,))
    thread.start()
    try:
        yield run
    finally:
        stop.set()
        thread.join()


def fits(browser: Browser, width: int = 390) -> bool:
    """No sideways scrolling; a phone's browser widens its viewport instead, so that innerWidth is no yardstick."""
    return browser.evaluate("Math.max(document.documentElement.scrollWidth, innerWidth)") == width


def text(browser: Browser, element: str) -> str:
    return browser.evaluate(f"document.getElementById('{element}').innerText")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width, height", [(390, 844), (1280, 900)])
def test_page_is_live_without_errors_or_sideways_scrolling(browser, width, height, dark):
    browser.errors.clear()
    with running() as run, Monitor(run.state, port=0) as monitor:
        browser.open(monitor.url, width, height, dark=dark)
        browser.wait_for(LOADED)
        first = text(browser, "figures")
        browser.wait_for(f"document.getElementById('figures').innerText !== {first!r}")
        assert text(browser, "status") == "running"
        assert browser.evaluate("document.getElementById('workers').children.length") == 8
        assert browser.evaluate("document.getElementById('grid').children.length") > 400
        assert browser.evaluate("document.querySelector('#tokens-line polyline').points.length") > 10
        for part in ("high water 80 %", "capture has waited"):
            assert part in text(browser, "staging")
        assert "ultrachat" in text(browser, "sources") and "NVIDIA H200" in text(browser, "gpus")
        assert fits(browser, width)
        background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(20, 23, 26)" if dark else "rgb(251, 251, 250)")
    assert browser.errors == []


@pytest.mark.parametrize("state", [RunState("extract", "r", 0, 0, 0), RunState("extract", "r", 9, 9, 9)],
                         ids=["nothing to do", "before the first batch"])  # fmt: skip
def test_page_of_a_run_that_has_nothing_to_show_yet_is_whole(browser, state):
    browser.errors.clear()
    with Monitor(state, port=0) as monitor:
        browser.open(monitor.url, 390, 844)
        browser.wait_for(LOADED)
        for never in ("NaN", "undefined", "null", "Infinity"):
            assert never not in browser.evaluate("document.body.innerText")
        assert fits(browser)
    assert browser.errors == []


def test_text_of_a_run_stays_text_in_the_browser(browser):
    browser.errors.clear()
    state = hostile_state()
    state.error("<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>")
    state.error("x" * 5_000)
    with Monitor(state, port=0) as monitor:
        browser.open(monitor.url, 390, 844)
        browser.wait_for(LOADED)
        assert text(browser, "run").split() == HOSTILE.split()
        assert "<img src=x" in text(browser, "errors")
        assert browser.evaluate("document.querySelectorAll('img, script').length") == 1
        assert browser.evaluate("typeof window.hacked") == "undefined"
        assert fits(browser)
    assert browser.errors == []


def test_the_browser_does_report_errors_and_overflow(browser):
    browser.errors.clear()
    with running(10) as run, Monitor(run.state, port=0) as monitor:
        browser.open(monitor.url, 390, 844)
        browser.evaluate("document.body.insertAdjacentHTML('beforeend', '<script>1</script><p id=wide>x</p>')")
        browser.evaluate("document.getElementById('wide').style.width = '900px'")
        browser.evaluate("console.error('planted')")
        assert not fits(browser)
    assert any("planted" in error for error in browser.errors)


@pytest.mark.parametrize("ok, says", [(True, "The run is over: done."), (False, "The run is over: failed.")])
def test_page_says_how_the_run_ended(browser, ok, says):
    with running(50) as run, Monitor(run.state, port=0) as monitor:
        browser.open(monitor.url, 390, 844)
        browser.wait_for(LOADED)
        run.state.finished(ok)
    browser.wait_for(f"document.getElementById('lost').innerText.startsWith({says!r})")
    assert fits(browser) and text(browser, "status") == ("done" if ok else "failed")


def test_page_says_that_the_connection_is_lost_and_recovers(browser):
    with running(50) as run:
        with Monitor(run.state, port=0) as monitor:
            browser.open(monitor.url, 390, 844)
            browser.wait_for(LOADED)
        browser.wait_for("document.getElementById('lost').innerText.startsWith('Connection lost')")
        assert text(browser, "status") == "lost"
        with Monitor(run.state, port=monitor.port):
            browser.wait_for("document.getElementById('lost').hidden")
            assert text(browser, "status") == "running"
