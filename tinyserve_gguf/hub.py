"""Files of models on the Hugging Face hub: found in the caches of llama.cpp and huggingface_hub, or downloaded. Its only importer."""

from __future__ import annotations

import re
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

from tinyserve_gguf.errors import ModelFileError, OptionError
from tinyserve_gguf.user_files import cache_base

INSTALL = "pip install 'tinyserve-gguf[hub]'"
TRIES = 5  # at a file whose connection breaks
PAUSE = 2.0  # seconds between them
DEFAULT_QUANT = "Q4_K_M"  # llama.cpp's, where none is named
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_QUANT = re.compile(r"[\w.-]+")
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_OTHER = ("mmproj", "imatrix")  # GGUFs that are no model


@dataclass(frozen=True, slots=True)
class Wanted:
    """Files of one model in a repository: by a pattern, or by the quant in their names."""

    repository: str  # "owner/name"
    quant: str | None = None
    pattern: str | None = None  # over paths in the repository, capitals do not matter

    @classmethod
    def parse(cls, text: str) -> Wanted:
        """From "owner/name" or "owner/name:quant", as llama.cpp's -hf has it."""
        repository, colon, quant = text.partition(":")
        if not _REPOSITORY.fullmatch(repository) or (colon and not _QUANT.fullmatch(quant)):
            raise OptionError(f"-hf {text!r} is not OWNER/NAME or OWNER/NAME:QUANT, such as ggml-org/gpt-oss-20b-GGUF:MXFP4")
        return cls(repository, quant or None)

    @property
    def command(self) -> str:
        """What downloads it by hand."""
        include = self.pattern or f"*{self.quant or DEFAULT_QUANT}*.gguf"
        return f"hf download {self.repository} --include {shlex.quote(include)}"


# ---- names of files -------------------------------------------------------------------------------------------------------------------------


def choose(names: Iterable[str], wanted: Wanted) -> list[str]:
    """Of the paths in a repository, those of the wanted model, its first shard first. Empty if there is none, or a shard is missing."""
    models = [name for name in names if name.lower().endswith(".gguf") and not any(other in name.lower() for other in _OTHER)]
    groups: dict[str, list[str]] = defaultdict(list)
    for name in models:
        groups[_SHARD.sub(".gguf", name)].append(name)
    whole = {base: sorted(shards) for base, shards in groups.items() if len(shards) == _n_shards(shards[0])}
    fitting = [base for base, shards in whole.items() if _fits(shards[0], wanted)]
    if not fitting and wanted.quant is None and wanted.pattern is None:
        fitting = list(whole)  # no default quant: then any
    return whole[min(fitting, key=lambda base: (len(base), base))] if fitting else []  # "Q4_K_M" before "UD-Q4_K_M"


def _n_shards(name: str) -> int:
    found = _SHARD.search(name)
    return int(found[2]) if found else 1


def _fits(name: str, wanted: Wanted) -> bool:
    if wanted.pattern is not None:
        return fnmatchcase(name.lower(), wanted.pattern.lower())
    quant = re.escape(wanted.quant or DEFAULT_QUANT)
    return re.search(rf"(^|[-._/]){quant}[-./]", name, re.IGNORECASE) is not None


# ---- caches ---------------------------------------------------------------------------------------------------------------------------------


class Hub:
    """One hub and its caches. By default all is where huggingface_hub has it: its own settings say which hub (HF_ENDPOINT) and which cache."""

    def __init__(self, endpoint: str | None = None, cache: Path | None = None, *, progress: bool = True) -> None:
        self._endpoint = endpoint
        self._cache = cache
        self._progress = progress  # huggingface_hub's bars, on a terminal

    def cached(self, wanted: Wanted) -> Path | None:
        """The file (its first shard), if a cache has all of it."""
        return self._cached_by_llama(wanted) or self._cached_by_hub(wanted)

    def _cached_by_llama(self, wanted: Wanted) -> Path | None:
        """llama.cpp keeps OWNER/NAME/PATH as one file, OWNER_NAME_PATH, with _ for every / of the path too."""
        folder, prefix = cache_base() / "llama.cpp", wanted.repository.replace("/", "_") + "_"
        try:
            names = [path.name.removeprefix(prefix) for path in folder.iterdir() if path.name.startswith(prefix)]
        except OSError:
            return None  # there is no such cache
        chosen = choose(names, wanted)
        return folder / (prefix + chosen[0]) if chosen else None

    def _cached_by_hub(self, wanted: Wanted) -> Path | None:
        if not is_installed():
            return None
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound

        try:
            repositories = scan_cache_dir(self._cache).repos
        except CacheNotFound:
            return None
        for repository in repositories:
            if repository.repo_id == wanted.repository and repository.repo_type == "model":
                for revision in sorted(repository.revisions, key=lambda revision: -revision.last_modified):
                    paths = {file.file_path.relative_to(revision.snapshot_path).as_posix(): file.file_path for file in revision.files}
                    if chosen := choose(paths, wanted):
                        return Path(paths[chosen[0]])
        return None

    def download(self, wanted: Wanted, say: Callable[[str], None]) -> Path:
        """Fetch all its files into huggingface_hub's cache, with its progress bars; what an interrupted download left is used. The path of the file
        (its first shard). ModelFileError, with the command that does it elsewhere, if the hub cannot be had or has no such file."""
        if not is_installed():
            raise ModelFileError(f"{wanted.repository} is in no cache, and to download it needs {INSTALL}; or by hand: {wanted.command}")
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
        from huggingface_hub.utils import disable_progress_bars

        if not self._progress:
            disable_progress_bars()
        try:
            names = HfApi(endpoint=self._endpoint).list_repo_files(wanted.repository)
            chosen = choose(names, wanted)
            if not chosen:
                raise ModelFileError(f"{wanted.repository} has no whole model {wanted.quant or wanted.pattern or ''}: {_offer(names)}")
            say(f"downloading {wanted.repository}: {', '.join(chosen)}")
            paths = [self._fetch(wanted.repository, name, say, TRIES) for name in chosen]
        except RepositoryNotFoundError:
            raise ModelFileError(f"the hub has no public repository {wanted.repository}: check the name, or log in with: hf auth login") from None
        except (LocalEntryNotFoundError, HfHubHTTPError, HTTPError, OSError) as error:
            reason = " ".join(str(error).split()).split(". ")[0] or type(error).__name__
            raise ModelFileError(
                f"{wanted.repository} is in no cache and cannot be downloaded ({reason}); "
                f"where there is a network: {wanted.command}; the same command here goes on with a download that broke off"
            ) from None
        return Path(paths[0])

    def _fetch(self, repository: str, name: str, say: Callable[[str], None], tries: int) -> str:
        """One file. What came before a connection broke is kept, so trying again goes on from there."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HTTPError

        try:
            return str(hf_hub_download(repository, name, endpoint=self._endpoint, cache_dir=self._cache))
        except HTTPError as error:
            if isinstance(error, HfHubHTTPError) or tries == 1:  # the former: the hub has answered
                raise
            say(f"the connection broke ({error}): going on in {PAUSE:g} s")
        time.sleep(PAUSE)
        return self._fetch(repository, name, say, tries - 1)


def is_installed() -> bool:
    """Whether the package huggingface_hub is."""
    return find_spec("huggingface_hub") is not None


def _offer(names: Iterable[str]) -> str:
    """What a repository has instead, for a message."""
    models = sorted({_SHARD.sub(".gguf", name) for name in names if name.lower().endswith(".gguf")})
    return f"it has {', '.join(models[:12])}{' and more' if len(models) > 12 else ''}" if models else "it has no GGUF at all"
