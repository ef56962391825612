"""What Python callers do and get wrong: values of natural types, replies side by side, models that are closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tinyserve_gguf import Model, OptionError, Sampling, load

ModelFile = Callable[..., Path]
GREEDY = Sampling(temp=0)


@pytest.fixture
def model(model_file: ModelFile) -> Iterator[Model]:
    with load(model_file("qwen3moe"), expert_cache="25%", device="CPU", n_ctx=256, n_threads=1) as found:
        yield found


def test_a_number_of_experts_may_be_a_number(model_file: ModelFile) -> None:
    with load(model_file("qwen3moe"), expert_cache=12, device="CPU", n_ctx=64) as model:
        assert model.plan.n_slots == 12
        assert model.resize(6).slots == model.plan.n_slots == 6
    for wrong in (0, -1, 0.25, None, True):
        with pytest.raises(OptionError, match="a share like 25%"):
            load(model_file("qwen3moe"), expert_cache=wrong, device="CPU")  # type: ignore[arg-type]


def test_stop_may_be_one_text(model: Model) -> None:
    whole = "".join(model.generate("Hello", max_tokens=20, sampling=GREEDY))
    stop = whole[6:8]
    for given in (stop, [stop]):
        said = "".join(model.generate("Hello", max_tokens=20, sampling=GREEDY, stop=given))
        assert said == whole[: whole.index(stop)]


def test_a_reply_that_was_overtaken_ends_in_an_error(model: Model) -> None:
    """Calls of `generate` share a KV cache: to go on with the first one would be to go on with the second one's text."""
    first = model.generate("Hello", max_tokens=20, sampling=GREEDY)
    next(first)
    second = "".join(model.generate("Good evening", max_tokens=20, sampling=GREEDY))
    with pytest.raises(OptionError, match=r"give each a session\(\) of its own"):
        list(first)
    assert "".join(model.generate("Good evening", max_tokens=20, sampling=GREEDY)) == second


def test_replies_side_by_side(model: Model) -> None:
    """In sessions of their own they go on as if alone."""
    prompts = [model.tokenize("Hello"), model.tokenize("Good evening")]
    alone = [list(model.session().generate(prompt, 12, GREEDY)) for prompt in prompts]
    both = [model.session().generate(prompt, 12, GREEDY) for prompt in prompts]
    assert list(map(list, zip(*zip(*both, strict=True), strict=True))) == alone


def test_a_session_that_was_cleared_meanwhile(model: Model) -> None:
    session = model.session()
    reply = session.generate(model.tokenize("Hello"), 12, GREEDY)
    next(reply)
    session.clear()
    with pytest.raises(OptionError, match="cannot go on"):
        next(reply)


def test_nothing_is_said_of_a_closed_model(model: Model) -> None:
    expert, session = model.experts[0, 1], model.session()
    reply = session.generate([5, 6, 7], 9, GREEDY)
    next(reply)
    model.close()
    model.close()
    calls: list[Callable[[], object]] = [
        model.stats,
        model.reset_stats,
        model.check_integrity,
        model.expert_map,
        model.session,
        lambda: model.experts,
        lambda: model.warm,
        lambda: model.set_policy("lru"),
        lambda: model.resize("50%"),
        lambda: model.tokenize("Hello"),
        lambda: list(model.generate("Hello")),
        lambda: expert.state,
        expert.pin,
        lambda: next(reply),
        lambda: session.read([1]),
    ]
    for call in calls:
        with pytest.raises(OptionError, match="is closed"):
            call()
