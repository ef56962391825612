"""llama-cpp-python's own tests pass with `Llama` in the place of its class, on the demo model and other models of ours. None is left out.

Two things in them are of their model and not of the class: a sentence that it completes, and the tokens of a greeting. In their place stands what
llama-cpp-python itself says of the demo model.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import peer_suite
import pytest
from llamas import opened, stock
from processes import environment

ModelFile = Callable[..., Path]

SENTENCE, N_SENTENCES = '" jumps over the lazy dog."', 2
GREETING = "[9419, 11, 1814, 0]"  # "Hello, world!"
N_TESTS = 26
PAGED = {  # those that open a model with experts; the others need none, or a recurrent one
    "test_real_llama",
    "test_real_llama_embeddings",
    "test_real_llama_repeated_prompt_cache",
    "test_hybrid_model_prompt_cache_reset",
    *(
        f"test_{what}_matches_fresh[llama_cpp_{kind}]"
        for what in ("exact_cached_prompt_reuse", "loaded_exact_cached_prompt_reuse", "ram_cache_exact_prompt_hit", "shorter_prompt_prefix_reuse")
        for kind in ("transformer_model_path-False-False", "hybrid_model_path-False-True")
    ),
}


@pytest.fixture(scope="module")
def outcome(demo_model: Path, model_file: ModelFile, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], set[str]]:
    """Outcome by test, and the tests that opened a paged model."""
    folder = tmp_path_factory.mktemp("peer")
    models = {
        "Qwen3.5-0.8B-Q8_0.gguf": demo_model,
        "tinyllamas/stories15M-q4_0.gguf": model_file("mixtral"),
        "bge-small-en-v1.5-q4_k_m.gguf": model_file("qwen3moe", more={"pooling_type": 1}),
        "mamba-130m-hf.Q2_K.gguf": peer_suite.build_mamba(folder / "mamba.gguf"),
        "Falcon-H1-Tiny-90M-Instruct-Q2_K.gguf": model_file("qwen35moe"),
    }
    suite = shutil.copytree(peer_suite.fetch_suite(), folder / "suite")
    adapt(suite / "tests" / "test_llama.py", demo_model)
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "tests", "-q", "-p", "peer_plugin", "-p", "no:cacheprovider", f"--junitxml={report}"]
    env = environment()
    env |= {"PEER_MODELS": json.dumps({name: str(path) for name, path in models.items()})}
    env |= {"PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{env['PYTHONPATH']}"}
    done = subprocess.run(command, cwd=suite, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert report.exists(), done.stdout + done.stderr
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
        found[case.attrib["name"]] = "\n".join(f"{child.tag}: {child.text}" for child in bad) or "passed"
    return found, set(json.loads(done.stdout.rpartition("PAGED ")[2].splitlines()[0]))


def adapt(file: Path, model: Path) -> None:
    """Exchange what is of their model for what llama-cpp-python says of `model`."""
    text = file.read_text("utf-8")
    assert (text.count(SENTENCE), text.count(GREETING)) == (N_SENTENCES, 1)
    with opened(stock(model, n_threads=2, flash_attn=True)) as theirs:
        greeting = theirs.tokenize(b"Hello, world!", special=True)
        prompt = "The quick brown fox jumps over the lazy dog. The quick brown fox"
        sentence = theirs.create_completion(prompt, max_tokens=6, temperature=0.0)["choices"][0]["text"]
    assert len(sentence) > 5
    file.write_text(text.replace(SENTENCE, json.dumps(sentence)).replace(GREETING, repr(greeting)), "utf-8")


def test_all_pass(outcome: tuple[dict[str, str], set[str]]) -> None:
    found, _ = outcome
    assert {name: result for name, result in found.items() if result != "passed"} == {}
    assert len(found) == N_TESTS


def test_they_ran_on_paged_models(outcome: tuple[dict[str, str], set[str]]) -> None:
    """Not on a class that slipped back to stock."""
    _, paged = outcome
    assert paged == PAGED
