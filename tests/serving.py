"""A server as a process of its own on a free port of the loopback, and OpenAI's client for it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
from processes import PACKAGE, environment

LONG = 300  # seconds that no test waits for in vain


class Server:
    """`serve MODEL` with some options. Stopped at the latest when the block ends; then it must have ended well."""

    def __init__(self, model: Path, *options: str, key: str | None = "secret") -> None:
        self.key = key
        keys = ["--api-key", key] if key else []
        command = [sys.executable, "-m", "tinyserve_gguf", "serve", str(model), "--port", "0", *keys, *options]
        changes = {"OMP_WAIT_POLICY": "passive"}  # threads of two servers on two cores would spin while they wait
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=PACKAGE, env=environment(**changes))
        self.lines: list[str] = []
        self.url = ""
        self._up = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        if not self._up.wait(LONG) or not self.url:
            self.process.kill()
            raise AssertionError(self.end()[1])

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.lines.append(line)
            if " on http://" in line:
                self.url = line.split(" on ")[1].split(",")[0]
                self._up.set()
        self._up.set()

    @contextmanager
    def client(self, **changes: Any) -> Iterator[openai.OpenAI]:
        """OpenAI's client, without its retries."""
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0, timeout=LONG, **changes) as client:
            yield client

    @contextmanager
    def http(self, **changes: Any) -> Iterator[httpx.Client]:
        """A plain client that knows the key."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        with httpx.Client(**({"base_url": self.url, "headers": headers, "timeout": LONG} | changes)) as client:
            yield client

    def metrics(self) -> dict[str, float]:
        """What /metrics says, by name and labels."""
        with self.http() as http:
            text = http.get("/metrics").text
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line and not line.startswith("#")}

    def until(self, name: str, value: float) -> None:
        """Wait for a metric."""
        end = time.monotonic() + LONG
        while self.metrics()[name] != value:
            assert time.monotonic() < end, (name, self.metrics()[name])
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Exit code and stderr, once it has ended by itself."""
        status = self.process.wait(LONG)
        self._reader.join()
        assert self.process.stderr
        self.process.stderr.close()
        return status, "".join(self.lines)


@contextmanager
def serving(model: Path, *options: str, key: str | None = "secret") -> Iterator[Server]:
    server = Server(model, *options, key=key)
    try:
        yield server
        if server.process.poll() is None:
            server.signal(signal.SIGTERM)
            status, said = server.end()
            assert status == 0, said
            assert "Traceback" not in said, said
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.end()
