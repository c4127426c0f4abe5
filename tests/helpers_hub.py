"""A data-set hub on loopback for tests: real files, git-like digests, ranges, gates, and faults on request.

It speaks what huggingface_hub and datasets ask of a hub (info, auth-check, refs, tree, paths-info, resolve with ETag
and Range) and the dataset viewer's /size. helpers_hub_client.py points the client libraries at it.
"""

import hashlib
import io
import json
import re
import threading
import time
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_" + "a" * 34
API = re.compile(
    r"^/api/datasets/([^/]+/[^/]+)(?:/(revision|auth-check|refs|tree|paths-info)(?:/([^/]+)(?:/(.*))?)?)?$"
)
RESOLVE = re.compile(r"^/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")


@dataclass
class HubSet:
    """One data set: commits[-1] is the newest, each {path: bytes}. card: the YAML block of its README, as a dict.
    gated: needs a token of `allowed`. viewer: rows by (config, split), None = the viewer does not know it."""

    commits: list[dict[str, bytes]]
    card: dict = field(default_factory=dict)
    gated: bool = False
    allowed: set[str] = field(default_factory=set)
    viewer: dict[tuple[str, str], int] | None = None

    def shas(self) -> list[str]:
        """The commits' names: what is in them, so that the same files are the same commit on every run."""
        names = [
            json.dumps(sorted((path, _git_digest(body)) for path, body in files.items())) for files in self.commits
        ]
        return [hashlib.sha1(text.encode()).hexdigest() for text in names]

    def files_at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        shas = self.shas()
        if revision == "main":
            return shas[-1], self.commits[-1]
        return next(((sha, files) for sha, files in zip(shas, self.commits) if sha == revision), None)


@dataclass
class Fault:
    """What goes wrong, `times` times, with requests whose "METHOD path" matches `pattern`: answer `status`, or cut the
    body after `cut` bytes, or send nothing for `stall_s`, or `lie`: flip a byte."""

    pattern: str
    status: int | None = None
    cut: int | None = None
    stall_s: float | None = None
    lie: bool = False
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Seen:
    """One answered request ("METHOD path", and " [first-last]" of a range); num_bytes: of file content sent."""

    line: str
    status: int
    num_bytes: int = 0


class Hub:
    """The server; `with Hub() as hub`, then hub.sets["owner/name"] = HubSet([...])."""

    def __init__(self):
        self.sets: dict[str, HubSet] = {}
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.server.serve_forever, daemon=True, kwargs={"poll_interval": 0.02}).start()
        return self

    def __exit__(self, *error) -> None:
        self.server.shutdown()
        self.server.server_close()

    def add(self, name: str, files: dict[str, bytes], card: dict | None = None, **values) -> HubSet:
        """A set of one commit; `card` becomes its README's YAML block."""
        self.sets[name] = HubSet([with_card(files, card or {})], card or {}, **values)
        return self.sets[name]

    def file_bytes(self, pattern: str = ".") -> int:
        """Bytes of file content sent so far for paths that match, READMEs apart."""
        return sum(s.num_bytes for s in self.seen if re.search(pattern, s.line) and "README" not in s.line)

    def asked(self, pattern: str) -> int:
        """How many requests match."""
        return sum(bool(re.search(pattern, s.line)) for s in self.seen)

    def take_fault(self, line: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.pattern, line):
                    fault.times -= 1
                    return fault
        return None


def with_card(files: dict[str, bytes], card: dict) -> dict[str, bytes]:
    """The files and a README.md whose YAML block is `card` (JSON is YAML)."""
    return {**files, "README.md": f"---\n{json.dumps(card, indent=1)}\n---\n# A set\n".encode()} if card else files


def parquet(rows: list[dict], row_group_size: int = 1000) -> bytes:
    import pyarrow
    import pyarrow.parquet

    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out, row_group_size=row_group_size)
    return out.getvalue()


def jsonl(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        self.answer()

    do_HEAD = do_POST = do_GET

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        asked = (self.headers.get("Range") or "").removeprefix("bytes=")
        line = f"{self.command} {unquote(self.path)}" + (f" [{asked}]" if asked else "")
        fault = self.hub.take_fault(line)
        try:
            if fault and fault.stall_s:
                time.sleep(fault.stall_s)
                self.close_connection = True
                self.hub.seen.append(Seen(line, 0))
                return
            if fault and fault.status:
                self.reply(line, fault.status, b"{}", fault.headers)
                return
            self.route(line, body, fault)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def reply(self, line: str, status: int, body: bytes, headers: dict | None = None, cut: int | None = None) -> None:
        sent = body if cut is None else body[:cut]
        is_file = " /datasets/" in line and status in (200, 206) and self.command == "GET"
        self.hub.seen.append(Seen(line, status, len(sent) if is_file else 0))
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(sent)
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True

    def fail(self, line: str, status: int, code: str, message: str = "") -> None:
        self.reply(line, status, b"{}", {"X-Error-Code": code, "X-Error-Message": message or code})

    def json(self, line: str, value: object) -> None:
        self.reply(line, 200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def route(self, line: str, body: bytes, fault: Fault | None) -> None:
        url = urlsplit(self.path)
        path = url.path
        if path == "/size":
            return self.size(line, parse_qs(url.query))
        found = RESOLVE.match(path) or API.match(path)
        if not found:
            return self.fail(line, 404, "NotFound")
        name = found[1]
        data = self.hub.sets.get(name)
        if data is None:  # the real hub does not say whether a set is private or absent
            return self.fail(line, 404 if self.token() else 401, "RepoNotFound")
        if found.re is RESOLVE:
            return self.resolve(line, data, unquote(found[2]), unquote(found[3]), fault)
        kind, revision, rest = found[2], unquote(found[3] or "main"), unquote(found[4] or "")
        if kind == "auth-check":
            return self.json(line, {}) if self.may_read(line, name, data) else None
        at = data.files_at(revision)
        if at is None:
            return self.fail(line, 404, "RevisionNotFound")
        sha, files = at
        if kind in (None, "revision"):
            info = {"id": name, "sha": sha, "private": False, "gated": "auto" if data.gated else False,
                    "disabled": False, "tags": [], "downloads": 0, "likes": 0, "cardData": data.card,
                    "siblings": [{"rfilename": p} for p in files]}  # fmt: skip
            return self.json(line, info)
        if kind == "refs":
            main = {"name": "main", "ref": "refs/heads/main", "targetCommit": data.shas()[-1]}
            return self.json(line, {"branches": [main], "tags": [], "converts": []})
        if not self.may_read(line, name, data):
            return None
        if kind == "tree":
            recursive = parse_qs(url.query).get("recursive", ["false"])[0].lower() == "true"
            return self.json(line, _tree(files, rest, recursive))
        wanted = parse_qs(body.decode()).get("paths", [])
        return self.json(line, [_entry(p, files[p]) for p in wanted if p in files])

    def may_read(self, line: str, name: str, data: HubSet) -> bool:
        if not data.gated or self.token() in data.allowed:
            return True
        status = 403 if self.token() else 401
        self.fail(line, status, "GatedRepo", f"Access to dataset {name} is restricted.")
        return False

    def resolve(self, line: str, data: HubSet, revision: str, path: str, fault: Fault | None) -> None:
        at = data.files_at(revision)
        if at is None:
            return self.fail(line, 404, "RevisionNotFound")
        if not self.may_read(line, "", data):
            return None
        sha, files = at
        if path not in files:
            return self.reply(line, 404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
        content = files[path]
        headers = {"ETag": f'"{_entry(path, content)["oid"]}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if "lfs" in _entry(path, content):
            headers |= {"X-Linked-Etag": f'"{_sha256(content)}"', "X-Linked-Size": str(len(content))}
        status, wanted = 200, re.match(r"bytes=(\d+)-(\d*)$", self.headers.get("Range") or "")
        if wanted:
            start, end = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
            status, headers["Content-Range"] = 206, f"bytes {start}-{end}/{len(content)}"
            content = content[start : end + 1]
        if fault and fault.lie:
            content = bytes([content[0] ^ 1]) + content[1:]
        return self.reply(line, status, content, headers, fault.cut if fault else None)

    def size(self, line: str, query: dict) -> None:
        data = self.hub.sets.get(query["dataset"][0])
        if data is None or data.viewer is None:
            return self.fail(line, 404, "ResponseNotFound")
        splits = [{"config": c, "split": s, "num_rows": rows} for (c, s), rows in data.viewer.items()]
        body = {"size": {"splits": splits}, "partial": False, "pending": [], "failed": []}
        return self.reply(line, 200, json.dumps(body).encode(), {"X-Revision": data.shas()[-1]})


@cache
def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@cache
def _git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(path: str, content: bytes) -> dict:
    """Large-file facts for Parquet, git's own digest for text, as the hub stores them."""
    oid = _git_digest(content)
    entry = {"type": "file", "path": path, "size": len(content), "oid": oid}
    if path.endswith(".parquet"):
        entry["lfs"] = {"oid": _sha256(content), "size": len(content), "pointerSize": 134}
    return entry


def _tree(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict]:
    prefix = folder.rstrip("/") + "/" if folder else ""
    out, folders = [], set()
    for path, content in sorted(files.items()):
        if not path.startswith(prefix):
            continue
        inner = path[len(prefix) :].split("/")
        for depth in range(1, len(inner)):
            sub = prefix + "/".join(inner[:depth])
            if sub not in folders and (recursive or depth == 1):
                folders.add(sub)
                out.append({"type": "directory", "path": sub, "oid": hashlib.sha1(sub.encode()).hexdigest(), "size": 0})
        if recursive or len(inner) == 1:
            out.append(_entry(path, content))
    return out
