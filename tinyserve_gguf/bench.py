"""The benchmark: which runs there are, in which order, and what is said about those that are not made.

One run is one loaded model: an expert cache and a policy, or llama.cpp alone with a part of the experts on the CPU. Every run reads the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from tinyserve_gguf import bench_profile, bench_start
from tinyserve_gguf._llama import ContextOptions, NativeContext, NativeModel, ggml_version
from tinyserve_gguf._shim import PagerStats
from tinyserve_gguf.bench_baseline import full_bytes, label, open_stock
from tinyserve_gguf.bench_measure import Subject, TokenSource, measure
from tinyserve_gguf.bench_needle import Needle, hide, look
from tinyserve_gguf.bench_options import BenchOptions, Run, Watch
from tinyserve_gguf.bench_table import Report, Row, guard_lines, measured_row, with_bounds
from tinyserve_gguf.context import ContextSpec, plan_context
from tinyserve_gguf.devices import device_facts
from tinyserve_gguf.errors import CapacityError, ModelFileError, OptionError, TinyserveError
from tinyserve_gguf.facts import read_facts
from tinyserve_gguf.hot_list import HotList
from tinyserve_gguf.miss import MissOptions
from tinyserve_gguf.miss_guard import MeasuredSplit, all_on_cpu, resident_bytes, tightest_split
from tinyserve_gguf.miss_memory import remember_splits
from tinyserve_gguf.miss_tuning import file_key
from tinyserve_gguf.model import Model, load
from tinyserve_gguf.needs import Setting, compute_bytes
from tinyserve_gguf.placement import default_threads, pick_device, plan_for
from tinyserve_gguf.plan import GIB
from tinyserve_gguf.planner import pick_ubatch
from tinyserve_gguf.sequence import TokenSequence
from tinyserve_gguf.window import Rolling, Window, WindowCounts

ADMIT = ("cpu", "split", "layers")  # ways in which misses enter the pool at a rate that can be chosen


class Bench:
    """One benchmark. Raises OptionError before anything is loaded if the options are impossible.

    `rows` and `notes` grow while `run` goes on; `report` gives what there is, also after an interrupt.
    """

    def __init__(self, options: BenchOptions, watch: Watch) -> None:
        self.options = options
        self.facts = read_facts(options.path)
        self.device = pick_device(options.device)
        self._where: dict[str, Any] = {"device": self.device.name, "tensor_split": options.tensor_split}
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self._watch = watch
        self._done = 0
        self._text_tokens: tuple[int, ...] = ()
        self._budgets: dict[int, list[str]] = {}  # blocks on the CPU at equal memory -> expert caches of that size
        if not options.cases and not options.needle and not options.starts:
            raise OptionError("there is nothing to measure: give -p, -n, --needle or --warm")
        if options.profile and not any(case.kind == "tg" for case in options.cases):
            raise OptionError("--profile takes the times of decode, and there is no tg test: give -n")
        trained = self.facts.context_length
        if trained and options.n_ctx > trained and (0 in options.windows or options.baseline):
            raise OptionError(
                f"the longest test needs a context of {options.n_ctx} tokens and {self.facts.name} has {trained}: "
                "give less depth, or shorter or fewer tests (a tg test goes on after the tokens of its repeats)"
            )
        n_ctx = min(options.n_ctx, trained or options.n_ctx)
        batches = (pick_ubatch(one, lambda n: compute_bytes(self.facts, Setting(n_ctx, n))) for one in map(device_facts, self.device.members))
        self._n_ubatch = options.n_ubatch or min(batches)  # the same for every run
        self._runs = self._plan_runs()
        self.link = self.device.link_rate()  # bytes per second
        if options.link_gbps and self.link and options.link_gbps * 1e9 > self.link:
            raise OptionError(f"--link-gbps {options.link_gbps:g} is above the {self.link / 1e9:.1f} GB/s that this link reaches: give less")

    @property
    def _misses(self) -> list[MissOptions]:
        """The ways to handle misses, each with every rate of admission where that applies."""
        options, found = self.options, list[MissOptions]()
        for mode in dict.fromkeys(options.misses):
            rates = dict.fromkeys(options.miss_admits) if mode in ADMIT and options.miss_admits else (None,)
            found += [MissOptions(mode, every, options.miss_threads if mode != "fetch" else None) for every in rates]
        if not any(miss.mode in ADMIT for miss in found) and options.miss_admits:
            raise OptionError("--miss-admit is for --miss cpu, split or layers: with fetch the CPU computes no expert, and auto tries several rates")
        if not any(miss.uses_cpu for miss in found) and options.miss_threads:
            raise OptionError("--miss-threads is for --miss cpu, split, layers or auto: with fetch the CPU computes no expert")
        return found

    def _plan_runs(self) -> list[Run]:
        """Expert caches with their policies. Where all experts are resident one policy is enough, as it decides nothing, and the link is idle."""
        options, runs = self.options, list[Run]()
        pairs = [(cache, window or None) for cache in dict.fromkeys(options.expert_caches) for window in dict.fromkeys(options.windows)]
        for cache, window in pairs:
            context = self._context(window)
            try:
                plan, chosen = plan_for(self.facts, expert_cache=cache, context=context, n_ubatch=self._n_ubatch, **self._where)
                plan_context(self.facts, context, chosen, n_ubatch=self._n_ubatch, n_threads=self._threads)
            except CapacityError as error:
                self._failed(Row(run=f"expert cache {cache}", runner="tinyserve-gguf", expert_cache=cache), error)
                continue
            resident = all(pool.is_resident for pool in plan.pools)
            policies = list(dict.fromkeys(options.policies))[: 1 if resident else None]
            misses = self._misses[: 1 if resident else None]
            link = None if resident else options.link_gbps
            runs += [Run(cache, policy, miss, link, not resident, window) for policy in policies for miss in misses]
        if options.profile and runs and not any(run.paged for run in runs):
            raise OptionError("--profile has nothing to tell apart, all experts are on the device: give a smaller --expert-cache")
        if options.link_gbps and runs and not any(run.link_gbps for run in runs):
            raise OptionError("--link-gbps has nothing to slow down, all experts are on the device: give a smaller --expert-cache")
        return runs

    def _context(self, window: int | None) -> ContextSpec:
        """Of one run."""
        return ContextSpec(None if window else self.options.n_ctx, Window(window) if window else None)

    def run(self) -> None:
        """Measure everything. KeyboardInterrupt when the watch says stop, CapacityError if nothing at all could be measured."""
        stock = self.options.baseline
        if stock:
            self._run_full()
        for run in self._runs:
            self._run_paged(run)
        if stock and self.facts.is_moe:
            self._run_splits()
        if all(row.error for row in self.rows):
            raise CapacityError("; ".join(f"{row.run}: {row.error}" for row in self.rows if row.error))

    def report(self) -> Report:
        options, facts = self.options, self.facts
        rows, notes = with_bounds(self.rows), list(self.notes)
        paged = [row for row in rows if row.is_timed and not row.all_resident and row.runner == "tinyserve-gguf" and row.warm is None]
        if any(row.bound_from is None for row in paged):
            notes.append("bounds need the compute time with everything on the device, and it was not measured: --baseline or --expert-cache all does")
        notes += guard_lines(rows)
        return Report(
            model={"path": str(facts.path), "name": facts.name, "architecture": facts.architecture, "file_bytes": facts.file_bytes},
            setup={
                "device": self.device.name,
                "device_description": self.device.description,
                "link_gbps": self.link / 1e9 or None,
                "n_ubatch": self._n_ubatch,
                "n_threads": self._threads,
                "n_ctx": options.n_ctx if 0 in options.windows or options.baseline else max(options.windows),
                "repeat": options.repeat,
                "warmup": options.warmup,
                "seed": options.seed,
                "llama_cpp_python": version("llama-cpp-python"),
                "ggml": ggml_version(),
            },
            rows=rows,
            notes=notes,
        )

    # ---- paged ----

    def _run_paged(self, run: Run) -> None:
        options = self.options
        base = Row(
            run=f"expert cache {run.expert_cache}",
            runner="tinyserve-gguf",
            expert_cache=run.expert_cache,
            tokens=self._tokens_name,
            window=run.window,
            link_gbps=run.link_gbps or self.link / 1e9 or None,
            link_throttled=run.link_gbps is not None,
        )
        free, start = self._free(), time.perf_counter()
        try:
            model = self._load(run)
        except TinyserveError as error:
            self._failed(base, error)
            return
        hot = None
        with model:
            base = self._placed(replace(base, load_seconds=time.perf_counter() - start), model, run.misses)
            if options.starts and not base.all_resident:
                hot = self._learn(model)
            needle = hide(model, options.needle, options.text, options.seed) if options.needle else None
            self._measure(base, model.native, model.context.options, model.context.rolling, lambda: model.stats().pager, free, model)
            self.notes += [f"{base.run}: {note}" for note in [*model.stats().device_lines(), *model.take_notes()]]
            self.rows = [replace(row, miss=model.miss) if row.run == base.run and row.miss else row for row in self.rows]  # as it is after all
            if needle:
                self._seek(base, model, needle)
        for warm in options.starts if hot else ():
            self._time_start(base, run, hot if warm else None)

    def _load(self, run: Run) -> Model:
        options = self.options
        return load(
            options.path,
            expert_cache=run.expert_cache,
            policy=run.policy,
            **self._where,
            n_ctx=None if run.window else options.n_ctx,
            window=run.window,
            n_ubatch=self._n_ubatch,
            n_threads=options.n_threads,
            engine=options.engine,
            link_gbps=run.link_gbps,
            miss=run.misses.mode,
            miss_admit=run.misses.every,
            miss_threads=run.misses.threads,
            miss_remember=False,
            progress=self._loading(f"expert cache {run.expert_cache}, {run.policy}" + (f", miss {run.misses.mode}" if run.misses.uses_cpu else "")),
        )

    def _learn(self, model: Model) -> HotList:
        """What decode uses of the model. Whatever a process does only once has been done then, so that no start is slower for being the first."""
        with closing(NativeContext(model.native, model.context.options)) as context:
            return bench_start.learn(self._subject(context, model), model.warm)

    def _time_start(self, base: Row, run: Run, hot: HotList | None) -> None:
        start = time.perf_counter()
        with self._load(run) as model:
            base = replace(base, load_seconds=time.perf_counter() - start, run=f"{base.run}, {'warm' if hot else 'cold'} start", warm=hot is not None)
            if hot:
                base = replace(base, fill_seconds=bench_start.timed_fill(model.warm, hot))
                self.notes.append(f"{base.run}: {model.warm.text}; the list is that of {bench_start.LEARNED} other tokens")
            with closing(NativeContext(model.native, model.context.options)) as context:
                self.rows.append(measured_row(base, bench_start.measure_start(self._subject(context, model))))

    def _subject(self, context: NativeContext, model: Model) -> Subject:
        sequence = TokenSequence(context, model.context.rolling, WindowCounts())
        return Subject(sequence, self._source(model.native), lambda: model.stats().pager, self._tick, model.decoded)

    def _placed(self, base: Row, model: Model, misses: MissOptions) -> Row:
        """The row of a run, completed by what was decided when the model was loaded."""
        pager = model.stats().pager
        resident = pager is None or pager.all_resident
        parts = [base.run]
        if not resident:
            parts.append(model.policy)
        if not resident and misses.uses_cpu:
            parts.append(f"miss {misses.mode}" + ("" if misses.every is None else f", admit 1/{misses.every}" if misses.every else ", admit none"))
        if self.options.engine != "auto":
            parts.append(f"{self.options.engine} engine")
        if base.window:
            parts.append(f"window {base.window}")
        if base.link_throttled:
            parts.append(f"link {base.link_gbps:g} GB/s (throttled)")
        if pager is None:
            return replace(base, run=", ".join(parts), all_resident=True)
        if not resident:
            k = tightest_split(self.facts, pager.pool_bytes + pager.stage_bytes)
            self._budgets.setdefault(k, []).append(base.run)
        return replace(
            base,
            run=", ".join(parts),
            policy=None if resident else model.policy,
            miss=None if resident else model.miss,
            engine=model.engine,
            all_resident=resident,
            expert_bytes=pager.pool_bytes,
            stage_bytes=pager.stage_bytes,
        )

    def _seek(self, base: Row, model: Model, needle: Needle) -> None:
        self._show(f"{base.run}: needle")
        try:
            answer = look(model, needle, self._tick)
        except CapacityError as error:
            self._failed(base, error)
            return
        stats = answer.stats
        row = replace(
            base,
            test=f"needle{self.options.needle}",
            n_tokens=len(needle.tokens),
            depth=0,
            tokens=self._tokens_name if self.options.text else "generated text",
            repeats=1,
            rate=stats.decode_rate,
            ttft_ms=stats.prefill_seconds * 1e3,
            hit_rate=stats.hit_rate,
            mb_per_token=stats.mb_per_token if stats.decode else None,
            number=needle.number,
            needle_at=needle.at,
            found=answer.found,
            reply=answer.reply,
        )
        self.rows.append(row)

    # ---- llama.cpp alone ----

    def _run_full(self) -> None:
        options = self.options
        need = full_bytes(self.facts, options.n_ctx, self._n_ubatch)
        free = self._free()
        if free is not None and need > free:
            self.notes.append(
                f"{label(self.facts, 0, self.device)}: not measured, it needs about {need / GIB:.1f} GiB and {free / GIB:.1f} GiB are free"
            )
        else:
            self._run_stock(0)

    def _run_splits(self) -> None:
        """All experts on the CPU, and for the memory of every expert cache the split that makes the most of it."""
        end = all_on_cpu(self.facts)
        if self.device.is_cpu:
            full = label(self.facts, 0, self.device)
            self.notes.append(f"{label(self.facts, end, self.device)}, or some by --n-cpu-moe: on this device that is {full!r}, not measured twice")
            return
        self._run_stock(end)
        for k, caches in sorted(self._budgets.items()):
            names = ", ".join(dict.fromkeys(caches))
            if 0 < k < end:
                self.notes.append(f"{label(self.facts, k, self.device)} is llama.cpp's best at the device memory of {names}")
                self._run_stock(k)
            else:
                self.notes.append(f"llama.cpp's best at the device memory of {names} is {label(self.facts, k, self.device)!r}")
        self._remember_splits()

    def _remember_splits(self) -> None:
        """Keep what llama.cpp's splits reached in decode, for the guard of `--miss auto`."""
        splits = [
            MeasuredSplit(row.n_cpu_moe, row.rate, row.expert_bytes or 0, self._threads, row.depth or 0, self.options.link_gbps)
            for row in self.rows
            if row.runner == "llama.cpp" and row.n_cpu_moe and row.rate and (row.test or "").startswith("tg")
        ]
        trouble = remember_splits(file_key(self.facts, self.device), splits) if splits else None
        self.notes += [trouble] if trouble else []

    def _run_stock(self, n_cpu_moe: int) -> None:
        options, name = self.options, label(self.facts, n_cpu_moe, self.device)
        base = Row(
            run=name,
            runner="llama.cpp",
            tokens=self._tokens_name,
            n_cpu_moe=n_cpu_moe,
            all_resident=n_cpu_moe == 0,
            expert_bytes=resident_bytes(self.facts, n_cpu_moe),
        )
        free, start = self._free(), time.perf_counter()
        try:
            native = open_stock(self.facts, self.device, n_cpu_moe, self._loading(name), split=options.tensor_split or ())
        except ModelFileError as error:  # the file is good: it was read above
            self._failed(base, error)
            return
        with closing(native):
            context = ContextOptions(n_ctx=options.n_ctx, n_batch=self._n_ubatch, n_ubatch=self._n_ubatch, n_threads=self._threads)
            self._measure(replace(base, load_seconds=time.perf_counter() - start), native, context, None, lambda: None, free)

    # ---- shared ----

    def _measure(
        self,
        base: Row,
        native: NativeModel,
        options: ContextOptions,
        rolling: Rolling | None,
        snapshot: Callable[[], PagerStats | None],
        free_before: int | None,
        model: Model | None = None,
    ) -> None:
        """All tests of one run, in one context."""
        if not self.options.cases:
            return
        try:
            context = NativeContext(native, options)
        except CapacityError as error:
            self._failed(base, error)
            return
        with closing(context):
            sequence = TokenSequence(context, rolling, WindowCounts())
            subject = Subject(sequence, self._source(native), snapshot, self._tick, model.decoded if model else lambda _seconds: None)
            for case in self.options.cases:
                self._show(f"{base.run}: {case.name}")
                row = measured_row(base, measure(subject, case, self.options.repeat, self.options.warmup))
                if model and self.options.profile and case.kind == "tg" and not base.all_resident:
                    self._tick()
                    end = case.n_ctx(self.options.repeat, self.options.warmup)
                    row = replace(row, profile=bench_profile.profile(subject, model, case, end))
                free = self._free()
                self.rows.append(replace(row, device_bytes=None if free is None or free_before is None else free_before - free))

    def _source(self, native: NativeModel) -> TokenSource:
        options = self.options
        if options.text is not None and not self._text_tokens:
            self._text_tokens = tuple(native.tokenize(options.text, add_special=True, parse_special=False))
            if len(self._text_tokens) < options.n_ctx:
                self.notes.append(f"{options.text_name} holds {len(self._text_tokens)} tokens: longer tests read it again from its start")
        return TokenSource(native.n_vocab, options.seed, self._text_tokens)

    @property
    def _threads(self) -> int:
        return self.options.n_threads or default_threads()

    @property
    def _tokens_name(self) -> str:
        return "random" if self.options.text is None else f"text {self.options.text_name}"

    def _free(self) -> int | None:
        """Free device memory now. None on the CPU, where other programs change it all the time."""
        return None if self.device.is_cpu else pick_device(self.device.name).memory_free

    def _failed(self, base: Row, error: TinyserveError) -> None:
        """A run that does not fit is one row; the others go on. Everything else ends the benchmark."""
        self._tick()
        if isinstance(error, CapacityError) or base.runner == "llama.cpp":
            self.rows.append(replace(base, tokens=None, error=str(error)))
        else:
            raise error

    def _tick(self) -> None:
        if self._watch.stopped():
            raise KeyboardInterrupt

    def _show(self, text: str) -> None:
        stock = self.options.baseline * (2 + len(self._runs))  # at most: full, all on the CPU, a split per expert cache
        total = (len(self._runs) + stock) * (len(self.options.cases) + 1) + len(self._runs) * bool(self.options.needle)
        self._watch.show(text, min(1.0, self._done / total))
        self._done += 1

    def _loading(self, name: str) -> Callable[[float], bool]:
        """The callback of a load. It must not raise: llama.cpp calls it."""
        self._show(f"{name}: loading")
        return lambda _fraction: not self._watch.stopped()
