"""The pictures of the kernels: they are those of the table, and say what the formulas say."""

import dataclasses
import math
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from launcher import REPOSITORY, job_environment

from mpi_matmul.draw import PROBLEM, RANK, draw, example, matrices, moves, owners, write
from mpi_matmul.kernels import KERNELS
from mpi_matmul.layout import Placement
from mpi_matmul.operands import Problem

MAP = REPOSITORY / "mpi_matmul" / "map"
REDRAW = "the pictures are no longer those of the table: python -m mpi_matmul.draw mpi_matmul/map"


def picture(strategy):
    return draw(strategy, PROBLEM, RANK)


def test_the_pictures_in_the_repository_are_those_of_the_table(tmp_path):
    write(tmp_path)
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(drawn) == {f"{name}.svg" for name in KERNELS}
    assert drawn == {path.name: path.read_bytes() for path in MAP.iterdir()}, REDRAW


@pytest.mark.parametrize("name", KERNELS)
def test_a_picture_is_an_svg_with_a_title_that_names_kernel_and_mesh(name):
    strategy = example(name)
    root = ElementTree.fromstring(picture(strategy))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    mesh = " \N{MULTIPLICATION SIGN} ".join(map(str, strategy.mesh.shape))
    assert root.findtext("{http://www.w3.org/2000/svg}title") == f"{name} on a mesh of {mesh} ranks"


@pytest.mark.parametrize("name", KERNELS)
def test_every_part_is_a_rectangle_and_every_move_an_arrow(name):
    strategy = example(name)
    every = matrices(strategy, PROBLEM).values()
    parts = sum(len(owners(distribution, shape)) for distribution, shape in every)
    moved = moves(strategy, PROBLEM, RANK)
    sums, copies = any(move.matrix == "c" for move in moved), any(one.copies > 1 for one, _ in every)
    kinds = re.findall(r'<(\w+) class="(part|own|arrow)"', picture(strategy))
    # On the left all parts, on the right those of one rank; besides, the legend.
    assert kinds.count(("rect", "part")) == parts + 3 + len(moved) + 1 + copies
    assert kinds.count(("rect", "own")) == 3 + 1
    legend = sums + any(move.matrix != "c" for move in moved)
    assert kinds.count(("polygon", "arrow")) == len(moved) + sums + legend


@pytest.mark.parametrize("name", KERNELS)
def test_all_that_is_on_a_picture_lies_within_it(name):
    root = ElementTree.fromstring(picture(example(name)))
    width, height = float(root.get("width")), float(root.get("height"))
    for shape in root:
        if shape.get("x") and shape.tag.endswith("rect"):
            assert 0 <= float(shape.get("x")) <= width - float(shape.get("width"))
            assert 0 <= float(shape.get("y")) <= height - float(shape.get("height"))
        elif shape.tag.endswith("text") and not shape.get("class"):
            assert float(shape.get("x")) + 8 * len(shape.text) <= width, shape.text


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 12])
def test_what_moves_is_what_the_formulas_count(name, ranks):
    problem = Problem(23, 29, 31, "float64", "float64", "float64", (23, 31))
    for mesh in KERNELS[name].meshes(ranks):
        strategy = KERNELS[name].on(mesh)
        moved = [move.part for rank in range(ranks) for move in moves(strategy, problem, rank)]
        items = sum((last - first) * (right - left) for first, last, left, right in moved)
        assert 8 * items == sum(strategy.sent_bytes(problem, rank) for rank in range(ranks)), str(mesh)


@pytest.mark.parametrize("name", KERNELS)
def test_the_parts_are_each_matrix_once(name):
    for distribution, shape in matrices(example(name), PROBLEM).values():
        parts = owners(distribution, shape)
        areas = [(last - first) * (right - left) for first, last, left, right in parts]
        assert sum(areas) == math.prod(shape)
        assert sorted(rank for ranks in parts.values() for rank in ranks) == list(
            range(distribution.mesh.size)
        )


def test_another_placement_or_mesh_is_another_picture():
    fsdp, grid3d = example("fsdp"), example("grid3d")
    by_rows = dataclasses.replace(fsdp.kernel, b=Placement("rows", rows=("m",))).on(fsdp.mesh)
    assert picture(by_rows) != picture(fsdp)
    mesh = dataclasses.replace(grid3d.mesh, ranks=(1, 0, 2, 3, 4, 5, 6, 7))
    assert picture(grid3d.kernel.on(mesh)) != picture(grid3d)


def test_a_picture_that_is_not_of_the_table_is_found(tmp_path, monkeypatch):
    """Seen to fail: a placement changes, and the pictures in the repository are no longer right."""
    monkeypatch.setitem(
        KERNELS, "fsdp", dataclasses.replace(KERNELS["fsdp"], b=Placement("rows", rows=("m",)))
    )
    with pytest.raises(AssertionError, match="no longer those of the table"):
        test_the_pictures_in_the_repository_are_those_of_the_table(tmp_path)


@pytest.mark.parametrize("page", ["README.md", "mpi_matmul/kernels/README.md"])
def test_every_picture_is_on_both_pages(page):
    text, folder = (REPOSITORY / page).read_text(), (REPOSITORY / page).parent
    linked = {(folder / link).resolve() for link in re.findall(r"\(([^()\s]+\.svg)\)", text)}
    assert linked == {MAP / f"{name}.svg" for name in KERNELS}


def draw_command(*arguments):
    command = [sys.executable, "-m", "mpi_matmul.draw", *map(str, arguments)]
    return subprocess.run(command, env=job_environment(), capture_output=True, text=True, timeout=60)


def test_the_command_makes_the_folder_and_refuses_what_is_a_file(tmp_path):
    assert draw_command(tmp_path / "new").returncode == 0
    assert (tmp_path / "new" / "grid3d.svg").read_text() == picture(example("grid3d"))
    (tmp_path / "file").write_text("mine")
    refused = draw_command(tmp_path / "file")
    assert refused.returncode == 2
    assert "file exists" in refused.stderr.splitlines()[-1]
    assert (tmp_path / "file").read_text() == "mine"
