"""Files as a specification: what is read, what is refused and why, and what a failed write leaves."""

import errno
import fcntl
import gc
import json
import math
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from mpi_matmul import storage
from mpi_matmul.storage import FileError, NpyFile, OutputFile, open_matrix, open_part

NUMBERS = np.arange(12.0).reshape(3, 4)


def npy_bytes(
    descr: str = "'<f8'", order: str = "False", shape: str = "(1,)", version: bytes = b"\x01\x00"
) -> bytes:
    """A .npy file of 8 bytes of data with a header of one's own."""
    header = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}\n".encode()
    length = len(header).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    return b"\x93NUMPY" + version + length + header + bytes(8)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


ALL = slice(None)

# Parts of a matrix (37, 23).
PARTS = {
    "the whole": (ALL, ALL),
    "whole rows": (slice(5, 18), ALL),
    "whole columns": (ALL, slice(3, 10)),
    "a block": (slice(7, 36), slice(1, 22)),
    "one row": (slice(36, 37), slice(2, 9)),
    "one column": (slice(1, 37), slice(22, 23)),
    "one item": (slice(0, 1), slice(22, 23)),
    "no rows": (slice(9, 9), ALL),
    "no columns": (ALL, slice(23, 23)),
    "counted from the end": (slice(-4, None), slice(None, -5)),
    "cut off as in numpy": (slice(30, 99), slice(50, 60)),
}

GRID = np.arange(37 * 23).reshape(37, 23)
MATRICES = {
    "float64": GRID / 7,
    "float32": (GRID / 7).astype(np.float32),
    "float16": (GRID / 7).astype(np.float16),
    "long double": np.sqrt(GRID.astype(np.longdouble)),
    "complex": (GRID - 1j / 3).astype(np.complex64),
    "complex long double": np.sqrt(-GRID.astype(np.clongdouble)),
    "bool": GRID % 3 == 1,
    "int8": GRID.astype(np.int8),
    "uint64": GRID.astype(np.uint64) << np.uint64(50),
    "big-endian float64": (GRID / 7).astype(">f8"),
    "big-endian complex": (GRID - 1j / 3).astype(">c16"),
    "big-endian int16": GRID.astype(">i2"),
}

# From memory twice as large in both directions, views of the shape that is wanted.
LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "C order": lambda base: base.reshape(-1)[: base.size // 4].reshape(half(base)),
    "Fortran order": lambda base: base.reshape(-1)[: base.size // 4].reshape(half(base)[::-1]).T,
    "rows apart": lambda base: base[: len(base) // 2, base.shape[1] // 2 :],
    "columns apart": lambda base: base.reshape(base.shape[::-1]).T[len(base) // 2 :, : base.shape[1] // 2],
    "items apart": lambda base: base[1::2, ::2],
    "backwards": lambda base: base[len(base) // 2 :, base.shape[1] // 2 :][::-1, ::-1],
}


def half(base: np.ndarray) -> tuple[int, int]:
    return len(base) // 2, base.shape[1] // 2


@pytest.fixture(
    params=["as they are", "small panels", "panels of whole lines", "small calls", "interrupted calls"]
)
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits so low that a small matrix meets all of them."""
    if request.param == "small panels":
        monkeypatch.setattr(storage, "PANEL_BYTES", 100)
        monkeypatch.setattr(storage, "SHORT_LINE_BYTES", 0)
    elif request.param == "panels of whole lines":
        monkeypatch.setattr(storage, "PANEL_BYTES", 3000)
        monkeypatch.setattr(storage, "SHORT_LINE_BYTES", 3000)
    elif request.param == "small calls":
        monkeypatch.setattr(storage, "CALL_BYTES", 70)
    elif request.param == "interrupted calls":
        preadv, pwrite = os.preadv, os.pwrite
        monkeypatch.setattr(os, "preadv", lambda file, into, at: preadv(file, [into[0][:51]], at))
        monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:51], at))


def counted(monkeypatch: pytest.MonkeyPatch, call: str) -> list[int]:
    """The bytes that each call of preadv or pwrite moves from now on."""
    counts: list[int] = []
    plain = getattr(os, call)

    def counting(*arguments: object) -> int:
        counts.append(plain(*arguments))
        return counts[-1]

    monkeypatch.setattr(os, call, counting)
    return counts


def refuse(monkeypatch: pytest.MonkeyPatch, step: str, number: int) -> None:
    """From now on this call of the system fails."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, step, fail)


def peak_growth(script: str, *arguments: object) -> int:
    """Bytes by which `work()`, which the script defines, raises the peak memory of a process of its own."""
    script += "\nfrom mpi_matmul.memory import peak\nbefore = peak()\nwork()\nprint(peak() - before)"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, check=True, timeout=100, capture_output=True, text=True)
    return int(done.stdout)


def sparse_npy(path: Path, shape: tuple[int, ...], dtype: str, fortran_order: bool = False) -> None:
    """A .npy file of zeros that takes no room on the disk."""
    with open(path, "wb") as stream:
        header = {"descr": dtype, "fortran_order": fortran_order, "shape": shape}
        np.lib.format.write_array_header_1_0(stream, header)
        stream.truncate(stream.tell() + math.prod(shape) * np.dtype(dtype).itemsize)


class TestOpening:
    @pytest.mark.parametrize(
        "matrix",
        [
            pytest.param(NUMBERS, id="plain"),
            pytest.param(np.asfortranarray(NUMBERS), id="Fortran order"),
            pytest.param(NUMBERS.astype(">f8"), id="big-endian"),
            pytest.param(NUMBERS.astype(np.float16), id="float16"),
            pytest.param(NUMBERS.astype(np.clongdouble), id="complex longdouble"),
            pytest.param(NUMBERS > 3, id="bool"),
            pytest.param(NUMBERS[0].astype(np.int8), id="1-D"),
            pytest.param(np.array(2.5), id="0-D"),
            pytest.param(np.zeros((3, 0)), id="no columns"),
            pytest.param(np.zeros((0, 0), np.int32, order="F"), id="nothing at all"),
        ],
    )
    def test_gives_back_what_numpy_saved(self, tmp_path: Path, matrix: np.ndarray) -> None:
        np.save(tmp_path / "A.npy", matrix)
        found = open_matrix(tmp_path / "A.npy")
        assert found.dtype == matrix.dtype
        assert found.shape == matrix.shape
        np.testing.assert_array_equal(found, matrix)

    def test_maps_the_file_and_never_writes_to_it(self, tmp_path: Path) -> None:
        np.save(tmp_path / "A.npy", NUMBERS)
        found = open_matrix(str(tmp_path / "A.npy"))
        assert isinstance(found.base, np.memmap)
        assert not found.flags.writeable

    @pytest.mark.parametrize("version", [(2, 0), (3, 0)], ids=["2.0", "3.0"])
    def test_reads_newer_format_versions(self, tmp_path: Path, version: tuple[int, int]) -> None:
        with open(tmp_path / "A.npy", "wb") as stream:
            np.lib.format.write_array(stream, NUMBERS, version=version)
        np.testing.assert_array_equal(open_matrix(tmp_path / "A.npy"), NUMBERS)

    def test_ignores_what_follows_the_array_as_numpy_does(self, tmp_path: Path) -> None:
        np.save(tmp_path / "A.npy", NUMBERS)
        with open(tmp_path / "A.npy", "ab") as stream:
            stream.write(b"more")
        np.testing.assert_array_equal(open_matrix(tmp_path / "A.npy"), NUMBERS)


class TestReadingParts:
    @pytest.mark.usefixtures("limits")
    @pytest.mark.parametrize("order", ["C", "F"], ids=["C order", "Fortran order"])
    @pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES.keys())
    def test_gives_what_numpy_slices_and_touches_nothing_else(
        self, tmp_path: Path, matrix: np.ndarray, order: str
    ) -> None:
        np.save(tmp_path / "A.npy", matrix.astype(matrix.dtype, order))
        file = NpyFile(tmp_path / "A.npy")
        for part, (rows, columns) in PARTS.items():
            wanted = matrix[rows, columns]
            for layout, view_of in LAYOUTS.items():
                base = np.ones((2 * wanted.shape[0], 2 * wanted.shape[1]), matrix.dtype.newbyteorder("="))
                expected = base.copy()
                view_of(expected)[:] = wanted
                file.read(rows, columns, view_of(base))
                np.testing.assert_array_equal(base, expected, f"{part}, {layout}")

    @pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=["no rows", "no columns", "nothing"])
    @pytest.mark.parametrize("order", ["C", "F"], ids=["C order", "Fortran order"])
    def test_an_empty_matrix(self, tmp_path: Path, shape: tuple[int, int], order: str) -> None:
        np.save(tmp_path / "A.npy", np.zeros(shape, order=order))
        file = NpyFile(tmp_path / "A.npy")
        assert file.matrix_shape == shape
        file.read(ALL, ALL, np.empty(shape))

    @pytest.mark.usefixtures("limits")
    @pytest.mark.parametrize("k", [0, 1, 57])
    @pytest.mark.parametrize("dtype", ["<i4", ">i4"], ids=["native", "big-endian"])
    def test_one_dimension_is_a_row_or_a_column(self, tmp_path: Path, k: int, dtype: str) -> None:
        vector = np.arange(k).astype(dtype)
        np.save(tmp_path / "A.npy", vector)
        row, column = NpyFile(tmp_path / "A.npy", "row"), NpyFile(tmp_path / "A.npy", "column")
        assert (row.shape, row.matrix_shape, column.matrix_shape) == ((k,), (1, k), (k, 1))
        part = slice(k // 3, k)
        outs = np.empty((1, k - k // 3), np.int32), np.empty((k - k // 3, 2), np.int32)[:, 1:]
        row.read(ALL, part, outs[0])
        column.read(part, ALL, outs[1])
        np.testing.assert_array_equal(outs[0], vector[None, part])
        np.testing.assert_array_equal(outs[1], vector[part, None])

    @pytest.mark.parametrize("shape", [(), (2, 3, 4)], ids=["0-D", "3-D"])
    def test_other_dimensions_are_opened_but_are_no_matrix(
        self, tmp_path: Path, shape: tuple[int, ...]
    ) -> None:
        np.save(tmp_path / "A.npy", np.zeros(shape))
        file = NpyFile(tmp_path / "A.npy")
        assert file.shape == shape
        with pytest.raises(FileError, match=r"A\.npy: has shape \(.*\); one or two dimensions are needed"):
            file.read(ALL, ALL, np.empty((1, 1)))

    def test_the_header_is_told(self, tmp_path: Path) -> None:
        matrix = np.asfortranarray(NUMBERS.astype(">f4"))
        np.save(tmp_path / "A.npy", matrix)
        file = NpyFile(tmp_path / "A.npy")
        assert (file.path, file.shape, file.dtype) == (tmp_path / "A.npy", (3, 4), np.dtype(">f4"))
        assert file.fortran_order
        assert (tmp_path / "A.npy").read_bytes()[file.offset :] == matrix.tobytes("F")

    @pytest.mark.parametrize(
        ("rows", "out", "reason"),
        [
            pytest.param(ALL, np.empty((4, 3)), r"expected \(3, 4\) .* got \(4, 3\)", id="another shape"),
            pytest.param(ALL, np.empty((3, 4), ">f8"), "expected dtype float64, got >f8", id="byte order"),
            pytest.param(ALL, np.empty((3, 4), "f4"), "expected dtype float64, got float32", id="dtype"),
            pytest.param(slice(0, 3, 2), np.empty((2, 4)), "expected steps of 1", id="every other row"),
        ],
    )
    def test_an_array_that_does_not_fit(
        self, tmp_path: Path, rows: slice, out: np.ndarray, reason: str
    ) -> None:
        np.save(tmp_path / "A.npy", NUMBERS)
        with pytest.raises(ValueError, match=reason):
            NpyFile(tmp_path / "A.npy").read(rows, ALL, out)

    @pytest.mark.parametrize(
        ("n", "columns", "calls", "nbytes"),
        [
            pytest.param(8192, ALL, 1, 64 * 65536, id="whole rows: straight"),
            pytest.param(8192, slice(0, 512), 64, 64 * 4096, id="long rows: a call each, for what is wanted"),
            pytest.param(2048, slice(0, 512), 1, 64 * 16384, id="short rows: all at once"),
        ],
    )
    def test_the_calls_it_takes(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        n: int,
        columns: slice,
        calls: int,
        nbytes: int,
    ) -> None:
        sparse_npy(tmp_path / "A.npy", (64, n), "<f8")
        file, counts = NpyFile(tmp_path / "A.npy"), counted(monkeypatch, "preadv")
        file.read(ALL, columns, np.empty((64, n))[:, columns] if columns != ALL else np.empty((64, n)))
        assert (len(counts), sum(counts)) == (calls, nbytes)

    @pytest.mark.parametrize("columns", [ALL, slice(0, 3), slice(0, 5000)], ids=["whole", "some", "most"])
    @pytest.mark.parametrize("n", [1000, 6000], ids=["short rows", "long rows"])
    def test_a_file_cut_short_after_the_door(self, tmp_path: Path, n: int, columns: slice) -> None:
        sparse_npy(tmp_path / "A.npy", (50, n), "<f8")
        file = NpyFile(tmp_path / "A.npy")
        os.truncate(tmp_path / "A.npy", file.offset + 49 * n * 8)
        with pytest.raises(FileError, match=r"A\.npy: cut short while in use"):
            file.read(ALL, columns, np.empty((50, n))[:, columns])

    def test_a_file_replaced_after_the_door_is_read_as_it_was(self, tmp_path: Path) -> None:
        np.save(tmp_path / "A.npy", NUMBERS)
        np.save(tmp_path / "new.npy", NUMBERS + 1)
        file, out = NpyFile(tmp_path / "A.npy"), np.empty((3, 4))
        os.replace(tmp_path / "new.npy", tmp_path / "A.npy")
        file.read(ALL, ALL, out)
        np.testing.assert_array_equal(out, NUMBERS)

    def test_a_closed_file_reads_no_other_file(self, tmp_path: Path) -> None:
        np.save(tmp_path / "A.npy", NUMBERS)
        with NpyFile(tmp_path / "A.npy") as file:
            pass
        with open(tmp_path / "A.npy", "rb"), pytest.raises(ValueError, match="closed file"):
            file.read(ALL, ALL, np.empty((3, 4)))

    @pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
    def test_an_object_that_is_gone_holds_no_descriptor(self, tmp_path: Path) -> None:
        np.save(tmp_path / "A.npy", NUMBERS)
        gc.collect()
        before = names(Path("/proc/self/fd"))
        file = NpyFile(tmp_path / "A.npy")
        assert len(names(Path("/proc/self/fd"))) == len(before) + 1
        del file
        gc.collect()
        assert names(Path("/proc/self/fd")) == before


# A quarter of 400 MB, as (shape, Fortran order, dtype, rows, columns) of the part.
QUARTERS = {
    "whole rows": ((5000, 10000), False, "<f8", slice(0, 1250), ALL),
    "columns of long rows": ((5000, 10000), False, "<f8", ALL, slice(2500, 5000)),
    "columns of short rows": ((50000, 1000), False, "<f8", ALL, slice(250, 500)),
    "rows of a Fortran file": ((10000, 5000), True, "<f8", slice(2500, 5000), ALL),
    "another byte order": ((5000, 10000), False, ">f8", ALL, slice(2500, 5000)),
}


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
class TestMemory:
    READ = """
import sys, numpy
from mpi_matmul.storage import NpyFile, open_matrix
path, how, *bounds = sys.argv[1:]
top, bottom, left, right = map(int, bounds)
def work():
    out = numpy.empty((bottom - top, right - left))
    if how == "in parts":
        NpyFile(path).read(slice(top, bottom), slice(left, right), out)
    else:
        out[:] = open_matrix(path)[top:bottom, left:right]
"""
    WRITE = """
import sys, numpy
from mpi_matmul.storage import OutputFile
path, dtype, order = sys.argv[1:]
block = numpy.ones((2500, 10000), dtype, order)
def work():
    with OutputFile(path).staged_matrix((5000, 10000), "f8") as staged:
        staged.write(slice(2500, 5000), slice(None), block)
"""

    def quarter(self, path: Path, name: str, how: str) -> int:
        shape, fortran_order, dtype, rows, columns = QUARTERS[name]
        sparse_npy(path, shape, dtype, fortran_order)
        return peak_growth(self.READ, path, how, *rows.indices(shape[0])[:2], *columns.indices(shape[1])[:2])

    @pytest.mark.parametrize("name", QUARTERS)
    def test_reading_a_part_takes_the_part_and_one_panel(self, tmp_path: Path, name: str) -> None:
        growth = self.quarter(tmp_path / "A.npy", name, "in parts")
        assert 90e6 < growth < 100e6 + storage.PANEL_BYTES + 4e6

    def test_a_memory_map_would_take_more(self, tmp_path: Path) -> None:
        assert self.quarter(tmp_path / "A.npy", "columns of short rows", "mapped") > 300e6

    @pytest.mark.parametrize(
        ("dtype", "order", "most"),
        [("<f8", "C", 4e6), ("<f8", "F", 24e6), (">f8", "C", 24e6)],
        ids=["contiguous", "Fortran order", "another byte order"],
    )
    def test_writing_200_MB_takes_one_panel(
        self, tmp_path: Path, dtype: str, order: str, most: float
    ) -> None:
        assert peak_growth(self.WRITE, tmp_path / "C.npy", dtype, order) < most


def test_one_read_and_one_write_of_more_than_2_GiB(tmp_path: Path) -> None:
    """More than the kernel moves at once (0x7ffff000 bytes), with marks where that would be seen."""
    n = 2**31 + 5
    marks = [0, 1, 2**30, 0x7FFFF000 - 1, 0x7FFFF000, 2**31 - 1, 2**31, n - 1]
    block = np.zeros((1, n), np.uint8)
    block[0, marks] = range(1, 9)
    with OutputFile(tmp_path / "C.npy").staged_matrix((1, n), np.uint8) as staged:
        staged.write(ALL, ALL, block)
        block[0, marks] = 0
        NpyFile(staged.name).read(ALL, ALL, block)
    assert block[0, marks].tolist() == list(range(1, 9))
    assert np.count_nonzero(block) == len(marks)


class TestFingerprint:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        np.save(tmp_path / "A.npy", np.zeros((1000, 100)))
        return tmp_path / "A.npy"

    def test_is_the_same_for_two_openings_and_goes_through_json(self, path: Path) -> None:
        (path.parent / "link.npy").symlink_to(path)
        there = json.dumps(NpyFile(path.parent / "link.npy").fingerprint())
        assert NpyFile(path).fingerprint() == json.loads(there)
        assert json.loads(there)[2] == ["<f8", False, [1000, 100], 128]

    def test_of_a_file_that_is_smaller_than_a_sample(self, tmp_path: Path) -> None:
        (tmp_path / "A.npy").write_bytes(npy_bytes())
        first = NpyFile(tmp_path / "A.npy").fingerprint()
        assert NpyFile(tmp_path / "A.npy").fingerprint() == first

    @pytest.mark.parametrize(
        ("where", "content"),
        [
            pytest.param(128, b"1", id="the first byte"),
            pytest.param(800_127, b"1", id="the last byte"),
            pytest.param(400_000, bytes([1]) * 60_000, id="a piece in the middle"),
            pytest.param(62, b"'fortran_order': True ", id="the header"),
        ],
    )
    def test_tells_another_file_of_the_same_size_and_time(
        self, path: Path, where: int, content: bytes
    ) -> None:
        before, facts = NpyFile(path).fingerprint(), os.stat(path)
        with open(path, "r+b") as stream:
            if where == 62:
                where = stream.read(128).index(b"'fortran_order'")
            stream.seek(where)
            stream.write(content)
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        after = NpyFile(path).fingerprint()
        assert after != before
        assert after[:2] == before[:2]

    def test_tells_a_file_that_was_written_again(self, path: Path) -> None:
        before = NpyFile(path).fingerprint()
        os.utime(path, ns=(0, before[1] + 1))
        assert NpyFile(path).fingerprint() != before

    def test_tells_a_longer_file(self, path: Path) -> None:
        before, facts = NpyFile(path).fingerprint(), os.stat(path)
        os.truncate(path, facts.st_size + 1)
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        assert NpyFile(path).fingerprint() != before

    def test_reads_no_more_than_64_KiB(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file, counts = NpyFile(path), counted(monkeypatch, "preadv")
        file.fingerprint()
        assert 0 < sum(counts) <= 65536

    def test_of_a_file_that_is_emptied_meanwhile(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file, fstat = NpyFile(path), os.fstat

        def emptied(descriptor: int) -> os.stat_result:
            facts = fstat(descriptor)
            os.truncate(path, 0)
            return facts

        monkeypatch.setattr(os, "fstat", emptied)
        with pytest.raises(FileError, match=r"A\.npy: cut short while in use"):
            file.fingerprint()


class Bomb:
    """Unpickling this leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.mkdir, (str(self.path),))


REFUSED = {
    "empty file": (b"", "empty file"),
    "random bytes": (np.random.default_rng(0).bytes(1024), "not a .npy file"),
    "a pickle": (pickle.dumps([1, 2]), "not a .npy file"),
    "an empty .npz": (b"PK\x05\x06" + bytes(18), ".npz"),
    "the magic alone": (b"\x93NUMPY", "version"),
    "format version 9": (npy_bytes(version=b"\x09\x00"), "version 9.0"),
    "cut short in the header": (npy_bytes()[:30], "cut short: the header has"),
    "cut short in the header's length": (npy_bytes()[:9], "cut short: the header has"),
    "cut short before the data": (npy_bytes()[:-8], "cut short"),
    "more promised than any disk holds": (npy_bytes(shape=f"({2**62},)"), "cut short"),
    "zero times too much": (npy_bytes(shape=f"(0, {2**70})"), "garbled"),
    "a header that is no Python": (npy_bytes(shape="(1,"), "garbled"),
    "a header that would run": (npy_bytes(shape="__import__('os').abort()"), "garbled"),
    "a header nested without end": (npy_bytes(shape="(" * 5000), "garbled"),
    "a header of the wrong keys": (npy_bytes().replace(b"shape", b"shame"), "garbled"),
    "a negative extent": (npy_bytes(shape="(-1,)"), "garbled"),
    "an extent that is no number": (npy_bytes(shape="('1',)"), "garbled"),
    "an order that is neither": (npy_bytes(order="3"), "garbled"),
    "an unknown dtype": (npy_bytes(descr="'<q9'"), "garbled"),
    "a dtype that is a number": (npy_bytes(descr="7"), "garbled"),
    "records": (npy_bytes(descr="[('a', '<f8')]"), "structured"),
    "Python objects": (npy_bytes(descr="'|O'"), "never unpickled"),
    "records that hold objects": (npy_bytes(descr="[('a', '|O')]"), "never unpickled"),
    "text": (npy_bytes(descr="'<U2'"), "<U2"),
    "dates": (npy_bytes(descr="'<M8[s]'"), "datetime64"),
}


class TestRefusing:
    @pytest.mark.parametrize(("content", "reason"), REFUSED.values(), ids=REFUSED.keys())
    def test_says_in_one_line_which_file_and_why(self, tmp_path: Path, content: bytes, reason: str) -> None:
        path = tmp_path / "A.npy"
        path.write_bytes(content)
        with pytest.raises(FileError) as caught:
            NpyFile(path)
        message = str(caught.value)
        assert message.startswith(f"{path}: ")
        assert reason in message.removeprefix(str(path))
        assert "\n" not in message
        assert "pickle=" not in message

    def test_the_hand_made_file_is_otherwise_right(self, tmp_path: Path) -> None:
        (tmp_path / "A.npy").write_bytes(npy_bytes())
        assert NpyFile(tmp_path / "A.npy").shape == (1,)

    def test_counts_the_bytes_that_are_missing(self, tmp_path: Path) -> None:
        path = tmp_path / "A.npy"
        np.save(path, np.zeros((1000, 1000)))
        os.truncate(path, 8000120)
        with pytest.raises(FileError, match="header promises 8000128 bytes, the file has 8000120"):
            NpyFile(path)

    def test_an_npz_is_called_by_its_name(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "A.npz", NUMBERS)
        with pytest.raises(FileError, match=r"\.npz archive"):
            NpyFile(tmp_path / "A.npz")

    def test_unpickles_nothing(self, tmp_path: Path) -> None:
        objects = np.array([Bomb(tmp_path / "boom")], dtype=object)
        np.save(tmp_path / "A.npy", objects, allow_pickle=True)
        with pytest.raises(FileError, match="never unpickled"):
            NpyFile(tmp_path / "A.npy")
        assert names(tmp_path) == ["A.npy"]

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(FileError, match=r"A\.npy: no such file"):
            NpyFile(tmp_path / "A.npy")

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(FileError, match="is a directory"):
            NpyFile(tmp_path)

    def test_a_pipe_that_nobody_writes_to(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "A.npy")
        with pytest.raises(FileError, match="not a regular file"):
            NpyFile(tmp_path / "A.npy")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_a_file_of_somebody_else(self, tmp_path: Path) -> None:
        (tmp_path / "A.npy").write_bytes(npy_bytes())
        (tmp_path / "A.npy").chmod(0)
        with pytest.raises(FileError, match="permission denied"):
            NpyFile(tmp_path / "A.npy")

    @pytest.mark.parametrize("name", ["a\nb.npy", "a\0b.npy", ""], ids=["line feed", "NUL", "no name"])
    def test_a_strange_name_still_makes_one_line(self, name: str) -> None:
        with pytest.raises(FileError) as caught:
            NpyFile(name)
        assert str(caught.value).isprintable()
        assert str(caught.value).startswith(repr(name))


class TestOutputAtTheDoor:
    def test_leaves_no_trace(self, tmp_path: Path) -> None:
        OutputFile(tmp_path / "C.npy")
        assert names(tmp_path) == []

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            pytest.param("missing/C.npy", "no such folder", id="missing folder"),
            pytest.param("file/C.npy", "not a directory", id="a file as folder"),
            pytest.param(".", "is a directory", id="the folder itself"),
            pytest.param("new/", "names a folder", id="trailing slash"),
            pytest.param("pipe", "not a regular file", id="a pipe"),
            pytest.param("loop", "too many levels", id="a link to itself"),
            pytest.param("dangling", "no such folder", id="a link into a missing folder"),
            pytest.param("x" * 300, "file name too long", id="a name too long"),
            pytest.param("/dev/null", "not a regular file", id="a device"),
        ],
    )
    def test_refuses(self, tmp_path: Path, name: str, reason: str) -> None:
        (tmp_path / "file").touch()
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "loop").symlink_to("loop")
        (tmp_path / "dangling").symlink_to("missing/C.npy")
        path = os.path.join(tmp_path, name)
        with pytest.raises(FileError) as caught:
            OutputFile(path)
        assert str(caught.value).startswith(f"{path}: {reason}")

    @pytest.mark.skipif(sys.platform != "linux", reason="needs a folder that not even root can write to")
    def test_refuses_a_folder_where_no_file_can_be_made(self) -> None:
        with pytest.raises(FileError, match=r"^/proc/C\.npy: "):
            OutputFile("/proc/C.npy")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
    def test_refuses_an_older_file_that_is_protected(self, tmp_path: Path) -> None:
        (tmp_path / "C.npy").touch(0o444)
        with pytest.raises(FileError, match="permission denied"):
            OutputFile(tmp_path / "C.npy")

    @pytest.mark.parametrize("name", ["A.npy", "symbolic", "hard", "sub/../A.npy"])
    def test_refuses_an_input_under_any_name(self, tmp_path: Path, name: str) -> None:
        np.save(tmp_path / "A.npy", NUMBERS)
        (tmp_path / "sub").mkdir()
        (tmp_path / "symbolic").symlink_to("A.npy")
        (tmp_path / "hard").hardlink_to(tmp_path / "A.npy")
        with pytest.raises(FileError, match=r"is also an input \(.*A\.npy\)"):
            OutputFile(f"{tmp_path}/{name}", inputs=[tmp_path / "missing.npy", tmp_path / "A.npy"])

    def test_accepts_a_file_beside_the_inputs(self, tmp_path: Path) -> None:
        np.save(tmp_path / "A.npy", NUMBERS)
        (tmp_path / "C.npy").write_text("old")
        OutputFile(tmp_path / "C.npy", inputs=[tmp_path / "A.npy"])

    def test_compares_needed_and_free_space(self, tmp_path: Path) -> None:
        output = OutputFile(tmp_path / "C.npy")
        output.check_space(1)
        with pytest.raises(FileError, match=r"C\.npy: needs 1\d{18} bytes, the disk has \d+ free"):
            output.check_space(2**60)


class TestWriting:
    @pytest.mark.parametrize(
        "array",
        [
            pytest.param(NUMBERS, id="plain"),
            pytest.param(np.asfortranarray(NUMBERS), id="Fortran order"),
            pytest.param(NUMBERS[::-1, ::2], id="strided"),
            pytest.param(NUMBERS.astype(">f8"), id="big-endian"),
            pytest.param(NUMBERS.astype(np.clongdouble), id="complex longdouble"),
            pytest.param(NUMBERS > 3, id="bool"),
            pytest.param(np.zeros((0, 3), np.float32), id="no rows"),
            pytest.param(np.zeros((3, 0), np.float32), id="no columns"),
            pytest.param(np.array(7), id="0-D"),
            pytest.param(np.arange(5, dtype=np.int16), id="1-D"),
            pytest.param(np.arange(3 << 20).reshape(-1, 3)[:, :2], id="several panels"),
        ],
    )
    def test_comes_back_in_c_order_and_native_bytes(self, tmp_path: Path, array: np.ndarray) -> None:
        OutputFile(tmp_path / "C.npy").write_array(array)
        found = np.load(tmp_path / "C.npy")
        assert found.dtype == array.dtype.newbyteorder("=")
        assert found.shape == array.shape
        assert found.flags.c_contiguous
        np.testing.assert_array_equal(found, array)

    def test_text(self, tmp_path: Path) -> None:
        OutputFile(tmp_path / "report.json").write_text('{"µ": 1}\n')
        assert (tmp_path / "report.json").read_bytes() == '{"µ": 1}\n'.encode()

    def test_a_new_file_gets_the_mode_that_the_umask_leaves(self, tmp_path: Path) -> None:
        script = (
            "import os, sys; os.umask(0o027); from mpi_matmul.storage import OutputFile; "
            "OutputFile(sys.argv[1]).write_text('new')"
        )
        subprocess.run([sys.executable, "-c", script, tmp_path / "C.npy"], check=True, timeout=60)
        assert stat.S_IMODE(os.stat(tmp_path / "C.npy").st_mode) == 0o640

    def test_an_older_file_hands_on_its_mode(self, tmp_path: Path) -> None:
        (tmp_path / "C.npy").write_text("old")
        (tmp_path / "C.npy").chmod(0o604)
        OutputFile(tmp_path / "C.npy").write_text("new")
        assert stat.S_IMODE(os.stat(tmp_path / "C.npy").st_mode) == 0o604
        assert (tmp_path / "C.npy").read_text() == "new"

    def test_a_symbolic_link_stays_and_its_target_is_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "real/C.npy").write_text("old")
        (tmp_path / "C.npy").symlink_to("real/C.npy")
        OutputFile(tmp_path / "C.npy").write_text("new")
        assert (tmp_path / "C.npy").is_symlink()
        assert (tmp_path / "real/C.npy").read_text() == "new"
        assert names(tmp_path / "real") == ["C.npy"]


class TestFailedWrite:
    @pytest.fixture
    def output(self, tmp_path: Path) -> OutputFile:
        (tmp_path / "C.npy").write_text("old")
        return OutputFile(tmp_path / "C.npy")

    @pytest.mark.parametrize("step", ["fsync", "replace"])
    def test_an_error_at_the_end_leaves_the_older_file_alone(
        self, tmp_path: Path, output: OutputFile, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        def disk_full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, step, disk_full)
        with pytest.raises(FileError, match=r"C\.npy: no space left on device"):
            output.write_array(NUMBERS)
        assert names(tmp_path) == ["C.npy"]
        assert (tmp_path / "C.npy").read_text() == "old"

    def test_a_disk_that_fails_is_found_before_the_commit(
        self, output: OutputFile, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refuse(monkeypatch, "fsync", errno.EIO)
        for staged in output.staged_array(NUMBERS), output.staged_text("text"):
            with pytest.raises(FileError, match=r"C\.npy: input/output error"):
                staged.__enter__()

    def test_so_does_an_interrupt(
        self, tmp_path: Path, output: OutputFile, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            output.write_array(NUMBERS)
        assert names(tmp_path) == ["C.npy"]
        assert (tmp_path / "C.npy").read_text() == "old"

    def test_a_real_limit_in_the_middle_of_the_data(self, tmp_path: Path) -> None:
        """The kernel refuses to let the file grow, as on a full disk, with part of it written."""
        (tmp_path / "C.npy").write_text("old")
        script = (
            "import resource, signal, sys, numpy\n"
            "from mpi_matmul.storage import FileError, OutputFile\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "output = OutputFile(sys.argv[1])\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
            "try:\n    output.write_array(numpy.ones((1000, 1000)))\n"
            "except FileError as error:\n    print(error)\n"
        )
        command = [sys.executable, "-c", script, tmp_path / "C.npy"]
        done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
        assert done.stdout == f"{tmp_path / 'C.npy'}: file too large\n"
        assert names(tmp_path) == ["C.npy"]
        assert (tmp_path / "C.npy").read_text() == "old"


# What the system says when a disk, a quota or a device will take no more.
REFUSALS = {
    errno.ENOSPC: "no space left on device",
    errno.EDQUOT: "disk quota exceeded",
    errno.EFBIG: "file too large",
    errno.EIO: "input/output error",
}


class TestWritingParts:
    @pytest.mark.usefixtures("limits")
    @pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES.keys())
    def test_each_part_goes_where_it_belongs(self, tmp_path: Path, matrix: np.ndarray) -> None:
        native = matrix.dtype.newbyteorder("=")
        with OutputFile(tmp_path / "C.npy").staged_matrix(matrix.shape, native) as staged:
            expected = np.ones(matrix.shape, native)
            for part, (rows, columns) in PARTS.items():
                wanted = matrix[rows, columns]
                for layout, view_of in LAYOUTS.items():
                    staged.write(ALL, ALL, np.ones(matrix.shape, native))
                    expected[:] = 1
                    expected[rows, columns] = wanted
                    block = view_of(np.zeros((2 * wanted.shape[0], 2 * wanted.shape[1]), matrix.dtype))
                    block[:] = wanted
                    staged.write(rows, columns, block)
                    found = np.load(staged.name)
                    np.testing.assert_array_equal(found, expected, f"{part}, {layout}")
            staged.commit()
        found = np.load(tmp_path / "C.npy")
        assert found.dtype == native
        assert found.flags.c_contiguous
        np.testing.assert_array_equal(found, expected)

    @pytest.mark.parametrize(
        ("shape", "file_shape"),
        [((1, 1), ()), ((1, 5), (5,)), ((5, 1), (5,)), ((5, 0), (5, 0)), ((0, 1), (0,)), ((0, 0), None)],
        ids=str,
    )
    def test_the_header_says_the_result_shape(
        self, tmp_path: Path, shape: tuple[int, int], file_shape: tuple[int, ...] | None
    ) -> None:
        matrix = np.arange(math.prod(shape), dtype=np.int16).reshape(shape)
        with OutputFile(tmp_path / "C.npy").staged_matrix(shape, "i2", file_shape) as staged:
            staged.write(ALL, ALL, matrix)
            staged.commit()
        found = np.load(tmp_path / "C.npy")
        assert found.shape == (shape if file_shape is None else file_shape)
        np.testing.assert_array_equal(found.reshape(shape), matrix)

    def test_several_processes_write_one_file(self, tmp_path: Path) -> None:
        """Each its blocks of an odd grid, all at the same time."""
        script = """
import sys, numpy
from mpi_matmul.storage import open_part
name, offset, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
matrix = numpy.arange(1001 * 703).reshape(1001, 703)
rows, columns = [0, 1, 334, 335, 800, 1001], [0, 7, 8, 9, 402, 703]
with open_part(name, offset, (1001, 703), "i8", "C.npy") as part:
    for block in range(rank, 25, 3):
        i, j = divmod(block, 5)
        where = slice(rows[i], rows[i + 1]), slice(columns[j], columns[j + 1])
        part.write(*where, matrix[where])
"""
        with OutputFile(tmp_path / "C.npy").staged_matrix((1001, 703), "i8") as staged:
            commands = [
                [sys.executable, "-c", script, staged.name, str(staged.offset), str(r)] for r in range(3)
            ]
            writers = [subprocess.Popen(command) for command in commands]
            assert [writer.wait(60) for writer in writers] == [0, 0, 0]
            staged.commit()
        np.testing.assert_array_equal(np.load(tmp_path / "C.npy"), np.arange(1001 * 703).reshape(1001, 703))
        assert names(tmp_path) == ["C.npy"]

    @pytest.mark.parametrize(
        ("n", "order", "columns", "calls"),
        [
            pytest.param(2048, "C", ALL, 1, id="whole rows: straight"),
            pytest.param(2048, "F", ALL, 1, id="whole rows, through a panel"),
            pytest.param(2048, "C", slice(0, 512), 64, id="columns: a call for each row"),
        ],
    )
    def test_the_calls_it_takes(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        n: int,
        order: Literal["C", "F"],
        columns: slice,
        calls: int,
    ) -> None:
        block = np.ones((64, n), order=order)[:, columns]
        with OutputFile(tmp_path / "C.npy").staged_matrix((64, n), "f8") as staged:
            counts = counted(monkeypatch, "pwrite")
            staged.write(ALL, columns, block)
            assert (len(counts), sum(counts)) == (calls, block.nbytes)
            staged.write(ALL, ALL, np.ones((64, 2 * n))[:, :n])
            assert len(counts) == calls + 1, "short rows that lie apart: all at once"

    def test_nothing_is_seen_before_the_commit_and_the_mode_stays(self, tmp_path: Path) -> None:
        (tmp_path / "C.npy").write_text("old")
        (tmp_path / "C.npy").chmod(0o604)
        with OutputFile(tmp_path / "C.npy").staged_matrix((3, 4), "f8") as staged:
            assert os.path.dirname(staged.name) == str(tmp_path)
            staged.write(ALL, ALL, NUMBERS)
            assert (tmp_path / "C.npy").read_text() == "old"
            staged.commit()
            assert names(tmp_path) == ["C.npy"]
        np.testing.assert_array_equal(np.load(tmp_path / "C.npy"), NUMBERS)
        assert stat.S_IMODE(os.stat(tmp_path / "C.npy").st_mode) == 0o604

    @pytest.mark.parametrize("error", [None, KeyboardInterrupt, KeyError])
    def test_leaving_without_commit_leaves_all_as_it_was(
        self, tmp_path: Path, error: type[BaseException] | None
    ) -> None:
        (tmp_path / "C.npy").write_text("old")

        def work() -> None:
            with OutputFile(tmp_path / "C.npy").staged_matrix((3, 4), "f8") as staged:
                staged.write(ALL, ALL, NUMBERS)
                assert len(names(tmp_path)) == 2
                if error:
                    raise error

        if error:
            with pytest.raises(error):
                work()
        else:
            work()
        assert names(tmp_path) == ["C.npy"]
        assert (tmp_path / "C.npy").read_text() == "old"

    @pytest.mark.parametrize(
        ("block", "reason"),
        [
            (NUMBERS.T, r"expected \(3, 4\) .* got \(4, 3\)"),
            (NUMBERS.astype("f4"), "expected dtype float64, got float32"),
        ],
        ids=["another shape", "another dtype"],
    )
    def test_a_block_that_does_not_fit(self, tmp_path: Path, block: np.ndarray, reason: str) -> None:
        with OutputFile(tmp_path / "C.npy").staged_matrix((3, 4), "f8") as staged:
            with pytest.raises(ValueError, match=reason):
                staged.write(ALL, ALL, block)
            assert not np.load(staged.name).any()

    def test_a_part_of_a_file_that_is_not_here(self, tmp_path: Path) -> None:
        name = str(tmp_path / "elsewhere.tmp")
        with pytest.raises(
            FileError, match=r"^C\.npy: the file to be written is not there: .*elsewhere\.tmp$"
        ):
            open_part(name, 128, (3, 4), "f8", "C.npy")
        assert names(tmp_path) == []


class TestFailedPart:
    @pytest.mark.parametrize("number", REFUSALS, ids=REFUSALS.values())
    @pytest.mark.parametrize("step", ["pwrite", "fsync", "replace", "posix_fallocate", "ftruncate"])
    def test_names_the_target_and_leaves_it_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int
    ) -> None:
        (tmp_path / "C.npy").write_text("old")
        output = OutputFile(tmp_path / "C.npy")
        refuse(monkeypatch, step, number)

        def work() -> None:
            with output.staged_matrix((3, 4), "f8") as staged:
                staged.write(ALL, ALL, NUMBERS)
                staged.commit()

        with pytest.raises(FileError) as caught:
            work()
        assert str(caught.value) == f"{tmp_path / 'C.npy'}: {REFUSALS[number]}"
        assert names(tmp_path) == ["C.npy"]
        assert (tmp_path / "C.npy").read_text() == "old"

    @pytest.mark.parametrize("number", REFUSALS, ids=REFUSALS.values())
    @pytest.mark.parametrize("step", ["pwrite", "fsync"])
    def test_of_another_process_names_the_target_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int
    ) -> None:
        def work() -> None:
            with open_part(staged.name, staged.offset, (3, 4), "f8", "C.npy") as part:
                part.write(ALL, slice(1, 3), NUMBERS[:, 1:3])

        with OutputFile(tmp_path / "C.npy").staged_matrix((3, 4), "f8") as staged:
            refuse(monkeypatch, step, number)
            with pytest.raises(FileError) as caught:
                work()
        assert str(caught.value) == f"C.npy: {REFUSALS[number]}"

    def test_a_real_limit_in_the_middle_of_a_part(self, tmp_path: Path) -> None:
        script = """
import resource, sys, numpy
from mpi_matmul.storage import FileError, open_part
part = open_part(sys.argv[1], int(sys.argv[2]), (1000, 1000), "f8", "C.npy")
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    part.write(slice(0, 1000), slice(0, 1000), numpy.ones((1000, 1000)))
except FileError as error:
    print(error)
"""
        with OutputFile(tmp_path / "C.npy").staged_matrix((1000, 1000), "f8") as staged:
            command = [sys.executable, "-c", script, staged.name, str(staged.offset)]
            done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
            assert done.stdout == "C.npy: file too large\n"
            assert 0 < np.count_nonzero(np.load(staged.name)) < 100_000 / 8

    def test_a_disk_without_room_is_found_before_anything_is_written(self, tmp_path: Path) -> None:
        output = OutputFile(tmp_path / "C.npy")
        with pytest.raises(FileError, match=r"C\.npy: needs 1\d{18} bytes, the disk has \d+ free"):
            output.staged_matrix((2**30, 2**30), "u1").__enter__()
        assert names(tmp_path) == []

    @pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system reserves nothing")
    def test_room_is_reserved_for_all_of_it_and_not_by_writing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The C library must have no way to write blocks: the size is there, nothing can be read."""
        calls = []

        def reserve(descriptor: int, start: int, nbytes: int) -> None:
            access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
            calls.append((start, nbytes, os.fstat(descriptor).st_size, access))

        monkeypatch.setattr(os, "posix_fallocate", reserve)
        with OutputFile(tmp_path / "C.npy").staged_matrix((3, 4), "f8") as staged:
            size = staged.offset + 96
        assert calls == [(0, size, size, os.O_WRONLY)]

    @pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL])
    def test_a_file_system_that_cannot_reserve_is_no_failure(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        refuse(monkeypatch, "posix_fallocate", number)
        with OutputFile(tmp_path / "C.npy").staged_matrix((3, 4), "f8") as staged:
            assert os.stat(staged.name).st_size == staged.offset + 96
            staged.write(slice(1, 2), ALL, NUMBERS[1:2])
            staged.commit()
        np.testing.assert_array_equal(np.load(tmp_path / "C.npy")[1], NUMBERS[1])
