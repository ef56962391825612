"""Damaged headers by the thousand: one line each, or a model that loads. `scripts/fuzz` runs the same for longer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fuzzer import GAVE_UP, build_bases, crashing, fuzz, hanging, hungry, until
from mutations import MUTATIONS, damaged, parse

SEED, N_FILES = 6, 5000


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return build_bases(tmp_path_factory.mktemp("bases"))


def test_nothing_crashes_hangs_or_eats_memory(bases: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tally = fuzz(bases, tmp_path, SEED, until(N_FILES))
    with capsys.disabled():
        print(f"\n{tally.line()}")
    assert tally.failures == []
    assert tally.tried == N_FILES == sum(tally.outcomes.values())
    assert {"loaded", "refused by info", "refused by the loader"} <= tally.outcomes.keys()
    assert tally.outcomes[GAVE_UP] < N_FILES // 50  # it aborts past every check, and the command line turns that into a line


def test_a_whole_file_survives_being_taken_apart(bases: list[Path]) -> None:
    for base in bases:
        assert parse(base).to_bytes() == base.read_bytes()


def test_the_same_seed_gives_the_same_files(bases: list[Path]) -> None:
    files = [damaged(bases[0], 1, index) for index in range(50)]
    assert files == [damaged(bases[0], 1, index) for index in range(50)]
    assert len({data for data, _ in files}) > 45
    names = {name for index in range(300) for name in damaged(bases[0], 1, index)[1].split(", ")}
    assert names == {mutation.__name__ for mutation in MUTATIONS}


# ---- this can fail --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attempt", "message"), [(crashing, "the process ended with -11"), (hanging, "not done after 0.5 s"), (hungry, "bytes resident")]
)
def test_what_goes_wrong_is_counted(bases: list[Path], tmp_path: Path, attempt: Callable[[Path], str], message: str) -> None:
    tally = fuzz(bases, tmp_path, 1, until(1), attempt=attempt, limit_s=0.5 if attempt is hanging else 20)
    assert tally.tried == len(tally.failures) == 1
    assert message in tally.failures[0]
