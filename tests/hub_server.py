"""A local server that speaks the part of the hub's API that huggingface_hub uses to download."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

PIECE = 1 << 20
REPO = r"(?P<repo>[^/]+/[^/]+)"
API = re.compile(rf"/api/(?P<kind>models|datasets)/{REPO}(?:/revision/(?P<revision>[^/]+))?")
TREE = re.compile(rf"/api/(?P<kind>models|datasets)/{REPO}/tree/(?P<revision>[^/]+)")
FILE = re.compile(rf"/(?:(?P<kind>datasets)/)?{REPO}/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


class HubServer(ThreadingHTTPServer):
    """`commit` adds a commit to a repository (`models/org/name`), `requests` are those received so far."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.requests: list[str] = []
        self.user_agents: set[str] = set()
        # The answer for a repository instead of its files: status and X-Error-Code.
        self.refused: dict[str, tuple[int, str]] = {}
        # What is sent instead of the commit and the names of files.
        self.forged: dict[str, object] = {}
        # How many bytes of a file are sent before the connection breaks, once for each number; -1 for an error 503.
        self.cuts: dict[str, list[int]] = {}
        # Seconds before each answer, seconds between two pieces of a file, and how many bytes of files were sent.
        self.delay = 0.0
        self.pause = 0.0
        self.bytes_sent = 0

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def commit(self, repo: str, files: dict[str, bytes], branch: str = "main") -> str:
        content = repo + "".join(f"{name} {hashlib.sha1(data).hexdigest()}\n" for name, data in sorted(files.items()))
        sha = hashlib.sha1(content.encode()).hexdigest()
        self.repos.setdefault(repo, {}).update({sha: files, branch: files})
        self.repos[repo].setdefault("main", files)
        return sha

    def sha(self, repo: str, revision: str) -> str:
        files = self.repos[repo][revision]
        return next(name for name, other in self.repos[repo].items() if len(name) == 40 and other is files)

    def downloads(self) -> list[str]:
        """The files that were sent, in any order."""
        return sorted(
            request.split("/resolve/")[1].split("/", 1)[1]
            for request in self.requests
            if "GET" in request and "/resolve/" in request
        )


class Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        time.sleep(self.server.delay)
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        self.server.user_agents.add(self.headers.get("User-Agent", ""))
        for pattern, answer in ((TREE, self._tree), (API, self._info), (FILE, self._file)):
            # A revision with slashes is quoted, so the quoted path is matched.
            match = pattern.fullmatch(urlsplit(self.path).path)
            if match is not None:
                repo = f"{match['kind'] or 'models'}/{match['repo']}"
                revision = unquote(match["revision"] or "main")
                if repo in self.server.refused:
                    return self._error(*self.server.refused[repo])
                if repo not in self.server.repos:
                    return self._error(404, "RepoNotFound")
                if revision not in self.server.repos[repo]:
                    return self._error(404, "RevisionNotFound")
                return answer(repo, revision, unquote(match.groupdict().get("file") or ""))
        return self._error(404, "RepoNotFound")

    def _info(self, repo: str, revision: str, _: str) -> None:
        files = self.server.repos[repo][revision]
        siblings = [{"rfilename": self.server.forged.get("name", name)} for name in files]
        sha = self.server.forged.get("sha", self.server.sha(repo, revision))
        self._json({"id": repo.split("/", 1)[1], "sha": sha, "siblings": siblings})

    def _tree(self, repo: str, revision: str, _: str) -> None:
        files = self.server.repos[repo][revision]
        self._json(
            [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
        )

    def _file(self, repo: str, revision: str, name: str) -> None:
        data = self.server.repos[repo][revision].get(name)
        if data is None:
            self._error(404, "EntryNotFound")
            return
        if self.command == "GET" and self.server.cuts.get(name, [0])[:1] == [-1]:
            self.server.cuts[name].pop(0)
            self._error(503, "")
            return
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": self.server.sha(repo, revision)}
        start = int(re.sub(r"\D", "", self.headers.get("Range", "0")))
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(206 if start else 200, data[start:], headers, name)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, body: bytes, headers: dict[str, str], name: str = "") -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cuts = self.server.cuts.get(name)
        if cuts:
            self.wfile.write(body[: cuts.pop(0)])
            self.close_connection = True
            return
        for start in range(0, len(body), PIECE):
            self.wfile.write(body[start : start + PIECE])
            self.server.bytes_sent += len(body[start : start + PIECE]) if name else 0
            time.sleep(self.server.pause)


@contextmanager
def hub_server() -> Iterator[HubServer]:
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def folder_files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
