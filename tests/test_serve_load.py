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
QUESTIONS = ("Name a river.", "Say hello in French.", "What is 2 + 2?", "你好! 🙂", "Name a city.", "Why is the sky blue?")
BODIES: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": question}], "max_tokens": 5, "temperature": temperature, "seed": seed, **more}
    for seed, question in enumerate(QUESTIONS)
    for temperature, more in ((1.0, {}), (0.0, {"stop": [" the"], "logit_bias": {"198": -5}}))
]
CHAT = "/v1/chat/completions"


def reply(http: httpx.Client, body: dict[str, Any]) -> str:
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def read_some(http: httpx.Client, body: dict[str, Any], n_events: int | None) -> str | None:
    """The text of a stream; None if it is left after `n_events`."""
    text = ""
    with http.stream("POST", CHAT, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for number, line in enumerate(line for line in answer.iter_lines() if line):
            if n_events is not None and number >= n_events:
                return None
            if line == "data: [DONE]":
                return text
            text += "".join(choice["delta"].get("content", "") for choice in json.loads(line.removeprefix("data: "))["choices"])
    raise AssertionError("the stream ended without an end")


def anonymous_memory(server: Server) -> int:
    """Bytes that the process holds beside mapped files."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))) * 1024


def test_load(demo_model: Path) -> None:
    rng = random.Random(7)
    plan: list[tuple[int, str, int]] = [
        (rng.randrange(len(BODIES)), rng.choices(("read", "whole", "leave", "vanish"), (4, 2, 3, 1))[0], rng.randrange(5)) for _ in range(REQUESTS)
    ]
    options = ["--parallel", "2", "--queue", str(CLIENTS), "-c", "256", "-t", "2", "--expert-cache", "75%"]
    with serving(demo_model, *options) as server:
        with server.http() as http:
            alone = [reply(http, body) for body in BODIES]
        assert len(set(alone)) > 6
        finished = 0

        def one(step: tuple[int, str, int]) -> bool:
            which, what, n_events = step
            with server.http() as http:
                if what == "whole":
                    return reply(http, BODIES[which]) == alone[which]
                if what == "vanish":  # before anything came
                    try:
                        http.post(CHAT, json=BODIES[which] | {"n": 20}, timeout=httpx.Timeout(60, read=0.05 * (n_events + 1)))
                    except httpx.ReadTimeout:
                        return True
                    raise AssertionError("20 replies in no time")
                text = read_some(http, BODIES[which], n_events if what == "leave" else None)
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
