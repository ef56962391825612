"""The shape of the package, read from its sources: imports go one way, each library has one owner, errors are named, files stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import environment

import tinyserve_gguf

PACKAGE = Path(tinyserve_gguf.__file__).parent
MODULES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): ast.parse(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}

# A module may import those of its own line and of the lines above it. `cli` stands for everything in that folder.
LAYERS = (
    ("errors", "choices", "progress", "user_files", "toml_files", "text", "host", "counters", "_log"),
    ("sampling", "window", "attention"),
    ("kv",),
    ("_llama", "_ggufio", "demo", "outfile", "kept"),
    ("_sampler", "facts", "channels", "sequence", "_ops", "_matmul", "_types", "_torch", "float64"),
    ("needs", "geometry", "micro", "check", "hot_list", "hub"),
    ("plan", "catalog", "lora"),
    ("planner", "machine", "cuda_driver", "resolve"),
    ("estimate", "split"),
    ("_shim",),
    ("devices",),
    ("dryrun", "_measure", "doctor_checks"),
    ("experts", "miss", "miss_guard", "stats", "context", "warm"),
    ("miss_auto",),
    ("placement", "paging", "live"),
    ("group",),
    ("doctor_rates",),
    ("doctor",),
    ("miss_memory",),
    ("miss_tuning",),
    ("session", "weights"),
    ("model", "llama_options", "llama_context"),
    ("llama",),
    ("offloading",),
    ("chat", "bench_baseline", "bench_measure", "bench_needle", "verify_kernels", "verify_logits"),
    ("bench_table", "bench_profile", "bench_start"),
    ("bench_options",),
    ("bench", "bench_plot", "verify"),
    ("verify_report", "verify_types"),
    ("serve_reply", "serve_request", "serve_queue"),
    ("serve_llama", "serve_http"),
    ("serve_prepare", "serve_metrics"),
    ("serve_jobs", "serve_state"),
    ("serve_api",),
    ("serve",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
CLI_LAYERS = (
    ("interrupt", "lines", "options", "outlook", "output", "settings", "versions"),
    ("repl", "report", "model_argument"),
    ("bench", "chat", "completion", "config", "demo", "doctor", "info", "models", "serve", "verify"),
    ("__init__",),
)
CLI_RANK = {name: rank for rank, names in enumerate(CLI_LAYERS) for name in names}
MAX_LINES = 420


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything imported anywhere in a module, in functions and for type checking too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(name: str) -> str | None:
    """The module of this package that `name` lies in; None for other packages, and for names of the package itself."""
    parts = name.split(".")
    if parts[0] != "tinyserve_gguf" or len(parts) < 2:
        return None
    for end in range(len(parts), 1, -1):
        module = ".".join(parts[1:end])
        if module in MODULES:
            return module
        if f"{module}.__init__" in MODULES:
            return f"{module}.__init__"
    return None


def in_cli(module: str) -> str | None:
    return module.removeprefix("cli.") if module.startswith("cli.") else None


@pytest.mark.parametrize("module", [module for module in MODULES if module != "__init__"])
def test_imports_go_one_way(module: str) -> None:
    """`__init__` is left out: it gives every public name, each when it is first used."""
    rank = RANK["cli" if in_cli(module) else module]
    for imported in filter(None, map(ours, imports(MODULES[module]))):
        inner, other = in_cli(module), in_cli(imported)
        if inner and other:
            assert CLI_RANK[other] <= CLI_RANK[inner], f"{module} imports {imported}"
        else:
            assert RANK["cli" if other else imported] <= rank, f"{module} imports {imported}"


def test_the_package_imports_nothing_by_itself() -> None:
    """`import tinyserve_gguf` is cheap and cannot fail on a broken native library: what stands at the top of `__init__` is the standard library's."""
    top = [node for node in MODULES["__init__"].body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {name.split(".")[0] for node in top for name in imports(node)} <= {"importlib", "typing"}


@pytest.mark.parametrize("module", ["model", "llama", "offloading", "chat", "bench", "bench_plot", "verify", "verify_types", "placement", "serve"])
def test_llama_is_loaded_before_numpy(module: str, tmp_path: Path) -> None:
    """The other order crashed in libstdc++ on one GPU machine. These are what commands and apps start with."""
    code = f"import sys, tinyserve_gguf.{module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, env=environment()).stdout.split()
    assert loaded.index("llama_cpp.llama_cpp") < loaded.index("numpy")


@pytest.mark.parametrize(
    ("library", "owner"), [("llama_cpp", "_llama"), ("cffi", "_shim"), ("torch", "_torch"), ("matplotlib", "bench_plot"), ("huggingface_hub", "hub")]
)
def test_one_owner(library: str, owner: str) -> None:
    assert {module for module, tree in MODULES.items() for name in imports(tree) if name.split(".")[0] == library} == {owner}


@pytest.mark.parametrize("module", MODULES)
def test_errors_are_caught_by_name(module: str) -> None:
    """No handler takes everything; BaseException only where it is raised again."""
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.ExceptHandler):
            kinds = [ast.unparse(kind) for kind in (node.type.elts if isinstance(node.type, ast.Tuple) else [node.type] if node.type else [])]
            assert kinds, f"{module}:{node.lineno} catches everything"
            assert "Exception" not in kinds, f"{module}:{node.lineno}"
            if "BaseException" in kinds:
                last = node.body[-1]
                assert isinstance(last, ast.Raise), f"{module}:{node.lineno}"
                assert last.exc is None, f"{module}:{node.lineno}"


@pytest.mark.parametrize("module", MODULES)
def test_environment_changes_nothing(module: str) -> None:
    """Only the base directories of the user's files come from the environment."""
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb", "putenv"):
            pytest.fail(f"{module}:{node.lineno} reads the environment") if not reads_xdg(module, node) else None
    assert not {"environ", "getenv"} & {name.rpartition(".")[2] for name in imports(MODULES[module])}


def reads_xdg(module: str, node: ast.Attribute) -> bool:
    """Whether `node` is the os.environ in os.environ.get("XDG_...", "")."""
    for call in ast.walk(MODULES[module]):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.value is node and call.func.attr == "get":
            return isinstance(call.args[0], ast.Constant) and str(call.args[0].value).startswith("XDG_")
    return False


@pytest.mark.parametrize("module", MODULES)
def test_files_are_small(module: str) -> None:
    assert len((PACKAGE / Path(*module.split("."))).with_suffix(".py").read_text("utf-8").splitlines()) < MAX_LINES
