"""The monitor's server: what its routes answer, that no text of a run becomes markup, its ports and its end."""

import html.parser
import http.client
import json
import re
import socket
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from helpers_monitor import SimulatedRun, hostile_state, run_of

from dflash_train.monitor import app as app_module
from dflash_train.monitor.app import Monitor, listen
from dflash_train.monitor.state import RunState
from dflash_train.util.errors import UserError


@pytest.fixture
def said(monkeypatch) -> list[str]:
    lines = []
    monkeypatch.setattr(app_module, "say", lines.append)
    return lines


@pytest.fixture(scope="module")
def run() -> SimulatedRun:
    return run_of(120)


def get(url: str, **headers: str) -> tuple[int, dict, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


# ---------------------------------------------------------------- routes


def test_routes_answer_with_their_types_and_the_rest_is_404(run):
    with Monitor(run.state, port=0) as monitor:
        for path, kind in (("", "text/html"), ("api/state", "application/json"), ("metrics", "text/plain"),
                           ("healthz", "text/plain")):  # fmt: skip
            status, headers, _ = get(monitor.url + path)
            assert (status, headers["Content-Type"].split(";")[0]) == (200, kind)
            assert headers["Cache-Control"] == "no-store" and "erkzeug" not in headers["Server"]
        for path in ("nothing", "static/page.js", "templates/page.js", "../state.py", "console"):
            assert get(monitor.url + path)[0] == 404
        assert json.loads(get(monitor.url + "api/state")[2]) == json.loads(json.dumps(run.state.snapshot()))


def test_state_endpoint_is_strict_json_before_the_first_batch():
    def refuse(constant: str):
        raise AssertionError(constant)

    state = RunState("extract", "r", 0, 0, 0, flops_per_token=float("nan"))
    with Monitor(state, port=0) as monitor:
        assert json.loads(get(monitor.url + "api/state")[2], parse_constant=refuse)["eta_s"] == 0.0


class Page(html.parser.HTMLParser):
    """What a page loads and how many scripts it has."""

    def __init__(self) -> None:
        super().__init__()
        self.links, self.nonces, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        self.links += [value for name, value in attrs.items() if name in ("src", "href", "srcset", "action", "data")]
        self.nonces += [attrs["nonce"]] if "nonce" in attrs else []


def test_page_is_self_contained_and_its_policy_lets_nothing_else_run(run):
    with Monitor(run.state, port=0) as monitor:
        _, headers, body = get(monitor.url)
        again = get(monitor.url)[1]["Content-Security-Policy"]
    page = Page()
    page.feed(body.decode())
    assert set(page.links) == {"data:,", "metrics", "api/state"}
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)", body.decode())
    policy = headers["Content-Security-Policy"]
    assert page.tags.count("script") == page.tags.count("style") == 1 and len(set(page.nonces)) == 1
    assert f"script-src 'nonce-{page.nonces[0]}';" in policy and "default-src 'none'" in policy and policy != again


def test_no_text_of_the_run_becomes_markup(run):
    def tags(state: RunState) -> list[str]:
        with Monitor(state, port=0) as monitor:
            body = get(monitor.url)[2].decode()
        page = Page()
        page.feed(body)
        assert "alert(" not in re.sub(r"&lt;/script&gt;&lt;script&gt;alert", "", body)
        return page.tags

    assert tags(hostile_state()) == tags(run.state)
    script = Path(app_module.__file__).with_name("templates") / "page.js"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script.read_text("utf-8"))


def test_a_page_elsewhere_cannot_read_along_through_a_name_of_its_own(run, said):
    with Monitor(run.state, port=0) as monitor:
        for host in ("evil.example", f"evil.example:{monitor.port}", "127.0.0.1.evil.example"):
            assert get(monitor.url + "api/state", Host=host)[0] == 403
        for host in ("localhost:9999", "127.0.0.1", "[::1]:80"):  # a tunnel from another port
            assert get(monitor.url + "api/state", Host=host)[0] == 200
    assert not any("password" in line for line in said)


def test_a_host_that_others_reach_is_warned_of_in_one_line(run, said):
    with Monitor(run.state, host="0.0.0.0", port=0) as monitor:
        assert get(f"http://127.0.0.1:{monitor.port}/healthz", Host="gpu-host-1")[0] == 200
    assert sum("no password" in line for line in said) == 1


# ---------------------------------------------------------------- ports and the end


def test_a_taken_port_gives_the_next_free_one_in_one_line(run, said):
    with closing(listen("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Monitor(run.state, port=port) as first, Monitor(run.state, port=port) as second:
            assert port < first.port < second.port
            assert get(first.url + "healthz")[2] == get(second.url + "healthz")[2] == b"ok\n"
    assert said == [f"monitor: port {port} is taken, using {first.port}", f"watch this run: {first.url}",
                    f"monitor: port {port} is taken, using {second.port}", f"watch this run: {second.url}"]  # fmt: skip


def test_an_address_that_is_not_ours_is_refused_with_what_to_type():
    with pytest.raises(UserError, match=r"extract\.monitor\.host=127\.0\.0\.1"):
        listen("192.0.2.1", 8080)


def test_the_server_ends_with_the_run_and_frees_its_port(run):
    before = threading.active_count()
    with pytest.raises(KeyError), Monitor(run.state, port=0) as monitor:
        assert get(monitor.url + "healthz")[0] == 200
        raise KeyError("the run died")
    with pytest.raises(urllib.error.URLError):
        get(monitor.url + "healthz")
    with closing(socket.create_server(("127.0.0.1", monitor.port))):
        pass
    assert threading.active_count() == before


def test_no_connection_outlives_its_request(run):
    with Monitor(run.state, port=0) as monitor:
        connection = http.client.HTTPConnection("127.0.0.1", monitor.port, timeout=20)
        connection.request("GET", "/healthz", headers={"Connection": "keep-alive"})
        assert connection.getresponse().will_close


def test_clients_that_say_nothing_hold_up_neither_others_nor_the_end(run):
    with ExitStack() as idle:
        with Monitor(run.state, port=0) as monitor:
            for _ in range(20):
                idle.enter_context(socket.create_connection(("127.0.0.1", monitor.port), timeout=20)).send(b"GET / HT")
            assert get(monitor.url + "healthz")[0] == 200
        with pytest.raises(urllib.error.URLError):
            get(monitor.url + "healthz")


def test_a_page_that_is_open_gets_to_see_how_the_run_ended():
    state, seen = RunState("extract", "r", 1, 1, 1), []
    open_page = threading.Event()

    def watch(url: str) -> None:
        while not seen or seen[-1] == "running":
            seen.append(json.loads(get(url + "api/state")[2])["status"])
            open_page.set()

    with Monitor(state, port=0) as monitor:
        page = threading.Thread(target=watch, args=(monitor.url,))
        page.start()
        assert open_page.wait(20)
        state.finished(True)
    page.join()
    assert seen[-1] == "done"


def test_ipv6_works_where_the_machine_has_it(run):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on this machine")
    with Monitor(run.state, host="::1", port=0) as monitor:
        assert get(monitor.url + "healthz")[0] == 200 and monitor.url.startswith("http://[::1]:")
