"""Dependencies point one way: storage knows nothing of the engine, product code nothing of the tests' tools."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import infinity

ROOT = Path(__file__).parent.parent
PACKAGES = ("infinity", "storage")
# What decides and what computes; it runs without an engine, so that it can be tested without one.
PURE = ("layout", "units", "order", "placement", "readahead")
PUBLIC = """
    Adam AdamW CheckpointError CheckpointNotFoundError Config ConfigError DeviceConfig DeviceKind DeviceOutOfMemoryError
    Durability Engine
    GradScaler HostConfig InfinityError IterationError Lion NotGatheredError NvmeConfig PlacementError Precision
    RankError SGD Schedule UnsupportedModelError clip_grad_norm_ empty_init gathered offload
"""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def import_nodes(tree: ast.AST, *, at_import_only: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that happen when the program runs; `at_import_only` leaves out those inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif is_type_checking(node):
            continue
        elif not (at_import_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            yield from import_nodes(node, at_import_only=at_import_only)


def imports_of(module: str, *, at_import_only: bool = False) -> set[str]:
    """Names of the modules that a module imports."""
    found: set[str] = set()
    for node in import_nodes(ast.parse(SOURCES[module].read_text()), at_import_only=at_import_only):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{module}: relative import"
            assert node.module is not None
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name if name in SOURCES else node.module for name in whole)
    return found


def reachable_from(module: str) -> dict[str, list[str]]:
    """Every module of ours that an import of `module` runs, with the chain of imports that leads there."""
    chains = {module: [module]}
    waiting = [module]
    while waiting:
        current = waiting.pop()
        for name in imports_of(current, at_import_only=True) & SOURCES.keys() - chains.keys():
            chains[name] = [*chains[current], name]
            waiting.append(name)
    return chains


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def offenders(inside: str, forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{module} imports {name}"
        for module in SOURCES
        if is_in(module, inside)
        for name in sorted(imports_of(module))
        if any(is_in(name, package) for package in forbidden)
    ]


def test_the_sources_are_found() -> None:
    assert {"infinity", "infinity.engine", "infinity.optim.adamw", "storage.store"} <= SOURCES.keys()
    assert "infinity.layout" in imports_of("infinity.host_division")
    assert "storage.align" in imports_of("infinity.layout")


def test_files_that_the_documentation_names_are_there() -> None:
    text = "".join(path.read_text() for path in [*sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"])
    named = set(re.findall(r"`((?:infinity|storage)/[\w/]+\.py)`", text))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_storage_knows_neither_the_engine_nor_torch() -> None:
    # Inside functions, when GPUDirect Storage is asked for by name.
    assert offenders("storage", ("infinity", "torch", "tests")) == ["storage.backends.gds imports torch"]


def test_storage_store_is_loaded_without_torch() -> None:
    assert loaded_by("import storage.store", "torch", "infinity") == []


def test_tools_of_the_tests_stay_out_of_the_product() -> None:
    found = offenders("infinity", ("infinity.testing", "tests", "pytest", "hypothesis"))
    # The fake GPU is one of the tools and, as `device.kind = "fake"`, a device that users may choose.
    # The virtual clock is what the planner simulates on.
    assert [line for line in found if not line.startswith("infinity.testing")] == [
        "infinity.devices.fake imports infinity.testing.clock",
        "infinity.devices.fake imports infinity.testing.fake_gpu",
        "infinity.devices.fake imports infinity.testing.fake_pages",
        "infinity.devices.select imports infinity.testing.fake_gpu",
        "infinity.plan.solo_loop imports infinity.testing.clock",
    ]
    assert offenders("infinity.testing", ("tests", "pytest", "hypothesis")) == []


@pytest.mark.parametrize("name", PURE)
def test_what_decides_does_not_need_an_engine(name: str) -> None:
    chains = reachable_from(f"infinity.{name}")
    assert "infinity.engine" not in chains, " → ".join(chains["infinity.engine"])
    assert "infinity.engine" not in imports_of(f"infinity.{name}")


def test_layout_and_order_need_no_torch() -> None:
    for name in ("layout", "order"):
        for module in reachable_from(f"infinity.{name}"):
            assert not any(is_in(imported, "torch") for imported in imports_of(module)), module


@pytest.mark.parametrize("name", ["engine", "optim", "devices", "checkpoint"])
def test_the_engine_does_not_know_its_command_line(name: str) -> None:
    assert offenders(f"infinity.{name}", ("infinity.cli", "infinity.bench", "infinity.doctor", "typer", "rich")) == []


def test_no_import_cycles() -> None:
    edges = {module: imports_of(module, at_import_only=True) & SOURCES.keys() for module in SOURCES}
    finished: set[str] = set()

    def visit(module: str, chain: list[str]) -> None:
        assert module not in chain, " → ".join([*chain[chain.index(module) :], module])
        if module not in finished:
            for name in sorted(edges[module]):
                visit(name, [*chain, module])
            finished.add(module)

    for module in edges:
        visit(module, [])


# The public names ------------------------------------------------------------------------------------------------


def test_public_names_are_exactly_these() -> None:
    assert sorted(infinity.__all__) == sorted(PUBLIC.split())
    assert set(dir(infinity)) == {*infinity.__all__, "__version__"}


@pytest.mark.parametrize("name", infinity.__all__)
def test_every_public_name_is_there(name: str) -> None:
    value = getattr(infinity, name)
    assert value.__name__ == name
    assert value.__doc__


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(SOURCES["infinity"].read_text())
    (block,) = [node for node in tree.body if is_type_checking(node)]
    imported = [node for node in ast.walk(block) if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: node.module for node in imported for alias in node.names}
    assert sorted(homes) == sorted(infinity.__all__)
    for name, home in homes.items():
        assert getattr(infinity, name) is getattr(sys.modules[str(home)], name)


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="module 'infinity' has no attribute 'ofload'"):
        _ = infinity.ofload  # type: ignore[attr-defined]


@pytest.mark.parametrize("program", ["import infinity", "import infinity; infinity.Config()", "import infinity.errors"])
def test_settings_and_errors_are_loaded_without_torch(program: str) -> None:
    assert loaded_by(program, "torch") == []


# What takes long to import, and what only some runs need.
LATE = (
    *("numba", "llvmlite", "rich", "typer", "plotly", "matplotlib", "transformers", "accelerate", "peft"),
    *("pytorch_lightning", "prometheus_client", "tensorboard", "torch.distributed.tensor", "torch.testing"),
    *("infinity.cli", "infinity.bench", "infinity.report", "infinity.doctor", "infinity.migration"),
)


def test_every_public_name_comes_without_what_only_some_runs_need() -> None:
    uses = "; ".join(f"infinity.{name}" for name in infinity.__all__)
    late = loaded_by(f"import torch, infinity; {uses}", *LATE)
    assert [name for name in late if name not in loaded_by("import torch", *LATE)] == []


TRAINS = """
import tempfile, torch, infinity
with infinity.empty_init():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
with tempfile.TemporaryDirectory() as folder:
    sizes = {"device": {"kind": "cpu", "budget": "1MiB"}, "host": {"budget": "4MiB"}}
    with infinity.offload(model, infinity.Config(precision="fp32", nvme={"paths": [folder]}, **sizes)):
        optimizer = infinity.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
"""


def test_training_comes_without_the_compiler() -> None:
    assert loaded_by(TRAINS, "torch._dynamo", "sympy") == []


PLANS = """
import contextlib, io
from infinity.cli.main import app
with contextlib.redirect_stdout(io.StringIO()):
    app(["plan", "--layers", "4", "--hidden", "64", "--gpu", "h100"], standalone_mode=False)
"""


def test_planning_comes_without_the_compiler_and_the_engine() -> None:
    """Each would take as long as the plan; only models that have to be run need the compiler."""
    assert loaded_by(PLANS, "torch._dynamo", "sympy", "transformers", "infinity.runtime", "storage.store") == []


def loaded_by(program: str, *packages: str) -> list[str]:
    """Which of the packages a fresh interpreter has loaded after a program."""
    report = f"import sys; print(*[name for name in {packages!r} if name in sys.modules])"
    command = [sys.executable, "-c", f"{program}\n{report}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True, cwd=ROOT)
    return done.stdout.split()
