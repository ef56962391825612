"""A model as llama-cpp-python's class loads it, with its experts paged: what several contexts share, and the last of them frees."""

from __future__ import annotations

from threading import Lock
from typing import Any

from tinyserve_gguf import _shim
from tinyserve_gguf._llama import NativeModel, loader_params
from tinyserve_gguf._shim import Device, Pager
from tinyserve_gguf.choices import POLICIES
from tinyserve_gguf.errors import CapacityError, OptionError
from tinyserve_gguf.experts import Experts
from tinyserve_gguf.group import open_pagers
from tinyserve_gguf.live import ExpertMap, Resized, read_map, resize
from tinyserve_gguf.miss import MissOptions
from tinyserve_gguf.miss_tuning import Tuning, Watching, start_misses, watcher
from tinyserve_gguf.paging import EXPERT_PATTERN, Layers
from tinyserve_gguf.plan import Plan
from tinyserve_gguf.split import shares_of
from tinyserve_gguf.stats import Stats, parts_of
from tinyserve_gguf.warm import WarmStart
from tinyserve_gguf.window import WindowCounts


def check_policy(policy: str) -> None:
    """OptionError if there is no such policy."""
    if policy not in POLICIES:
        raise OptionError(f"the policy is one of {', '.join(POLICIES)}, not {policy!r}")


class Weights:
    """Call order: `prepare` the loader's parameters, load, `adopt` the llama_model; then every context holds it with `hold` and lets go with
    `release`. `device` None leaves the choice of devices to llama.cpp; `n_threads` are
    those of its CPU work."""

    def __init__(self, plan: Plan, device: Device | None, policy: str, misses: MissOptions, n_threads: int, *, warm: bool = False) -> None:
        self.plan = plan
        self.policy = policy
        self._device = device
        self._misses, self._threads = misses, n_threads
        self._lock = Lock()
        self._resizing = Lock()
        self._users = 1  # whoever made it
        self._windows: list[WindowCounts] = []  # of open contexts
        self._closed_windows, self._windows_before = WindowCounts(), WindowCounts()  # of closed ones; at the last reset of the counters
        self._native: NativeModel | None = None
        self._experts: Experts | None = None
        self.watch_misses: Tuning | Watching | None = None  # hears of every decoded token
        self.pager: Pager | None = None
        self._warm: WarmStart | None = None  # if it is asked for
        self._keeps_warm = warm
        self._layers: Layers = {}
        self._keep: list[object] = []  # what the loader's parameters point at
        if plan.facts.is_moe:
            assert device
            self.pager, self._layers = open_pagers(plan, device, policy, "auto", misses.threads)

    # ---- life ----

    def prepare(self, params: Any) -> None:
        """Name the device, and the buffer type of the experts, in a llama_model_params."""
        if self.pager:
            self._keep += loader_params(params, self.pager.offload(EXPERT_PATTERN))
        elif self._device:
            self._keep += loader_params(params, self._device.offload(shares_of(self.plan)))

    def adopt(self, model: Any) -> None:
        """Take over a llama_model that was loaded with the prepared parameters, and open the host pool."""
        self._native = NativeModel.adopted(model)
        if self.pager:
            assert self._device
            self.pager.ready()
            self._experts = Experts(self.pager, self._layers)
            if self._keeps_warm:
                self._warm = WarmStart(self.plan.facts, self.pager, self._layers)
                self._warm.fill_from_file()
            self.watch_misses = start_misses(self.pager, self._misses, self.plan.facts, self._device, "auto", None, self._threads)

    def why_not_loaded(self) -> CapacityError | None:
        """After a load that failed: the error, if memory for the experts was missing."""
        if self.pager and "cannot be had" in _shim.last_error():
            return CapacityError(f"{_shim.last_error()}; close other programs, or use a smaller quantisation")
        return None

    def watch(self, windows: WindowCounts) -> None:
        """Count what the window of a context does, until it lets go."""
        with self._lock:
            self._windows.append(windows)

    def hold(self) -> None:
        """One more context. OptionError if the last one has let go already."""
        with self._lock:
            if self._users == 0:
                raise OptionError("the model is closed")
            self._users += 1

    def release(self, windows: WindowCounts) -> None:
        """One context less; `windows`: what its window did."""
        with self._lock:
            self._users -= 1
            self._closed_windows = self._closed_windows.plus(windows)
            self._windows = [counts for counts in self._windows if counts is not windows]
            if self._users:
                return
        if self._warm:
            self._warm.keep()
        if self._native:
            self._native.close()
        if self.pager:
            self.pager.close()

    # ---- what it is ----

    @property
    def native(self) -> NativeModel:
        assert self._native
        return self._native

    @property
    def experts(self) -> Experts:
        """OptionError on a dense model."""
        if self._experts is None:
            raise OptionError(f"{self.plan.facts.name} is dense: it has no experts")
        return self._experts

    def stats(self, *, windows: bool) -> Stats:
        """Counters since the model was opened; `windows`: those of windows too."""
        pager = self.pager.stats() if self.pager else None
        kept = self._all_windows().since(self._windows_before) if windows else None
        return Stats(pager, self.policy, self.plan.device.name, kept, parts_of(self.pager))

    def reset_stats(self) -> None:
        self._windows_before = self._all_windows()
        if self._warm:
            self._warm.absorb()
        if self.pager:
            self.pager.reset_stats()

    def _all_windows(self) -> WindowCounts:
        with self._lock:
            total = self._closed_windows
            for counts in self._windows:
                total = total.plus(counts)
            return total

    def lines(self) -> list[str]:
        """The plan, and what could only be known once the model was loaded."""
        if self.pager is None:
            return self.plan.lines()
        misses = self.watch_misses.text if self.watch_misses else self.pager.miss
        warm = [self._warm.text] if self._warm else []
        return [*self.plan.lines(), f"engine: {self.pager.engine}", f"host pool: {self.pager.host}", f"misses: {misses}", *warm]

    def expert_map(self) -> ExpertMap:
        """Every expert at one moment; may be called several times a second while replies run. OptionError on a dense model."""
        return read_map(self.experts.pager, self.plan)

    def resize(self, expert_cache: str | int) -> Resized:
        """Give the expert cache another size, as `Model.resize` does."""
        with self._resizing:
            assert self._device
            self.plan, done = resize(self.experts.pager, self.plan, expert_cache, self._device)
            self.watch_misses = watcher(self.experts.pager, self._misses, self.plan.facts, self._device, "auto", None, self._threads)
        return done

    def set_policy(self, policy: str) -> None:
        check_policy(policy)
        self.policy = policy
        if self.pager:
            self.pager.set_policy(policy)
