"""200 requests from 8 clients who hang up as they like, on the demo model.

No error that nobody asked for, no leak, and every reply that is read to its end is the one that is given alone.
"""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from serving import Server, serving

CLIENTS, REQUESTS, WARM_UP = 8, 200, 60
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
Ask = tuple[str, dict[str, Any]]
ASKS: list[Ask] = [
    *((CHAT, {"messages": [{"role": "user", "content": text}]}) for text in ("Name a river.", "What is 2 + 2?", "你好! 🙂")),
    *((TEXT, {"prompt": text}) for text in ("Once upon a time", "The sun is", "A river in", "你好", "Dear Sir")),
    (TEXT, {"prompt": "The capital of", "temperature": 0, "stop": [" the"], "logit_bias": {"198": -5}}),
    (TEXT, {"prompt": "I think", "grammar": "root ::= [a-z 你好🙂]+"}),
]
ASKS = [(path, {"max_tokens": 5, "seed": seed, **body}) for seed, (path, body) in enumerate(ASKS)]


def text_of(choice: dict[str, Any]) -> str:
    """Of a whole reply or of a part, of either kind."""
    return str(choice["text"]) if "text" in choice else str(choice.get("message", choice.get("delta")).get("content", ""))


def reply(http: httpx.Client, ask: Ask) -> str:
    answer = http.post(ask[0], json=ask[1])
    assert answer.status_code == 200, answer.text
    return text_of(answer.json()["choices"][0])


def read_some(http: httpx.Client, ask: Ask, n_events: int | None) -> str | None:
    """The text of a stream; None if it is left after `n_events`."""
    text = ""
    with http.stream("POST", ask[0], json=ask[1] | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for number, line in enumerate(line for line in answer.iter_lines() if line):
            if n_events is not None and number >= n_events:
                return None
            if line == "data: [DONE]":
                return text
            text += "".join(map(text_of, json.loads(line.removeprefix("data: "))["choices"]))
    raise AssertionError("the stream ended without an end")


def anonymous_memory(server: Server) -> int:
    """Bytes that the process holds beside mapped files."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))) * 1024


def test_load(demo_model: Path) -> None:
    rng = random.Random(7)
    plan: list[tuple[int, str, int]] = [
        (rng.randrange(len(ASKS)), rng.choices(("read", "whole", "leave", "vanish"), (4, 2, 3, 1))[0], rng.randrange(5)) for _ in range(REQUESTS)
    ]
    options = ["--parallel", "2", "--queue", str(CLIENTS), "-c", "256", "-t", "2", "--expert-cache", "75%"]
    with serving(demo_model, *options) as server:
        with server.http() as http:
            alone = [reply(http, ask) for ask in ASKS]
        assert len(set(alone)) > 6
        finished = 0

        def one(step: tuple[int, str, int]) -> bool:
            which, what, n_events = step
            with server.http() as http:
                if what == "whole":
                    return reply(http, ASKS[which]) == alone[which]
                if what == "vanish":  # before anything came
                    try:
                        http.post(ASKS[which][0], json=ASKS[which][1] | {"n": 128}, timeout=httpx.Timeout(60, read=0.05 * (n_events + 1)))
                    except httpx.ReadTimeout:
                        return True
                    raise AssertionError("128 replies in no time")
                text = read_some(http, ASKS[which], n_events if what == "leave" else None)
                return text is None or text == alone[which]

        memory = []
        with ThreadPoolExecutor(CLIENTS) as pool:
            for part in (plan[:WARM_UP], plan[WARM_UP : (WARM_UP + REQUESTS) // 2], plan[(WARM_UP + REQUESTS) // 2 :]):
                results = list(pool.map(one, part))
                assert all(results), [step for step, right in zip(part, results, strict=True) if not right]
                finished += len(results)
                server.until("tinyserve_requests_running", 0)
                server.until("tinyserve_queue_length", 0)
                memory.append(anonymous_memory(server))
        assert finished == REQUESTS
        assert memory[2] - memory[1] < 8 << 20, memory
        assert memory[1] - memory[0] < 16 << 20, memory
        counted = server.metrics()
        assert not [name for name in counted if name.startswith("tinyserve_errors_total")], counted
        assert counted["tinyserve_disconnects_total"] >= sum(what == "vanish" for _, what, _ in plan)
