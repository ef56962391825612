"""The chat command on the real demo model, as a process: one answer, a script of turns, and a conversation on a terminal."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
from processes import cli, environment, refused

from tinyserve_gguf import Sampling, load
from tinyserve_gguf.choices import POLICIES

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
ONE = ("--temp", "0", "-n", "40", "-t", "1", "--no-warm")  # greedy; one thread, because threads that wait for each other crawl on a busy machine
COUNT = "Count from 1 to 100, one number a line."  # more than the smallest context holds
LONG = "word " * 300  # a prompt of more tokens than that


def ask(demo_model: Path, folder: Path, *options: str, stdin: str = "") -> tuple[str, str]:
    """Stdout and stderr of a call that succeeds."""
    done = cli("chat", demo_model, *ONE, *options, stdin=stdin, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


# ---- one answer -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["all", "25%", "16", "2", "1GiB", "200MiB", "auto"])
def test_same_text_with_every_cache(demo_model: Path, tmp_path: Path, cache: str) -> None:
    out, err = ask(demo_model, tmp_path, "-p", QUESTION, "--expert-cache", cache)
    assert out == ANSWER + "\n"
    assert re.search(r"^expert cache: \d+ of 240 experts resident", err, re.MULTILINE)


@pytest.mark.parametrize("policy", POLICIES[1:])  # the first is the default
def test_same_text_with_every_policy(demo_model: Path, tmp_path: Path, policy: str) -> None:
    assert ask(demo_model, tmp_path, "-p", QUESTION, "--expert-cache", "25%", "--policy", policy)[0] == ANSWER + "\n"


def test_status_and_stats(demo_model: Path, tmp_path: Path) -> None:
    out, err = ask(demo_model, tmp_path, "-p", "-", "--expert-cache", "25%", "--stats-json", "s.json", "-b", "8", stdin=QUESTION + "\n")
    assert out == ANSWER + "\n"
    plan, cache, memory, engine, misses, status = err.splitlines()
    assert plan == "SmolLM2 135M Instruct as 8 experts: llama, 30 MoE layers of 8 experts, top-2, on CPU"
    assert cache.startswith("expert cache: 60 of 240 experts resident (25%), ")
    assert re.match(r"memory of CPU: [\d.]+ MiB = [\d.]+ MiB weights \+ [\d.]+ MiB KV cache \(-c 4096\) \+ ", memory)
    assert engine.startswith("engine: host-driven: ") and "; host pool: mapped: " in engine
    assert misses == "misses: fetched"
    number = r"[\d.]+"
    assert re.fullmatch(rf"prefill 16 tok at {number} tok/s \| decode 7 tok at {number} tok/s \| hit rate {number}% \| {number} MB/tok", status), (
        status
    )

    written: dict[str, Any] = json.loads((tmp_path / "s.json").read_text())
    assert written["model"] == str(demo_model)
    (turn,) = written["turns"]
    assert (turn["prompt_tokens"], turn["reused_tokens"], turn["reply_tokens"], turn["finish"]) == (16, 0, 7, "stop")
    assert turn["decode"]["lookups"] == 7 * 30 * 2  # the end token is the eighth of which the first came from prefill
    assert turn["hit_rate"] == turn["decode"]["hits"] / turn["decode"]["lookups"]
    assert turn["mb_per_token"] > 0
    stats = written["stats"]
    assert (stats["paged"], stats["policy"], stats["device"], stats["slots_total"], stats["all_resident"]) == (True, "lfru", "CPU", 60, False)
    for phase in ("prefill", "decode"):
        assert stats[phase]["hits"] + stats[phase]["misses"] == stats[phase]["lookups"]
    # two steps of 8 tokens are counted with decode by the model, which does not know what a prompt is
    assert sum(stats[phase]["lookups"] for phase in ("prefill", "decode")) == turn["prefill"]["lookups"] + turn["decode"]["lookups"]
    assert list(tmp_path.iterdir()) == [tmp_path / "s.json"]


def test_stopped_at_n(demo_model: Path, tmp_path: Path) -> None:
    out, err = ask(demo_model, tmp_path, "-p", QUESTION, "-n", "3")
    assert out == "The capital of\n"
    assert err.endswith("| stopped at -n\n")


def test_prompt_that_does_not_fit(demo_model: Path, tmp_path: Path) -> None:
    done = cli("chat", demo_model, *ONE, "-c", "256", "-p", LONG, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    line = done.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"error: \d+ tokens do not fit into the context of 256: give a larger -c, or --window to go on without end, or /reset the conversation", line
    )


def test_reply_longer_than_the_window(demo_model: Path, tmp_path: Path) -> None:
    """Goes on to -n, says how the window is kept, and counts what left."""
    options = ("-n", "100", "--window", "64", "--sinks", "8", "--kv-type", "q8_0", "--stats-json", "s.json")
    out, err = ask(demo_model, tmp_path, *options, "-p", COUNT)
    assert "window: 64 tokens, 8 sinks; the oldest 14 after them leave at once, positions of the rest move down\n" in err
    assert "KV cache: q8_0 keys and values; flash attention on: q8_0 values need it\n" in err
    written = json.loads((tmp_path / "s.json").read_text())
    (turn,) = written["turns"]
    assert (turn["finish"], turn["reply_tokens"]) == ("length", 100)
    assert turn["prompt_tokens"] + 99 - turn["evicted_tokens"] in range(64 - 14, 65)
    assert written["stats"]["window"] == {"shifts": turn["shifts"], "evicted_tokens": 14 * turn["shifts"], "rereads": 0}
    assert len(out) > 100


def test_unwritable_stats(demo_model: Path, tmp_path: Path) -> None:
    assert "cannot write none/s.json (--stats-json): No such file or directory" in refused(
        cli("chat", demo_model, "-p", QUESTION, "--stats-json", "none/s.json", cwd=tmp_path)
    )


# ---- a script of turns ----------------------------------------------------------------------------------------------------------------------


def test_second_turn_reads_only_what_is_new(demo_model: Path, tmp_path: Path) -> None:
    """And says what a fresh model says that is given the whole conversation."""
    script = f"{QUESTION}\nAnd of Italy?\n/save talk.json\n/stats\n"
    out, err = ask(demo_model, tmp_path, "--expert-cache", "25%", "--system", "Answer in one short sentence.", "--stats-json", "s.json", stdin=script)
    messages = json.loads((tmp_path / "talk.json").read_text())
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert out == f"{ANSWER}\nThe capital of Italy is Rome.\n"
    assert out == "".join(message["content"] + "\n" for message in messages if message["role"] == "assistant")
    first, second = json.loads((tmp_path / "s.json").read_text())["turns"]
    assert first["finish"] == second["finish"] == "stop"  # or else the conversation below would not be this one
    assert second["reused_tokens"] > first["prompt_tokens"]
    assert second["reused_tokens"] == first["prompt_tokens"] + first["reply_tokens"]
    assert "60 of 60 slots in use on CPU" in err
    with load(demo_model, expert_cache="all", device="CPU", n_threads=1) as model:
        assert "".join(model.chat(messages[:-1], max_tokens=40, sampling=Sampling(temp=0))) == messages[-1]["content"]


def test_reset_forgets(demo_model: Path, tmp_path: Path) -> None:
    out, _ = ask(demo_model, tmp_path, "--expert-cache", "25%", "--stats-json", "s.json", stdin=f"{QUESTION}\n/reset\n{QUESTION}\n")
    assert out == 2 * (ANSWER + "\n")
    turns = json.loads((tmp_path / "s.json").read_text())["turns"]
    assert [turn["prompt_tokens"] for turn in turns] == [16, 16]


def test_the_second_chat_starts_warm(demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = [ask(demo_model, tmp_path, "-p", QUESTION, "--expert-cache", "25%", "-n", "12", "--warm") for _ in range(2)]
    assert [out for out, _ in said] == [ANSWER + "\n"] * 2
    assert "warm start: nothing is known of this model yet" in said[0][1]
    assert "warm start: 60 of 60 slots filled" in said[1][1]


# ---- on a terminal --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal(demo_model: Path, tmp_path: Path) -> Iterator[pexpect.spawn]:
    """A chat with the smallest context there is."""
    child = pexpect.spawn(
        sys.executable,
        ["-m", "tinyserve_gguf", "chat", str(demo_model), "--temp", "0", "-t", "1", "-c", "256", "--expert-cache", "25%", "--no-warm"],
        env=environment(TERM="dumb", XDG_STATE_HOME=str(tmp_path)),
        cwd=tmp_path,
        timeout=60,
        encoding="utf-8",
        dimensions=(50, 200),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a run in the background hands SIGINT down as ignored
    )
    child.delaybeforesend = None
    yield child
    child.close(force=True)


@pytest.mark.filterwarnings("ignore:.*forkpty:DeprecationWarning")  # of Python 3.12 and later, where a process with threads forks
def test_conversation_on_a_terminal(terminal: pexpect.spawn, tmp_path: Path) -> None:
    def say(line: str, *expected: str) -> None:
        terminal.expect("> ")
        terminal.sendline(line)
        for pattern in expected:
            terminal.expect(pattern)

    terminal.expect("expert cache: 60 of 240 experts resident")
    say(QUESTION, re.escape(ANSWER), r"prefill 16 tok .*decode 7 tok")
    say("And of Italy?", "The capital of Italy is Rome", r"prefill 15 tok at .*\(23 reused\)")
    say("/stats", "60 of 60 slots in use on CPU", "decode: hit rate")

    say("/reset", "new conversation")
    say(COUNT, r"1\S*\r\n")  # streams: the beginning is here long before the end
    terminal.sendintr()
    terminal.expect(r"decode (\d+) tok at .*interrupted")
    assert int(terminal.match[1]) < 100
    say(QUESTION, "tok/s.*reused", "MB/tok")  # the session goes on
    say("/save talk.json", "saved 4 messages to talk.json")

    say(LONG, r"error: \d+ tokens do not fit into the context of 256: give a larger -c, or --window to go on without end, or /reset")
    say("/reset", "new conversation")
    say(COUNT, "context is full", "the context is full: /reset starts over, a larger -c makes room, --window goes on without end")
    say("/reset", "new conversation")
    say(QUESTION, re.escape(ANSWER), "tok/s")
    say("/exit")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert (terminal.exitstatus, terminal.signalstatus) == (0, None)
    assert [message["role"] for message in json.loads((tmp_path / "talk.json").read_text())] == ["user", "assistant"] * 2
