"""A hub on this machine, as huggingface_hub talks to one: lists of files, and files with their size and hash; it can break off in the middle."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """`requests` holds (method, path, Range) of all that was asked."""

    repositories: dict[str, dict[str, bytes]]
    break_at: int | None = None  # bytes after which the connection of the next download is closed, once
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    endpoint: str = ""

    def downloads(self) -> list[tuple[str, str | None]]:
        """Name and Range of every GET of a file."""
        return [(path.rsplit("/", 1)[-1], ranges) for method, path, ranges in self.requests if method == "GET" and "/resolve/" in path]


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Until the block ends; `hub.endpoint` is its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Nothing on stderr."""

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, *, with_body: bool) -> None:
            path = self.path.split("?")[0]
            hub.requests.append((self.command, path, self.headers.get("Range")))
            if listed := re.fullmatch(r"/api/models/(.+)/tree/.*", path):
                files = hub.repositories.get(listed[1])
                if files is None:
                    return self.missing("RepoNotFound")
                tree = [{"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()} for name, data in files.items()]
                return self.send(json.dumps(tree).encode(), {"Content-Type": "application/json"}, with_body)
            if found := re.fullmatch(r"/(.+?/.+?)/resolve/[^/]+/(.+)", path):
                data = hub.repositories.get(found[1], {}).get(found[2])
                if data is None:
                    return self.missing("EntryNotFound")
                return self.send_file(data, with_body)
            return self.missing("RepoNotFound")

        def missing(self, code: str) -> None:
            self.send(b"", {"X-Error-Code": code}, True, status=404)

        def send_file(self, data: bytes, with_body: bool) -> None:
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            start = 0
            if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
                start = int(asked[1])
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self.send(data[start:], headers, with_body, status=206 if start else 200)

        def send(self, body: bytes, headers: dict[str, str], with_body: bool, status: int = 200) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if not with_body:
                return
            if hub.break_at is not None and "/resolve/" in self.path:
                body, hub.break_at = body[: hub.break_at], None
                self.close_connection = True
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
