"""The rooms and the arrows between them, as the code has them."""

import ast
import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "mpi_matmul"
MODULES = {
    "mpi_matmul." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
}
# A module imports only from the layers above its own line: arrows point one way.
LAYERS = [
    {"mesh", "memory", "progress", "versions", "stream", "svg"},
    {"layout"},
    {"verify", "storage", "blocks", "cores"},
    {"comm.protocol", "comm.engine", "accumulate", "machine"},
    {"comm.threads", "comm.mpi", "comm.mailbox"},
    {"comm.counting", "comm.group", "comm.collectives", "comm.ring", "comm.row_sums", "operands"},
    {"sources", "report", "launch", "work", "probe"},
    {"tiles"},
    {"travel", "tile_costs"},
    {"kernels.*"},
    {"kernels.__init__", "distribute"},
    {"check", "simulate", "costs", "draw"},
    {"choose"},
    {"options"},
    {"multiply", "outputs", "deliver"},
    {"ending", "door"},
    {"cli", "measure", "plot", "calibrate"},
    {"measure_collectives", "compare"},
    {"bench", "plan"},
    {"__init__", "__main__", "comm.__init__"},
]


def imports_of(module):
    """Names of modules that this one imports, anywhere in it."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(module):
    name = module.removeprefix("mpi_matmul.")
    if name.startswith("kernels.") and name != "kernels.__init__":
        name = "kernels.*"
    return next((number for number, layer in enumerate(LAYERS) if name in layer), None)


@pytest.mark.parametrize("module", MODULES)
def test_arrows_point_one_way(module):
    own = layer_of(module)
    assert own is not None, f"{module} has no place in the picture"
    for name in imports_of(module):
        target = name if name in MODULES else f"{name}.__init__"
        if target in MODULES and target != "mpi_matmul.__init__":
            assert layer_of(target) < own, f"{module} imports {target}"


def test_mpi4py_is_imported_in_one_module():
    users = {
        module for module in MODULES if any(name.split(".")[0] == "mpi4py" for name in imports_of(module))
    }
    assert users == {"mpi_matmul.comm.mpi"}


@pytest.mark.parametrize("module", [module for module in MODULES if ".kernels." in module])
def test_kernels_know_no_launcher_no_threads_no_mpi_and_not_each_other(module):
    forbidden = {"threading", "mpi_matmul.launch", "mpi_matmul.comm.threads", "mpi_matmul.comm.mpi"}
    if not module.endswith("__init__"):
        forbidden |= {name for name in MODULES if ".kernels." in name and name != module}
    assert not forbidden & set(imports_of(module))


@pytest.mark.parametrize("module", ["layout", "verify"])
def test_pure_rooms_import_no_communication(module):
    assert not [name for name in imports_of(f"mpi_matmul.{module}") if name.startswith("mpi_matmul.comm")]


def test_a_kernel_fits_on_a_screen_and_functions_are_short():
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                assert lines <= (25 if ".kernels." in module else 40), f"{module}.{node.name}: {lines} lines"


def test_the_public_names():
    import mpi_matmul

    names = {"Communicator", "compute_fn", "dp_mat_mul", "fsdp_compute_fn", "fsdp_mat_mul", "matmul"}
    assert set(mpi_matmul.__all__) == names
    assert all(callable(getattr(mpi_matmul, name)) and getattr(mpi_matmul, name).__doc__ for name in names)


@pytest.mark.parametrize(
    "module", ["layout", "comm.threads", "simulate", "cores", "report", "blocks", "draw", "mesh", "tiles"]
)
def test_the_examples_in_docstrings(module):
    outcome = doctest.testmod(importlib.import_module(f"mpi_matmul.{module}"))
    assert outcome.attempted
    assert not outcome.failed


def test_importing_the_package_starts_no_mpi():
    code = (
        "import os, sys; before = dict(os.environ); import mpi_matmul;"
        "mpi_matmul.dp_mat_mul([[1]], [[2]], 2);"
        "assert not [name for name in sys.modules if name.startswith('mpi4py')], 'mpi4py is imported';"
        "assert dict(os.environ) == before, 'the environment has changed'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
