"""A hub of Hugging Face on this machine: folders of models, served as it serves."""

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Hub:
    """The models of a hub by name, each a folder, and what was asked for."""

    def __init__(self) -> None:
        self.models: dict[str, Path] = {}
        self.asked: list[str] = []

    def commit(self, name: str) -> str:
        """A commit is a hash of all contents."""
        contents = [path.read_bytes() for path in sorted(self.models[name].iterdir())]
        return hashlib.sha1(b"".join(contents)).hexdigest()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return the status, the headers and the body for a path."""
        self.asked.append(path)
        status, headers, content = self.find(path.replace("/api/models/", "/api/"))
        return status, headers, content if type(content) is bytes else json.dumps(content).encode()

    def find(self, path: str) -> tuple[int, dict[str, str], Any]:
        """Return the status, the headers and the content for a path: bytes, or of JSON."""
        if found := re.fullmatch(r"/api/(.+)/tree/([^/]+)(/[^?]*)?\?.*", path):
            files = [
                {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": etag(path)}
                for path in self.models[found[1]].iterdir()
            ]
            return 200, {}, files
        if found := re.fullmatch(r"/api/([^?]+?)(?:/revision/([^/?]+))?(?:\?.*)?", path):
            name, revision = found[1], found[2] or "main"
            if name not in self.models:
                return 404, {"X-Error-Code": "RepoNotFound"}, b""
            commit = self.commit(name)
            if revision not in ("main", commit):
                return 404, {"X-Error-Code": "RevisionNotFound"}, b""
            files = [{"rfilename": path.name} for path in self.models[name].iterdir()]
            return 200, {}, {"id": name, "sha": commit, "siblings": files}
        if found := re.fullmatch(r"/(.+)/resolve/([^/]+)/([^/]+)", path):
            name, revision, file = found.groups()
            headers = {"X-Repo-Commit": self.commit(name) if revision == "main" else revision}
            place = self.models[name] / file
            if not place.exists():
                return 404, headers | {"X-Error-Code": "EntryNotFound"}, b""
            return 200, headers | {"ETag": f'"{etag(place)}"'}, place.read_bytes()
        return 404, {}, b""


def etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def hub_server() -> Iterator[tuple[Hub, str]]:
    """Serve a hub, at first without a model, at the address that the body gets."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield hub, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
