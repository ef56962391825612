"""Files that results go to: saved conversations, `--stats-json` of chat, `--output` and `--plot` of bench."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path

from tinyserve_gguf.errors import OptionError


class OutputFile:
    """A file that is replaced as a whole. A symbolic link stays one: what it points to is replaced; permissions stay too.

    Making one refuses, with OptionError, a path that could not be written later. `option` is the one that named the path, for the message.
    """

    def __init__(self, path: str | os.PathLike[str], option: str | None = None) -> None:
        self._given = f"{os.fspath(path)} ({option})" if option else os.fspath(path)
        try:
            self._path = Path(os.path.realpath(path))
            self._mode = self._mode_of_old()
            self._new_part().unlink()
        except (OSError, ValueError) as error:
            raise self._refusal(error) from None

    def write_text(self, text: str) -> None:
        """`write_bytes` of the text in UTF-8."""
        self.write_bytes(text.encode("utf-8", errors="backslashreplace"))  # names of files need not be UTF-8; in JSON this is the right escape

    def write_bytes(self, data: bytes) -> None:
        """Write and put in place in one step; a failure leaves an earlier file as it was. OptionError if it cannot be written."""
        try:
            part = self._new_part()
            try:
                part.write_bytes(data)
                if self._mode is not None:
                    part.chmod(self._mode)
                part.replace(self._path)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            raise self._refusal(error) from None

    def _mode_of_old(self) -> int | None:
        """Permissions of the file that is there."""
        try:
            old = self._path.stat()
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(old.st_mode):
            raise ValueError("it is not a regular file")
        if not os.access(self._path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return stat.S_IMODE(old.st_mode)

    def _new_part(self) -> Path:
        """A new file beside it, which nobody may read who may not read the old one."""
        part = self._path.with_name(f".{secrets.token_hex(8)}.part")
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if self._mode is None else 0o600))
        return part

    def _refusal(self, error: OSError | ValueError) -> OptionError:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        return OptionError(f"cannot write {self._given}: {reason}")
