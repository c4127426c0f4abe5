"""The page of a run: Flask behind Werkzeug's threaded WSGI server, in a thread of the run itself, read-only.

    /            the page, self-contained       /api/state   RunState.snapshot() as strict JSON
    /metrics     the Prometheus text format     /healthz     "ok"

Werkzeug's server, which Flask brings along, is enough here: a few viewers, no uploads, no debugger, localhost. Every
request ends its connection: a page learns at once that the run is over, and none holds a thread for long.
"""

import errno
import json
import secrets
import socket
import threading
import time
from urllib.parse import urlsplit

from flask import Flask, Response, abort, render_template, request
from werkzeug.serving import WSGIRequestHandler, make_server

from dflash_train.monitor.prometheus import CONTENT_TYPE, exposition
from dflash_train.monitor.state import RunState
from dflash_train.util.errors import UserError
from dflash_train.util.log import say

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
_PORTS_TRIED = 100
_LAST_LOOK_S, _WATCHED_S = 3.0, 5.0


class Monitor:
    """The page of `state`, from `with` until its end.

    host other than this machine's own is said, since there is no login. port 0: any; a port that is taken: the next
    free one, which is said too. `url` is what to open. Raises UserError when no port can be had on `host`.
    """

    def __init__(self, state: RunState, host: str = "127.0.0.1", port: int = 8080):
        self.state, self.host, self.port = state, host, port
        self.url: str | None = None
        self._watch = _Watch()

    def __enter__(self) -> "Monitor":
        app = make_app(self.state, local=self.host in LOCAL_HOSTS, watch=self._watch)
        with listen(self.host, self.port) as sock:
            self._server = make_server(
                self.host, sock.getsockname()[1], app, threaded=True, request_handler=_Handler, fd=sock.fileno()
            )
        self.port = self._server.port
        self.url = f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True, name="monitor")
        self._thread.start()
        say(f"watch this run: {self.url}")
        if self.host not in LOCAL_HOSTS:
            say(f"warning: the page listens on {self.host} and asks for no password; whoever reaches it sees this run")
        return self

    def __exit__(self, *error) -> None:
        if self.state.ended:
            self._watch.wait_for_last_look()
        self._server.shutdown()
        self._thread.join()


def make_app(state: RunState, local: bool, watch: "_Watch") -> Flask:
    """The routes. local: answer only requests that name this machine, so that no web page elsewhere can read along."""
    app = Flask(__name__, static_folder=None)

    @app.before_request
    def check_host() -> None:
        if local and urlsplit(f"//{request.host}").hostname not in LOCAL_HOSTS:
            abort(403)

    @app.after_request
    def harden(response: Response) -> Response:
        response.headers["Cache-Control"] = "no-store"
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response

    @app.get("/")
    def page() -> Response:
        nonce = secrets.token_urlsafe(16)  # only the page's own script and style run, whatever a sample's id holds
        response = Response(render_template("page.html", stage=state.stage, run=state.run, nonce=nonce))
        response.headers["Content-Security-Policy"] = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        return response

    @app.get("/api/state")
    def api_state() -> Response:
        snapshot = state.snapshot()
        watch.looked(snapshot["status"] != "running")
        return Response(json.dumps(snapshot, allow_nan=False), content_type="application/json")

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(exposition(state.snapshot()), content_type=CONTENT_TYPE)

    @app.get("/healthz")
    def healthz() -> Response:
        return Response("ok\n", content_type="text/plain; charset=utf-8")

    return app


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on `port`, or on the next one that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in range(port, min(port + _PORTS_TRIED, 65536)):
        try:
            sock = socket.create_server((host, candidate), family=family, backlog=64)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UserError("extract.monitor", got=f"{host}:{candidate}: {error.strerror or error}",
                                want="an address of this machine and a port that may be opened",
                                fix="extract.monitor.host=127.0.0.1 extract.monitor.port=0") from error  # fmt: skip
            continue
        if candidate != port:
            say(f"monitor: port {port} is taken, using {candidate}")
        return sock
    raise UserError("extract.monitor.port", got=f"{port} and the next {_PORTS_TRIED} are taken", want="a free port",
                    fix="extract.monitor.port=0 takes any")  # fmt: skip


class _Handler(WSGIRequestHandler):
    """One request a connection, none for longer than ten seconds, no line in the run's log for it."""

    protocol_version = "HTTP/1.0"
    timeout = 10

    def log(self, type: str, message: str, *args) -> None:
        pass

    def version_string(self) -> str:
        return "dflash_train"


class _Watch:
    """Whether somebody is looking: a page that is open gets to see how the run ended."""

    def __init__(self) -> None:
        self._last, self._saw_end = float("-inf"), threading.Event()

    def looked(self, ended: bool) -> None:
        self._last = time.monotonic()
        if ended:
            self._saw_end.set()

    def wait_for_last_look(self) -> None:
        """Wait three seconds at most, and not at all when nobody asked in the last five."""
        if time.monotonic() - self._last < _WATCHED_S:
            self._saw_end.wait(_LAST_LOOK_S)
