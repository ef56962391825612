"""The server over time: clients that hang up, a full queue, an end that was asked for."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import LONG, Server, serving

ModelFile = Callable[..., Path]

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
SHORT = HELLO | {"max_tokens": 2}
# With a window and without a limit, from a model whose end tokens are kept out, a reply ends only when somebody makes it. The grammar makes it text.
ENDLESS = HELLO | {"logit_bias": {"317": -100, "318": -100, "319": -100}, "temperature": 0, "grammar": "root ::= [a-z ]+"}
RUNNING, WAITING = "tinyserve_requests_running", "tinyserve_queue_length"


def start(model: Path, *options: str) -> Any:
    return serving(model, "--window", "256", "-t", "1", "--expert-cache", "50%", "--temp", "0", *options)


@pytest.fixture(scope="module")
def server(model_file: ModelFile) -> Iterator[Server]:
    with start(model_file("qwen3moe"), "--parallel", "1", "--queue", "1") as server:
        yield server


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with server.http() as http:
        yield http
    server.until(RUNNING, 0)
    server.until(WAITING, 0)


class Stream:
    """A streamed reply that is being read; hangs up when the block ends."""

    def __init__(self, http: httpx.Client, body: dict[str, Any]) -> None:
        self._context = http.stream("POST", CHAT, json=body | {"stream": True})

    def __enter__(self) -> Stream:
        self.response = self._context.__enter__()
        assert self.response.status_code == 200
        self._lines = (line for line in self.response.iter_lines() if line)
        self.first = next(self._lines)
        return self

    def rest(self) -> list[str]:
        return [self.first, *self._lines]

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


# ---- hanging up -----------------------------------------------------------------------------------------------------------------------------


def test_a_stream_that_nobody_reads_ends(server: Server, http: httpx.Client) -> None:
    before = server.metrics()["tinyserve_disconnects_total"]
    with Stream(http, ENDLESS):
        assert server.metrics()[RUNNING] == 1
    server.until(RUNNING, 0)
    assert server.metrics()["tinyserve_disconnects_total"] == before + 1
    assert http.post(CHAT, json=SHORT).status_code == 200


def test_a_reply_that_nobody_waits_for_ends(server: Server, http: httpx.Client) -> None:
    with server.http(timeout=0.5) as impatient, pytest.raises(httpx.ReadTimeout):
        impatient.post(CHAT, json=ENDLESS)
    server.until(RUNNING, 0)
    assert http.post(CHAT, json=SHORT).status_code == 200


def test_who_hangs_up_in_the_queue_leaves_it(server: Server, http: httpx.Client) -> None:
    with Stream(http, ENDLESS):
        with server.http(timeout=0.5) as impatient, pytest.raises(httpx.ReadTimeout):
            impatient.post(CHAT, json=SHORT)
        server.until(WAITING, 0)
        assert server.metrics()[RUNNING] == 1
    server.until(RUNNING, 0)


def test_hanging_up_while_the_prompt_is_read(server: Server, http: httpx.Client) -> None:
    """A prompt of many batches is not read to its end for nobody."""
    n_before = server.metrics().get('tinyserve_tokens_total{phase="decode"}', 0)
    long = {"messages": [{"role": "user", "content": "Hello " * 20000}], "max_tokens": 5}
    with server.http(timeout=httpx.Timeout(LONG, read=0.2)) as impatient, pytest.raises(httpx.ReadTimeout):
        impatient.post(CHAT, json=long)
    server.until(RUNNING, 0)
    assert server.metrics().get('tinyserve_tokens_total{phase="decode"}', 0) == n_before
    assert http.post(CHAT, json=SHORT).status_code == 200


# ---- the queue ------------------------------------------------------------------------------------------------------------------------------


def test_a_full_queue_says_so(server: Server, http: httpx.Client) -> None:
    with ThreadPoolExecutor(1) as pool, server.http() as second:
        with Stream(http, ENDLESS):
            waits = pool.submit(lambda: second.post(CHAT, json=SHORT))
            server.until(WAITING, 1)
            with server.http() as third:
                refused = third.post(CHAT, json=SHORT)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "queue_full"
            assert refused.headers["retry-after"] == "1"
            assert http.get("/health").status_code == 200
            # what cannot be is refused at once, and does not wait
            assert httpx.post(server.url + CHAT, json=SHORT | {"n": 0}, headers={"Authorization": "Bearer secret"}).status_code == 400
        assert waits.result(LONG).status_code == 200  # its turn came when the first hung up


def test_several_at_once_are_the_same_as_alone(model_file: ModelFile) -> None:
    bodies = [HELLO | {"max_tokens": 150, "temperature": 1.0, "seed": seed} for seed in range(8)]
    with start(model_file("qwen3moe"), "--parallel", "4", "--queue", "8") as server, server.http() as http:
        alone = [http.post(CHAT, json=body).json()["choices"][0]["message"]["content"] for body in bodies]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda body: http.post(CHAT, json=body).json()["choices"][0]["message"]["content"], bodies))
        assert together == alone
        assert len(set(alone)) == 8


# ---- the end --------------------------------------------------------------------------------------------------------------------------------


def test_the_end_finishes_what_runs_and_refuses_what_waits(model_file: ModelFile) -> None:
    body = ENDLESS | {"max_tokens": 1500, "stream_options": {"include_usage": True}}
    with start(model_file("qwen3moe"), "--queue", "4") as server, ThreadPoolExecutor(1) as pool:
        with server.http() as http, server.http() as other, Stream(http, body) as stream:
            waits = pool.submit(lambda: other.post(CHAT, json=SHORT))
            server.until(WAITING, 1)
            server.signal(signal.SIGTERM)
            refused = waits.result(LONG)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "closing")
            lines = stream.rest()
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 1500
        status, said = server.end()
        assert status == 0, said
        assert "Traceback" not in said
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def test_asked_twice_it_gives_up_what_runs(model_file: ModelFile) -> None:
    with start(model_file("qwen3moe")) as server, server.http() as http, Stream(http, ENDLESS) as stream:
        server.signal(signal.SIGINT)
        with server.http() as other, pytest.raises(httpx.TransportError):  # two signals at the same moment would be one
            while True:
                other.get("/health")
        server.signal(signal.SIGINT)
        assert json.loads(stream.rest()[-1].removeprefix("data: "))["error"]["code"] == "closing"
        status, said = server.end()
        assert status == 0, said
        assert "Traceback" not in said
