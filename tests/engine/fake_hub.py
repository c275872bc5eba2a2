"""A hub on this machine that answers what `huggingface_hub` asks when it downloads a model."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]
LARGE = (".safetensors", ".bin", ".h5", ".onnx")


class Asked(NamedTuple):
    """One request that reached the hub."""

    method: str
    path: str
    authorization: str | None


class FakeHub:
    """Serves repositories, each a dict of revisions, while it is entered.

    Large files are kept on another host, as on the real hub: their address answers with a redirect.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Files]] = {}
        self.gated: set[str] = set()
        self.asked: list[Asked] = []
        self.breaks_after: int | None = None
        """Bytes of a large file after which the connection is closed; then only 503 is answered."""
        self.down = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._store = f"http://localhost:{self._server.server_port}/cdn/"

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fetched(self) -> set[str]:
        """The files whose content was asked for, by name."""
        by_hash = {_sha256(data): name for _, name, data in self._all_files()}
        names = set()
        for asked in self.asked:
            if asked.method == "GET" and not asked.path.startswith("/api/"):
                name = asked.path.partition("/resolve/")[2].partition("/")[2]
                names.add(name or by_hash[asked.path.removeprefix("/cdn/")])
        return names

    def _all_files(self) -> list[tuple[str, str, bytes]]:
        return [
            (repo, name, data)
            for repo, revisions in self.repos.items()
            for files in revisions.values()
            for name, data in files.items()
        ]

    def _find(self, repo: str, revision: str) -> tuple[str, Files] | str:
        """Commit and files, or the error code of the hub."""
        if repo not in self.repos:
            return "RepoNotFound"
        for name, files in self.repos[repo].items():
            commit = hashlib.sha1(f"{repo}@{name}".encode()).hexdigest()
            if revision in (name, commit):
                return commit, files
        return "RevisionNotFound"

    def _handler(hub) -> type[BaseHTTPRequestHandler]:  # noqa: N805 (self is the handler below)
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._answer()

            def do_GET(self) -> None:
                self._answer()

            def log_message(self, *args: Any) -> None:
                pass

            def _answer(self) -> None:
                path = urlsplit(self.path).path
                hub.asked.append(Asked(self.command, path, self.headers["Authorization"]))
                if hub.down:
                    self._send(503, b"")
                elif path.startswith("/cdn/"):
                    self._large(path.removeprefix("/cdn/"))
                elif path.startswith("/api/models/"):
                    self._api(path.removeprefix("/api/models/"))
                elif "/resolve/" in path:
                    self._file(path)
                else:
                    self._send(404, b"")

            def _api(self, path: str) -> None:
                repo, _, revision = path.partition("/revision/")
                repo, _, tree = repo.partition("/tree/")
                found = hub._find(repo, unquote(revision or tree or "main"))
                if isinstance(found, str):
                    self._refuse(404, found)
                elif tree:
                    self._json([_tree_entry(name, data) for name, data in found[1].items()])
                else:
                    names = [{"rfilename": name} for name in found[1]]
                    self._json({"id": repo, "sha": found[0], "siblings": names})

            def _file(self, path: str) -> None:
                repo, _, rest = path.removeprefix("/").partition("/resolve/")
                revision, _, name = rest.partition("/")
                found = hub._find(repo, unquote(revision))
                if isinstance(found, str):
                    return self._refuse(404, found)
                commit, files = found
                if repo in hub.gated:
                    return self._refuse(403, "GatedRepo")
                if name not in files:
                    return self._refuse(404, "EntryNotFound")
                data, headers = files[name], {"X-Repo-Commit": commit}
                if not name.endswith(LARGE):
                    return self._send(200, data, ETag=f'"{_git_sha(data)}"', **headers)
                headers["X-Linked-Size"] = str(len(data))
                headers["X-Linked-ETag"] = f'"{_sha256(data)}"'
                return self._send(302, b"", Location=hub._store + _sha256(data), **headers)

            def _large(self, wanted: str) -> None:
                data = next(data for *_, data in hub._all_files() if _sha256(data) == wanted)
                start = int((self.headers["Range"] or "bytes=0-")[len("bytes=") :].split("-")[0])
                span = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
                self._send(206 if start else 200, data[start:], **(span if start else {}))

            def _refuse(self, status: int, code: str) -> None:
                self._send(status, b"", **{"X-Error-Code": code, "X-Error-Message": code})

            def _json(self, value: object) -> None:
                self._send(200, json.dumps(value).encode(), **{"Content-Type": "application/json"})

            def _send(self, status: int, body: bytes, **headers: str) -> None:
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "HEAD":
                    return
                if hub.breaks_after is not None and "/cdn/" in self.path:
                    body = body[: hub.breaks_after]
                    hub.down = self.close_connection = True
                self.wfile.write(body)

        return Handler


def _tree_entry(name: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "type": "file", "path": name, "size": len(data), "oid": _git_sha(data),
    }  # fmt: skip
    if name.endswith(LARGE):
        entry["lfs"] = {"oid": _sha256(data), "size": len(data), "pointerSize": 134}
    return entry


def _git_sha(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
