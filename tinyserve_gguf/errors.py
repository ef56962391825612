"""The errors this package raises on purpose, and the exit code the CLI gives each of them.

Every class also subclasses the builtin a caller would catch without knowing us. A message is one line that says what is wrong and what to do
about it; the CLI prints it as it is and exits with code 2.
"""

from __future__ import annotations

EXIT_BAD_INPUT = 2  # of the CLI, for all of them


class TinyserveError(Exception):
    """Base of every error raised here."""


class ModelFileError(TinyserveError, ValueError):
    """The GGUF is missing, damaged, or of a kind that cannot be paged."""


class OptionError(TinyserveError, ValueError):
    """An option has an impossible value, or clashes with another one."""


class UnknownOptionError(OptionError, TypeError):
    """There is no option of this name."""


class CapacityError(TinyserveError, MemoryError):
    """Something does not fit: device memory, host memory, or a cache smaller than one step needs."""


class ContextFullError(TinyserveError, RuntimeError):
    """The prompt or the reply reached the end of the context."""


class AbiMismatchError(TinyserveError, ImportError):
    """The native library and the installed llama.cpp do not belong together."""


class EngineError(TinyserveError, RuntimeError):
    """llama.cpp or the shim failed while computing."""
