"""Click options that the commands share. Names and meanings are llama.cpp's where it has them.

Nothing heavy is imported here: `--help` stays fast. The defaults of the sampling options repeat `Sampling`'s; a test keeps them equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tinyserve_gguf.choices import DEFAULT_SINKS, DEFAULT_WINDOW, ENGINES, FLASH_ATTENTION, KV_TYPES, MISSES, POLICIES
from tinyserve_gguf.errors import OptionError

if TYPE_CHECKING:
    from tinyserve_gguf.sampling import Sampling

F = TypeVar("F", bound=Callable[..., Any])

INT32_MAX = 2**31 - 1  # llama.cpp takes these as 32-bit numbers; a larger one would wrap around unseen
MAX_THREADS = 512  # GGML_MAX_N_THREADS
MAX_UBATCH = 1 << 16  # 128 times the default; what lies above only exhausts memory
SAMPLING = ("temp", "top_k", "top_p", "min_p", "repeat_penalty", "seed")


class ExpertCache(click.types.StringParamType):
    """The size of the expert cache. Checked by the planner's own parser and passed on as text."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from tinyserve_gguf.plan import CacheSpec

        try:
            CacheSpec.parse(value)
        except OptionError as error:
            self.fail(str(error), param, ctx)
        return str(value)


class Device(click.types.StringParamType):
    """A device name, or several with commas between them. Which ones exist is known once llama.cpp runs, so `load` checks that."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        names = text.split(",")
        if not all(names) or any(c.isspace() for c in text):
            self.fail(f"{text!r} is no device name such as auto, CPU or CUDA0, nor several such as CUDA0,CUDA1", param, ctx)
        if len(names) > 1 and "auto" in text.lower().split(","):
            self.fail(f"{text!r}: auto stands alone, it takes several devices if one does not do", param, ctx)
        return text


class TensorSplit(click.types.StringParamType):
    """Shares of the layers, one per device."""

    name = "shares"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A tuple of floats."""
        from tinyserve_gguf.split import check_shares, parse_split

        try:
            return parse_split(value) if isinstance(value, str) else check_shares(value)
        except OptionError as error:
            self.fail(str(error), param, ctx)


class Adapters(click.types.StringParamType):
    """LoRA adapters, several with commas between them as llama.cpp has it; `scaled`: each with a colon and its scale."""

    name = "adapters"

    def __init__(self, *, scaled: bool = False) -> None:
        self._scaled = scaled

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A tuple of paths, or of pairs of a path and a scale."""
        files = [self._split(file, param, ctx) if self._scaled else (file, 1.0) for file in str(value).split(",")]
        if not all(path for path, _ in files):
            self.fail(f"{value!r} names no file", param, ctx)
        return tuple(files if self._scaled else (path for path, _ in files))

    def _split(self, text: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        path, _, scale = text.rpartition(":")
        try:
            return path, float(scale)
        except ValueError:
            self.fail(f"{text!r} is not FILE:SCALE, such as lora.gguf:0.5", param, ctx)


def _joined(_context: click.Context, _parameter: click.Parameter, given: tuple[tuple[Any, ...], ...]) -> tuple[Any, ...]:
    """The values of an option that was given several times, as one."""
    return tuple(one for several in given for one in several)


class FiniteRange(click.FloatRange):
    """A FloatRange without nan and inf, which click lets through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if number - number != 0:  # nan for nan and for inf
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class TokenLimit(click.IntRange):
    """-1, or 1 and more tokens."""

    def __init__(self) -> None:
        super().__init__(min=-1, max=INT32_MAX)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = int(super().convert(value, param, ctx))
        if number == 0:
            self.fail("0 tokens leave nothing to do; -1 = until the model stops", param, ctx)
        return number


class WindowSize(click.IntRange):
    """Tokens. The option's value may be left out, so what follows it may be another argument."""

    def __init__(self) -> None:
        super().__init__(min=2, max=INT32_MAX)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if not str(value).lstrip("-").isdecimal():
            self.fail(f"{value!r} is no number of tokens: write --window after MODEL, or --window=N", param, ctx)
        return int(super().convert(value, param, ctx))


expert_cache_option = click.option(
    "--expert-cache",
    type=ExpertCache(),
    default="auto",
    show_default=True,
    metavar="SIZE",
    help="Experts kept on the device: all, a count N, a share 25%, a size 6GiB, or auto (what fits).",
)
policy_option = click.option("--policy", type=click.Choice(POLICIES), default="lfru", show_default=True, help="Which expert leaves the cache first.")
engine_option = click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="auto",
    show_default=True,
    help="Who reads the router's choice: the host once a layer, or the device in one CUDA graph per token.",
)
device_option = click.option(
    "--device",
    type=Device(),
    default="auto",
    show_default=True,
    metavar="NAME",
    help="Device that computes: auto, CPU, CUDA0, ...; CUDA0,CUDA1 splits the layers over both.",
)
tensor_split_option = click.option(
    "--tensor-split",
    type=TensorSplit(),
    metavar="N,N...",
    help="With several devices: the share of the layers that each gets, such as 3,1.  [default: what fits best]",
)
split_mode_option = click.option(
    "--split-mode",
    default="layer",
    show_default=True,
    metavar="MODE",
    help="How several devices share the model; row and tensor do not go with paging.",
)
miss_option = click.option(
    "--miss",
    type=click.Choice(MISSES),
    default="fetch",
    show_default=True,
    help="Experts that decode misses: fetch them, let the CPU compute them, split them between both, keep whole layers here and the others there, "
    "or auto: what is fastest here.",
)
miss_admit_option = click.option(
    "--miss-admit",
    type=click.IntRange(0, INT32_MAX),
    metavar="N",
    help="Of the misses that the CPU computes at most one in N enters the cache; 0 = none.  [default: 4]",
)
miss_threads_option = click.option(
    "--miss-threads",
    type=click.IntRange(1, MAX_THREADS),
    metavar="N",
    help="CPU threads that compute misses.  [default: as -t, with a core left over]",
)
ctx_size_option = click.option(
    "-c",
    "--ctx-size",
    "n_ctx",
    type=click.IntRange(0, INT32_MAX),
    metavar="N",
    help="Context length in tokens; 0 = the model's own.  [default: 4096]",
)
window_option = click.option(
    "--window",
    type=WindowSize(),
    is_flag=False,
    flag_value=DEFAULT_WINDOW,
    metavar="[W]",
    help=f"Go on without end in a context of W tokens: the oldest leave.  [default: off; {DEFAULT_WINDOW} without a value]",
)
sinks_option = click.option(
    "--sinks",
    type=click.IntRange(0, INT32_MAX),
    metavar="S",
    help=f"With --window: how many of the first tokens never leave.  [default: {DEFAULT_SINKS}]",
)
kv_type_option = click.option(
    "--kv-type", type=click.Choice(KV_TYPES), default="f16", show_default=True, help="Type of the KV cache: of keys, and of values too."
)
kv_type_v_option = click.option("--kv-type-v", type=click.Choice(KV_TYPES), help="Type of the values, if not that of the keys.")
flash_attn_option = click.option("--flash-attn", type=click.Choice(FLASH_ATTENTION), default="auto", show_default=True, help="Flash attention.")
ubatch_option = click.option(
    "-b",
    "--ubatch",
    "-ub",
    "--ubatch-size",
    "n_ubatch",
    type=click.IntRange(1, MAX_UBATCH),
    metavar="N",
    help="Prompt tokens computed at once.  [default: 512; on a GPU up to 4096, as memory allows]",
)
threads_option = click.option(
    "-t", "--threads", "n_threads", type=click.IntRange(1, MAX_THREADS), metavar="N", help="CPU threads.  [default: chosen for this machine]"
)
warm_option = click.option(
    "--warm/--no-warm",
    default=True,
    show_default=True,
    help="Fill the cache with the experts that decode used most in earlier runs, and keep count of this one.",
)
lora_option = click.option(
    "--lora", type=Adapters(), multiple=True, callback=_joined, metavar="FILE[,FILE...]", help="LoRA adapters to use, in GGUF."
)
lora_scaled_option = click.option(
    "--lora-scaled",
    type=Adapters(scaled=True),
    multiple=True,
    callback=_joined,
    metavar="FILE:SCALE[,...]",
    help="The same, each with a scale.",
)
predict_option = click.option(
    "-n",
    "--predict",
    "n_predict",
    type=TokenLimit(),
    default=-1,
    show_default=True,
    metavar="N",
    help="Most tokens in a reply; -1 = until the model stops.",
)


vram_option = click.option(
    "--vram", type=FiniteRange(min=0, min_open=True), metavar="GiB", help="Device memory to plan with.  [default: what is free]"
)
vram_reserve_option = click.option(
    "--vram-reserve",
    type=FiniteRange(min=0, min_open=True),
    metavar="GiB",
    help="Of it, what stays free.  [default: a twentieth, 0.5 at least; 0.25 where --expert-cache gives a size]",
)
ram_option = click.option(
    "--ram",
    type=FiniteRange(min=0, min_open=True),
    metavar="GiB",
    help="Host memory that may be page-locked for experts.  [default: nine tenths of what is available]",
)


def placement_options(command: F) -> F:
    """What `load` takes, as keyword arguments of the same names."""
    context = (flash_attn_option, kv_type_v_option, kv_type_option, sinks_option, window_option, ctx_size_option)
    misses = (miss_threads_option, miss_admit_option, miss_option)
    devices = (split_mode_option, tensor_split_option, device_option)
    budget = (ram_option, vram_reserve_option, vram_option)
    adapters = (lora_scaled_option, lora_option)
    for option in (threads_option, ubatch_option, *adapters, *context, *devices, *misses, policy_option, warm_option, *budget, expert_cache_option):
        command = option(command)
    return command


def sampling_options(command: F) -> F:
    """The fields of `Sampling` named in SAMPLING, as keyword arguments."""
    options: tuple[tuple[str, FiniteRange | click.IntRange, float, str], ...] = (
        ("--temp", FiniteRange(min=0), 0.8, "Temperature; 0 = always the likeliest token."),
        ("--top-k", click.IntRange(0, INT32_MAX), 40, "Draw from the K likeliest tokens; 0 = off."),
        ("--top-p", FiniteRange(min=0, min_open=True, max=1), 0.95, "Draw from the likeliest tokens that sum up to P; 1 = off."),
        ("--min-p", FiniteRange(min=0, max=1), 0.05, "Drop tokens less likely than P times the likeliest; 0 = off."),
        ("--repeat-penalty", FiniteRange(min=0, min_open=True), 1.0, "Penalty on recently used tokens; 1 = off."),
        ("--seed", click.IntRange(-1, 2**32 - 1), -1, "Seed of the random draws; -1 = a new one each time."),
    )
    for name, kind, default, text in reversed(options):
        command = click.option(name, type=kind, default=default, show_default=True, metavar="X", help=text)(command)
    return command


def take_sampling(options: dict[str, Any]) -> Sampling:
    """Move the sampling options out of a command's keyword arguments into a Sampling. What is left are the arguments of `load`."""
    from tinyserve_gguf.sampling import Sampling

    return Sampling(**{name: options.pop(name) for name in SAMPLING})
