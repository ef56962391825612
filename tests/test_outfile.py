"""Files that results go to: replaced as a whole or not at all, through links, with the permissions they had."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from tinyserve_gguf.errors import OptionError
from tinyserve_gguf.outfile import OutputFile


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        OutputFile(tmp_path / "new").write_text("text")
    finally:
        os.umask(before)
    assert (tmp_path / "new").read_text() == "text"
    assert mode(tmp_path / "new") == 0o640
    assert names(tmp_path) == ["new"]


@pytest.mark.parametrize("kept", [0o600, 0o664, 0o755])
def test_an_old_file_keeps_its_permissions(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "old"
    path.write_text("old")
    path.chmod(kept)
    OutputFile(path).write_text("new")
    assert (path.read_text(), mode(path)) == ("new", kept)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_one(tmp_path: Path, there: bool) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/real")
    if there:
        (tmp_path / "folder" / "real").write_text("old")
    OutputFile(tmp_path / "link").write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "real").read_text() == "new"
    assert names(tmp_path / "folder") == ["real"]


@pytest.mark.parametrize("failing", ["write_bytes", "chmod", "replace"])
def test_a_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    path = tmp_path / "old"
    path.write_text("old")
    file = OutputFile(path, "--output")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, failing, full)
        with pytest.raises(OptionError) as caught:
            file.write_text("new")
    assert str(caught.value) == f"cannot write {path} (--output): No space left on device"
    assert path.read_text() == "old"
    assert names(tmp_path) == ["old"]
    file.write_text("new")
    assert path.read_text() == "new"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none/x", "No such file or directory"),
        ("file/x", "Not a directory"),
        (".", "it is not a regular file"),
        ("pipe", "it is not a regular file"),
        ("loop", "Too many levels of symbolic links"),
        ("x" * 300, "File name too long"),
        ("nul\0", "embedded null byte"),
    ],
)
def test_what_cannot_be_written_is_said_at_once(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OptionError) as caught:
        OutputFile(f"{tmp_path}/{name}")
    assert str(caught.value).startswith(f"cannot write {tmp_path}/{name}: ")
    assert reason in str(caught.value)
    assert names(tmp_path) == ["file", "loop", "pipe"]


def test_a_read_only_file_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "old"
    path.write_text("old")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(OptionError, match="Permission denied"):
        OutputFile(path)
    assert path.read_text() == "old"


def test_what_is_not_utf8_is_escaped(tmp_path: Path) -> None:
    text = json.dumps({"model": os.fsdecode(b"caf\xe9.gguf"), "猫": "é"}, ensure_ascii=False)
    OutputFile(tmp_path / "x").write_text(text)
    assert json.loads((tmp_path / "x").read_text("utf-8")) == json.loads(text)
