"""What the server refuses, over HTTP: keys, sizes, requests that cannot be, prompts that do not fit; and what serve itself refuses to start with."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner
from processes import cli, error_line, refused
from serving import Server, serving

from tinyserve_gguf.cli import main

ModelFile = Callable[..., Path]

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "go")]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
N_CTX = 256


@pytest.fixture(scope="module")
def server(model_file: ModelFile) -> Iterator[Server]:
    options = ["--expert-cache", "50%", "-c", str(N_CTX), "-b", "64", "-t", "1", "--alias", "tiny", "--max-body", "20000"]
    with serving(model_file("qwen3moe"), *options) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with server.http() as http:
        yield http


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "about", "param"),
    [
        (CHAT, HELLO | {"wish": 1}, "'wish' is not supported", "wish"),
        (CHAT, HELLO | {"temperature": -1}, "greater than or equal to 0", "temperature"),
        (CHAT, HELLO | {"n": 129}, "128", "n"),
        (CHAT, {"max_tokens": 2}, "required", "messages"),
        (CHAT, HELLO | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'text'", None),
        (CHAT, HELLO | {"stop": [""]}, "none of them empty", None),
        (CHAT, HELLO | {"stream_options": {}}, "needs stream", None),
        (CHAT, HELLO | {"tools": TOOLS, "tool_choice": "required"}, "one tool", "tool_choice"),
        (CHAT, HELLO | {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "'fly'", "tool_choice"),
        (CHAT, HELLO | {"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls", "parallel_tool_calls"),
        (CHAT, HELLO | {"tools": TOOLS, "logprobs": True}, "logprobs with tools", "logprobs"),
        (CHAT, HELLO | {"grammar": "root ::= ("}, "does not take the grammar", "grammar"),
        (CHAT, HELLO | {"grammar": "leaf ::= [a-z]"}, "does not take the grammar", "grammar"),
        (CHAT, HELLO | {"grammar": r'root ::= "\x00"', "top_k": 0}, "no token", "grammar"),
        (CHAT, HELLO | {"grammar": "root ::= <[999999]>"}, "no token", "grammar"),
        (CHAT, HELLO | {"grammar": "root ::= root [a-z]"}, "does not take the grammar", "grammar"),
        (CHAT, HELLO | {"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, "too large", "grammar"),
        (
            CHAT,
            HELLO | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer", "minimum": 1}}}},
            "minimum",
            "response_format",
        ),
        (CHAT, HELLO | {"response_format": {"type": "json_object", "schema": {"type": "thing"}}}, "thing", "response_format"),
        (CHAT, HELLO | {"logit_bias": {"320": 1}}, "0 to 319", "logit_bias"),
        (CHAT, HELLO | {"logit_bias": {"a": 1}}, "0 to 319", "logit_bias"),
        (CHAT, HELLO | {"reasoning_effort": "high"}, "no 'reasoning_effort'", "reasoning_effort"),
        (CHAT, HELLO | {"chat_template_kwargs": {"messages": []}}, "no 'messages'", "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "Hello " * N_CTX}]}, f"the context holds {N_CTX}", "messages"),
        (TEXT, {"prompt": ""}, "empty", "prompt"),
        (TEXT, {"prompt": [320]}, "outside the vocabulary", "prompt"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix", "suffix"),
        (TEXT, {"prompt": "a", "best_of": 3}, "best_of", None),
        (TEXT, {"prompt": ["a", "Hello " * N_CTX]}, f"the context holds {N_CTX}", "messages"),
        ("/v1/embeddings", {"input": "Hello " * 60}, "1 to 64", "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, "text 1 has 0 tokens", "input"),
        ("/v1/embeddings", {"input": [[1, 2]]}, "string", None),
        ("/v1/embeddings", {"input": "a", "dimensions": 8}, "'dimensions' is not supported", "dimensions"),
    ],
)
def test_what_cannot_be_is_one_clear_line(http: httpx.Client, path: str, body: dict[str, Any], about: str, param: str | None) -> None:
    error = error_of(http.post(path, json=body), 400)
    assert about in error["message"]
    assert error["type"] == "invalid_request_error"
    if param:
        assert error["param"] == param
    if "context holds" in about:
        assert error["code"] == "context_length_exceeded"


def test_openais_client_knows_the_errors(server: Server) -> None:
    with server.client() as client:
        with pytest.raises(openai.BadRequestError, match="context holds"):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello " * N_CTX}], stream=True)
        with pytest.raises(openai.NotFoundError, match="'tiny'"):
            client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "Hello"}])
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


@pytest.mark.parametrize(
    ("content", "kind", "about"),
    [
        (b"{", "application/json", "not JSON"),
        (b"[1]", "application/json", "JSON object"),
        (json.dumps(HELLO).encode(), "text/plain", "application/json"),
    ],
)
def test_bodies_that_are_no_json(http: httpx.Client, content: bytes, kind: str, about: str) -> None:
    """A page of another site can send text/plain here, but no JSON without asking first."""
    assert about in error_of(http.post(CHAT, content=content, headers={"content-type": kind}), 400)["message"]


@pytest.mark.parametrize("authorization", [None, "", "secret", "Bearer", "Bearer secre", "Bearer secrets", "Basic secret", "Bearer sécret"])
def test_keys(server: Server, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization.encode()}
    with httpx.Client(base_url=server.url, headers=headers) as client:
        for method, path in (
            ("GET", "/v1/models"),
            ("POST", CHAT),
            ("GET", "/v1/experts"),
            ("PUT", "/v1/experts/cache"),
            ("GET", "/metrics"),
            ("GET", "/v1/x"),
        ):
            response = client.request(method, path)
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        assert client.get("/health").status_code == 200
        assert client.get("/").headers["content-type"].startswith("text/html")


def test_the_scheme_of_a_key_is_read_in_any_case(server: Server) -> None:
    assert httpx.get(f"{server.url}/v1/models", headers={"Authorization": "bearer secret"}).status_code == 200


def test_bodies_that_are_too_large(http: httpx.Client) -> None:
    large = json.dumps(HELLO | {"user": "x" * 20000}).encode()

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(large), 1000):
            yield large[start : start + 1000]

    assert error_of(http.post(CHAT, content=large, headers={"content-type": "application/json"}), 413)["code"] == "body_too_large"
    assert error_of(http.post(CHAT, content=pieces(), headers={"content-type": "application/json"}), 413)["code"] == "body_too_large"
    assert http.post(CHAT, json=HELLO).status_code == 200


def test_paths_and_methods_that_are_not_there(http: httpx.Client) -> None:
    assert "/v1/nothing" in error_of(http.get("/v1/nothing"), 404)["message"]
    assert "PATCH" in error_of(http.patch(CHAT), 405)["message"]
    assert error_of(http.get("/v1/models/gpt-9"), 404)["code"] == "model_not_found"
    assert http.get("/../pyproject.toml").status_code == 404


# ---- what paging shows and takes ------------------------------------------------------------------------------------------------------------


def test_the_map_of_experts(http: httpx.Client) -> None:
    http.post(CHAT, json=HELLO | {"max_tokens": 20, "temperature": 0})
    shown = http.get("/v1/experts").json()
    assert (shown["n_expert"], shown["n_used"], [layer["layer"] for layer in shown["layers"]]) == (8, 2, [0, 1, 2])
    assert sum(sum(layer["resident"]) for layer in shown["layers"]) == shown["slots"]["resident"] <= shown["slots"]["total"]
    assert all(len(layer[name]) == 8 for layer in shown["layers"] for name in ("resident", "hits", "last_use"))
    assert 0 < max(use for layer in shown["layers"] for use in layer["last_use"]) <= shown["tick"]
    assert 0 < shown["hit_rate"]["decode"] < 1
    assert shown["bytes_moved"] > 0
    assert shown["tokens"]["decode"] > 0


def test_another_size_of_the_cache_while_a_reply_runs(server: Server, http: httpx.Client) -> None:
    """The reply is the one that it would have been, and who has room stays."""
    ask = {"prompt": "Once upon a time", "max_tokens": 150, "temperature": 0, "grammar": "root ::= [a-z ]+"}
    whole = http.post(TEXT, json=ask | {"seed": 1}).json()["choices"][0]["text"]
    sizes = iter(["100%", "25%", "12", "75%", "50%"])
    with server.client() as client:
        text = ""
        for number, chunk in enumerate(client.completions.create(model="tiny", seed=1, stream=True, extra_body=ask, prompt="")):
            text += chunk.choices[0].text
            if number % 20 == 10 and (size := next(sizes, None)):
                before = http.get("/v1/experts").json()
                answer = http.put("/v1/experts/cache", json={"expert_cache": size}).json()
                after = http.get("/v1/experts").json()
                assert answer["expert_cache"] == after["expert_cache"] == size
                assert answer["slots"] == after["slots"]["total"]
                assert "expert cache" in answer["lines"][0]
                if after["slots"]["total"] >= before["slots"]["total"]:  # nobody had to leave: nearly all were there a moment ago
                    kept = sum(
                        a & b
                        for old, new in zip(before["layers"], after["layers"], strict=True)
                        for a, b in zip(old["resident"], new["resident"], strict=True)
                    )
                    assert kept >= before["slots"]["resident"] - 6
    assert text == whole
    assert next(sizes, None) is None
    assert http.put("/v1/experts/cache", json={"expert_cache": 12}).json()["slots"] == 12
    assert server.metrics()['tinyserve_expert_slots{state="total"}'] == 12


@pytest.mark.parametrize("size", ["1000TiB%", "-1", "1", "", 1, 0.5, True, None])
def test_a_size_of_the_cache_that_cannot_be(http: httpx.Client, size: object) -> None:
    before = http.get("/v1/experts").json()["slots"]["total"]
    assert error_of(http.put("/v1/experts/cache", json={"expert_cache": size}), 400)["param"] == "expert_cache"
    assert http.get("/v1/experts").json()["slots"]["total"] == before


def test_a_size_of_the_cache_that_does_not_fit_says_what_would(http: httpx.Client) -> None:
    before = http.get("/v1/experts").json()["slots"]["total"]
    error = error_of(http.put("/v1/experts/cache", json={"expert_cache": "1KiB"}), 409)
    assert error["code"] == "does_not_fit"
    assert "KiB" in error["message"]
    assert "at least" in error["message"]
    assert http.get("/v1/experts").json()["slots"]["total"] == before


# ---- other servers --------------------------------------------------------------------------------------------------------------------------


def test_with_a_window_no_prompt_is_too_long(model_file: ModelFile) -> None:
    options = ["--window", "128", "-b", "64", "-t", "1", "--expert-cache", "50%", "--temp", "0"]
    with serving(model_file("qwen3moe"), *options, key=None) as server, server.http() as http:
        body = {"messages": [{"role": "user", "content": "Hello " * 200}], "max_tokens": 300, "seed": 1}
        reply = http.post(CHAT, json=body).json()
        assert reply["usage"]["prompt_tokens"] > 600
        assert reply["usage"]["completion_tokens"] == 300
        assert http.post(CHAT, json=body).json()["choices"] == reply["choices"]
        assert http.get("/v1/models").json()["data"][0]["meta"]["window"] is True


def test_a_dense_file_has_no_experts(dense_file: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n\ntwo\n")
    with serving(dense_file, "-c", "256", "-t", "1", "--api-key-file", str(keys), key=None) as server:
        for key in ("one", "two"):
            with server.http(headers={"Authorization": f"Bearer {key}"}) as http:
                assert http.post(CHAT, json=HELLO).json()["usage"]["tinyserve"] is None
                assert error_of(http.get("/v1/experts"), 404)["message"].endswith("it has no experts")
                assert "tinyserve_expert" not in http.get("/metrics").text


def test_what_serve_does_not_start_with(model_file: ModelFile, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for options, about in (
            (["--port", str(port)], f"port {port}"),
            (["--port", "0", "--host", "192.0.2.1"], "192.0.2.1"),
            (["--port", "0", "--chat-format", "x"], "no chat format 'x'"),
            (["--port", "0", "--window", "-c", "512"], "give it or -c"),
            (["--port", "0", "--miss-admit", "2"], "--miss-admit is for"),
            (["--api-key", ""], "API key"),
            (["--api-key", "a b\n"], "API key"),
            (["--api-key-file", str(tmp_path / "empty")], "holds no key"),
            (["--api-key-file", str(tmp_path / "none")], "--api-key-file"),
            (["--parallel", "0"], "--parallel"),
            (["--port", "65536"], "--port"),
        ):
            assert about in error_line(CliRunner().invoke(main, ["serve", str(model_file("qwen3moe")), *options]))


@pytest.mark.parametrize("missing", ["fastapi", "prometheus_client"])
def test_without_the_extra_there_is_one_line(missing: str, tmp_path: Path, model_file: ModelFile) -> None:
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError({missing!r}, name={missing!r})\n")
    line = refused(cli("serve", model_file("qwen3moe"), cwd=tmp_path))
    assert f"needs the package {missing}" in line
    assert "pip install 'tinyserve-gguf[serve]'" in line
