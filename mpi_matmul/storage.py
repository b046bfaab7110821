"""Matrices and reports as files: refuse at the door, read and write parts in place, rename at the end.

Everything that is wrong with a file is a `FileError` of one line that names the file and the reason.
"""

import ast
import errno
import io
import math
import os
import re
import secrets
import shutil
import stat
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, Self

import numpy as np
import numpy.typing as npt

from mpi_matmul.layout import Array, Shape

Path = str | os.PathLike[str]

MAGIC = b"\x93NUMPY"
ZIP_MAGICS = (b"PK\x03\x04", b"PK\x05\x06")  # with and without members
LENGTH_BYTES = {(1, 0): 2, (2, 0): 4, (3, 0): 4}  # of the header's length, by format version
LONGEST_HEADER = 65536  # no matrix needs more; a longer text is not worth parsing
PANEL_BYTES = 16 << 20  # the most memory that one read or write takes for itself
CALL_BYTES = 64 << 20  # of one system call: Linux cuts at 2**31, and an interrupt waits for the end of a call
SHORT_LINE_BYTES = 32 << 10  # see _Lines
SAMPLES, SAMPLE_BYTES = 16, 4096  # of a fingerprint
CANNOT_RESERVE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EBADF}  # see _reserve


class FileError(ValueError):
    """A file that cannot be used: the message is one line, `NAME: reason`."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{shown(path)}: {reason}")
        self.reason = reason


# ---- lines ----


@dataclass(frozen=True)
class _Lines:
    """A matrix in an open file: lines of `length` items one after the other, rows or (Fortran order) columns.

    A part of it is a block (lines, items) that begins at some line and item of it. Whole lines are one piece
    of the file, and move without a copy when the block is such a piece too. Where a matrix is cut across its
    lines, only some items of each are wanted. There are two ways:

    - one call a line, which for short lines takes longer than the bytes themselves;
    - panels of whole lines, which moves bytes that nobody wants, and copies those that somebody does.

    From memory (the page cache) both take the same time for lines of 16 KiB, however few of their items are
    wanted; from a disk or another host a call costs more. So lines of up to SHORT_LINE_BYTES are read whole,
    and longer lines by one call each. Writing has no such choice: what lies between belongs to others.
    """

    descriptor: int
    offset: int
    length: int
    dtype: np.dtype[Any]

    def read(self, line: int, item: int, out: Array) -> None:
        """Fill `out` (lines, items) from there; ValueError when the file ends before."""
        if self._is_piece(out):
            _read_fully(self.descriptor, out, self._position(line, item))
        elif self._short:
            for rows, _, panel in _panels((len(out), self.length), self.dtype):
                self.read(line + rows.start, 0, panel)
                out[rows] = panel[:, item : item + out.shape[1]]
        elif self._as_in_file(out[0]):
            for index, segment in enumerate(out):
                _read_fully(self.descriptor, segment, self._position(line + index, item))
        else:
            for rows, columns, panel in _panels(out.shape, self.dtype):
                self.read(line + rows.start, item + columns.start, panel)
                out[rows, columns] = panel

    def write(self, line: int, item: int, block: Array) -> None:
        """Write `block` (lines, items) there."""
        whole = block.shape[1] == self.length
        if self._is_piece(block):
            _write_fully(self.descriptor, block, self._position(line, item))
        elif self._as_in_file(block[0]) and not (whole and self._short):
            for index, segment in enumerate(block):
                _write_fully(self.descriptor, segment, self._position(line + index, item))
        else:
            for rows, columns, panel in _panels(block.shape, self.dtype):
                panel[:] = block[rows, columns]
                self.write(line + rows.start, item + columns.start, panel)

    @property
    def _short(self) -> bool:
        return self.length * self.dtype.itemsize <= SHORT_LINE_BYTES

    def _position(self, line: int, item: int) -> int:
        return self.offset + (line * self.length + item) * self.dtype.itemsize

    def _is_piece(self, block: Array) -> bool:
        """Whether the block's bytes are the file's, without a gap in either."""
        return self._as_in_file(block) and block.shape[1] == self.length

    def _as_in_file(self, block: Array) -> bool:
        return block.dtype == self.dtype and block.flags.c_contiguous


def _panels(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[tuple[slice, slice, Array]]:
    """Cut (lines, items), neither 0, into pieces of at most PANEL_BYTES, each with memory of its shape.

    The memory is the same every time.
    """
    lines, items = shape
    width = min(items, PANEL_BYTES // dtype.itemsize)
    height = min(lines, PANEL_BYTES // (width * dtype.itemsize))
    memory = np.empty(height * width, dtype)
    for row in range(0, lines, height):
        for column in range(0, items, width):
            tall, wide = min(height, lines - row), min(width, items - column)
            panel = memory[: tall * wide].reshape(tall, wide)
            yield slice(row, row + tall), slice(column, column + wide), panel


def _read_fully(descriptor: int, out: Array, position: int) -> None:
    """Fill a contiguous array; ValueError when the file ends before."""
    rest = _bytes_of(out)
    while rest:
        count = os.preadv(descriptor, [rest[:CALL_BYTES]], position)
        if not count:
            raise ValueError(f"cut short while in use: it ended before byte {position + len(rest)}")
        rest, position = rest[count:], position + count


def _write_fully(descriptor: int, block: Array, position: int) -> None:
    """Write a contiguous array."""
    rest = _bytes_of(block)
    while rest:
        count = os.pwrite(descriptor, rest[:CALL_BYTES], position)
        rest, position = rest[count:], position + count


def _bytes_of(array: Array) -> memoryview:
    """The memory of a contiguous array (casting its own buffer would not do for every dtype)."""
    return array.reshape(-1).view(np.uint8).data


def _begin(shape: Shape, rows: slice, columns: slice, block: Array) -> tuple[int, int]:
    """Row and column where the part of a matrix begins; ValueError unless `block` has the part's shape."""
    (top, bottom, row_step), (left, right, column_step) = rows.indices(shape[0]), columns.indices(shape[1])
    extents = max(0, bottom - top), max(0, right - left)
    if (row_step, column_step) != (1, 1):
        raise ValueError(f"rows {rows} and columns {columns}: expected steps of 1")
    if block.shape != extents:
        raise ValueError(f"expected {extents} for a part of the matrix {shape}, got {block.shape}")
    return top, left


def _expect(dtype: np.dtype[Any], got: np.dtype[Any]) -> None:
    if got != dtype:
        raise ValueError(f"expected dtype {dtype}, got {got}")


# ---- reading ----


class NpyFile:
    """The array in a .npy file, opened once and read in parts, numbers only: nothing is ever unpickled.

    `shape`, `dtype` (which may be of the other byte order) and `fortran_order` are the header's, `offset` is
    where the data begin.
    """

    def __init__(self, path: Path, one_dimensional: Literal["row", "column"] = "row") -> None:
        """FileError if it is no such file, or is cut short.

        An array (k,) is read as a row (1, k) or as a column (k, 1).
        """
        self.path = path
        self._one_dimensional = one_dimensional
        with _named(path):
            size = _regular_file_size(path)
            self._stream = io.FileIO(path)
            self._close = weakref.finalize(self, self._stream.close)
            descr, self.fortran_order, self.shape = _read_header(path, self._stream)
            self.offset = self._stream.tell()
            self.dtype = _number_dtype(path, descr)
            promised = self.offset + math.prod(self.shape) * self.dtype.itemsize
            if size < promised:
                raise FileError(path, f"cut short: the header promises {promised} bytes, the file has {size}")
            _refuse_impossible_shape(path, self.shape, self.dtype)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Read no more; also done when nobody knows the object any longer."""
        self._close()

    @property
    def matrix_shape(self) -> Shape:
        """(m, n) of the matrix that is read; FileError unless the array has one or two dimensions."""
        if len(self.shape) == 2:
            return self.shape[0], self.shape[1]
        if len(self.shape) != 1:
            raise FileError(self.path, f"has shape {self.shape}; one or two dimensions are needed")
        return (1, self.shape[0]) if self._one_dimensional == "row" else (self.shape[0], 1)

    def read(self, rows: slice, columns: slice, out: Array) -> None:
        """Fill `out` with that part of the matrix: of its shape, in native byte order, strided or not.

        Takes at most PANEL_BYTES of memory, and none for whole rows that go into a contiguous `out`
        (columns, from a file in Fortran order). FileError when the file cannot be read or has become shorter,
        ValueError when `out` does not fit.
        """
        m, n = self.matrix_shape
        row, column = _begin((m, n), rows, columns, out)
        _expect(self.dtype.newbyteorder("="), out.dtype)
        if not out.size:
            return
        descriptor = self._stream.fileno()
        with _named(self.path):
            if self.fortran_order:
                _Lines(descriptor, self.offset, m, self.dtype).read(column, row, out.T)
            else:
                _Lines(descriptor, self.offset, n, self.dtype).read(row, column, out)

    def fingerprint(self) -> list[Any]:
        """What tells the same file, opened by another process or on another host: equal lists, fit for JSON.

        Size and time of change, the header, and a checksum of samples from the first to the last byte: on a
        host that does not share the folder, another file may have this name.
        """
        header = [self.dtype.str, self.fortran_order, list(self.shape), self.offset]
        with _named(self.path):
            facts = os.fstat(self._stream.fileno())
            return [facts.st_size, facts.st_mtime_ns, header, self._checksum(facts.st_size)]

    def _checksum(self, size: int) -> int:
        checksum, sample = 0, np.empty(min(size, SAMPLE_BYTES), np.uint8)
        for index in range(SAMPLES):
            _read_fully(self._stream.fileno(), sample, (size - sample.size) * index // (SAMPLES - 1))
            checksum = zlib.crc32(sample.data, checksum)
        return checksum


def open_matrix(path: Path) -> Array:
    """The array of a .npy file as a read-only memory map: any shape, order and byte order.

    FileError if it is no such file, or is cut short.
    """
    with NpyFile(path) as file, _named(path):
        order: Any = "F" if file.fortran_order else "C"
        if math.prod(file.shape):
            return np.asarray(np.memmap(path, file.dtype, "r", file.offset, file.shape, order))
        nothing: Array = np.empty(file.shape, file.dtype, order)  # no data: nothing that could be mapped
        nothing.flags.writeable = False
        return nothing


def _regular_file_size(path: Path) -> int:
    """The size in bytes; FileError for what would not be read to an end (a folder, a pipe) or is empty."""
    facts = os.stat(path)
    if stat.S_ISDIR(facts.st_mode):
        raise FileError(path, "is a directory")
    if not stat.S_ISREG(facts.st_mode):
        raise FileError(path, "not a regular file")
    if not facts.st_size:
        raise FileError(path, "empty file")
    return facts.st_size


def _read_header(path: Path, stream: BinaryIO) -> tuple[Any, bool, tuple[int, ...]]:
    """(descr, fortran_order, shape) of a .npy file, the stream left where the data begin.

    Source of the format: numpy.lib.format's documentation, versions 1.0, 2.0 and 3.0.
    """
    magic = stream.read(8)
    if magic.startswith(ZIP_MAGICS):
        raise FileError(path, "an .npz archive or another zip file: one array in a .npy file is needed")
    if not magic.startswith(MAGIC):
        raise FileError(path, "not a .npy file")
    version = (magic[6], magic[7]) if len(magic) == 8 else (0, 0)
    if version not in LENGTH_BYTES:
        raise FileError(path, f".npy format version {version[0]}.{version[1]} is not supported")
    length = int.from_bytes(stream.read(LENGTH_BYTES[version]), "little")
    text = stream.read(min(length, LONGEST_HEADER))
    if len(text) < length <= LONGEST_HEADER:
        raise FileError(path, f"cut short: the header has {length} bytes, the file has {len(text)} of them")
    try:
        return _parse_header(text.decode("utf-8" if version == (3, 0) else "latin-1"))
    except (ValueError, TypeError, KeyError, SyntaxError, MemoryError, RecursionError):
        raise FileError(path, "garbled .npy header") from None


def _parse_header(text: str) -> tuple[Any, bool, tuple[int, ...]]:
    """The three entries of the header's dictionary, of the right kinds; some exception if they are not."""
    text = re.sub(r"\b(\d+)L\b", r"\1", text)  # Python 2 wrote its long integers so
    with warnings.catch_warnings(action="ignore"):  # of the parser, about the spelling of garbage
        entries = ast.literal_eval(text.strip())
    if not isinstance(entries, dict) or set(entries) != {"descr", "fortran_order", "shape"}:
        raise ValueError("keys")
    shape, fortran_order = entries["shape"], entries["fortran_order"]
    if not isinstance(shape, tuple) or not isinstance(fortran_order, bool):
        raise TypeError("kinds")
    if not all(type(extent) is int and extent >= 0 for extent in shape):
        raise ValueError("shape")
    return entries["descr"], fortran_order, shape


def _number_dtype(path: Path, descr: Any) -> np.dtype[Any]:
    """The dtype that the header describes; FileError if its items are not numbers."""
    try:
        dtype = np.lib.format.descr_to_dtype(descr)
    except (ValueError, TypeError, KeyError, IndexError, SyntaxError):
        raise FileError(path, "garbled .npy header") from None
    if dtype.hasobject:
        raise FileError(path, "holds Python objects, which are never unpickled; numbers are needed")
    if dtype.kind == "V":
        raise FileError(path, f"holds records (structured dtype {dtype}); numbers are needed")
    if dtype.kind not in "biufc":
        raise FileError(path, f"holds items of dtype {dtype}; numbers are needed")
    return dtype


def _refuse_impossible_shape(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """FileError for too many axes or, where there is no data to tell, extents that no array can have."""
    try:
        np.empty(shape if 0 in shape else (1,) * len(shape), dtype)
    except (ValueError, OverflowError):
        raise FileError(path, "garbled .npy header") from None


# ---- writing ----


class OutputFile:
    """A file to be written when the work is done; whatever would prevent that is refused now.

    Writing makes a temporary file in the same folder and renames it: the target is complete or untouched. A
    symbolic link stays, the file that it points to is replaced. A process that is killed (not interrupted)
    while it writes leaves the temporary, `.mpi_matmul-*.tmp`.
    """

    def __init__(self, path: Path, inputs: Sequence[Path] = ()) -> None:
        """FileError if path cannot be written, or is one of the inputs under any name."""
        self.path = path
        with _named(path):
            self._target = os.path.realpath(path)
            self._folder = os.path.dirname(self._target)
            self._refuse_other_than_file()
            self._refuse_inputs(inputs)
            self._refuse_folder()

    def check_space(self, nbytes: int) -> None:
        """FileError if the disk has less than nbytes free (an older file stays until the new is complete)."""
        with _named(self.path):
            free = shutil.disk_usage(self._folder).free
        if free < nbytes:
            raise FileError(self.path, f"needs {nbytes} bytes, the disk has {free} free")

    def write_array(self, array: Array) -> None:
        """Write a .npy file, in C order and native byte order; FileError if that fails."""
        with self.staged_array(array) as commit:
            commit()

    def write_bytes(self, data: bytes) -> None:
        """Write these bytes; FileError if that fails."""
        with self._staged_bytes(data) as commit:
            commit()

    def write_text(self, text: str) -> None:
        """Write text as UTF-8; FileError if that fails."""
        with self.staged_text(text) as commit:
            commit()

    @contextmanager
    def staged_array(self, array: Array) -> Iterator[Callable[[], None]]:
        """Write an array of up to two dimensions beside the target now.

        Calling what the context gives renames, else all is as it was.
        """
        matrix = np.atleast_2d(array)
        with self.staged_matrix(matrix.shape, array.dtype, array.shape) as staged:
            staged.write(slice(None), slice(None), matrix)
            staged.sync()
            yield staged.commit

    def staged_text(self, text: str) -> AbstractContextManager[Callable[[], None]]:
        """The same for text."""
        return self._staged_bytes(text.encode())

    @contextmanager
    def _staged_bytes(self, data: bytes) -> Iterator[Callable[[], None]]:
        with self._temporary() as stream:
            with _named(self.path):
                _write_fully(stream.fileno(), np.frombuffer(data, np.uint8), 0)
                os.fsync(stream.fileno())
            yield lambda: self._rename(stream.name)

    @contextmanager
    def staged_matrix(
        self, shape: Shape, dtype: npt.DTypeLike, file_shape: tuple[int, ...] | None = None
    ) -> Iterator["StagedMatrix"]:
        """A .npy file of a matrix (m, n) beside the target, of full size, to be written in parts.

        Other processes write theirs through `open_part(staged.name, staged.offset, ...)`. When all have
        closed them, `staged.commit()` renames; without it all is as it was. `file_shape` is what the header
        says: `shape`, or the result of a product of one-dimensional operands. FileError when the disk has no
        room for it.
        """
        dtype = np.dtype(dtype).newbyteorder("=")
        header = _npy_header(shape if file_shape is None else file_shape, dtype)
        nbytes = header.size + math.prod(shape) * dtype.itemsize
        self.check_space(nbytes)  # or reserving would fill the disk before it fails
        with self._temporary() as stream:
            with _named(self.path):
                _reserve(stream.fileno(), nbytes)
                _write_fully(stream.fileno(), header, 0)
            yield StagedMatrix(stream, header.size, shape, dtype, self.path, self._rename)

    def _refuse_other_than_file(self) -> None:
        if self.path == "-":
            raise FileError(self.path, "an output needs a name (./- for a file of this name)")
        if not os.path.basename(self.path):
            raise FileError(self.path, "names a folder, not a file")
        try:
            mode = os.stat(self._target).st_mode
        except FileNotFoundError:
            return
        if stat.S_ISDIR(mode):
            raise FileError(self.path, "is a directory")
        if not stat.S_ISREG(mode):
            raise FileError(self.path, "not a regular file")
        if not os.access(self._target, os.W_OK):
            raise FileError(self.path, "permission denied")

    def _refuse_inputs(self, inputs: Sequence[Path]) -> None:
        if not os.path.exists(self._target):
            return
        for other in inputs:
            if os.path.exists(other) and os.path.samefile(self._target, other):
                raise FileError(self.path, f"is also an input ({shown(other)}), which is never overwritten")

    def _refuse_folder(self) -> None:
        """Really create and remove a file: permission bits do not tell about read-only file systems."""
        if not os.path.isdir(self._folder):
            raise FileError(self.path, f"no such folder: {shown(self._folder)}")
        with self._temporary():
            pass

    @contextmanager
    def _temporary(self) -> Iterator[BinaryIO]:
        """A new file in the target's folder, closed and gone at the end unless it was renamed."""
        name = os.path.join(self._folder, f".mpi_matmul-{secrets.token_hex(8)}.tmp")
        with _named(self.path):
            stream = io.FileIO(name, "x")
        try:
            yield stream
        finally:
            with suppress(OSError):  # of a file that is gone, or whose fsync has said that all is well
                stream.close()
            with _named(self.path), suppress(FileNotFoundError):
                os.unlink(name)

    def _rename(self, name: str) -> None:
        """Make the temporary file the target, with an older target's mode."""
        with _named(self.path):
            with suppress(FileNotFoundError):
                os.chmod(name, stat.S_IMODE(os.stat(self._target).st_mode))
            os.replace(name, self._target)


@dataclass(frozen=True)
class MatrixPart:
    """A .npy file of a matrix, of full size, in which this process writes its part while others write theirs.

    The data begin at `offset`, in C order and native byte order. Errors name `target`, as the user knows it.
    """

    stream: BinaryIO
    offset: int
    shape: Shape
    dtype: np.dtype[Any]
    target: Path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.stream.close()

    @property
    def name(self) -> str:
        """Of the file, for `open_part` elsewhere."""
        return self.stream.name

    def write(self, rows: slice, columns: slice, block: Array) -> None:
        """Write that part of the matrix: `block` has its shape, and any strides and byte order.

        Takes at most PANEL_BYTES of memory, and none for whole rows of contiguous native data. FileError when
        it cannot be written, ValueError when `block` does not fit.
        """
        row, column = _begin(self.shape, rows, columns, block)
        _expect(self.dtype, block.dtype.newbyteorder("="))
        lines = _Lines(self.stream.fileno(), self.offset, self.shape[1], self.dtype)
        if block.size:
            with _named(self.target):
                lines.write(row, column, block)

    def sync(self) -> None:
        """Wait until the disk has everything; FileError if it cannot take it."""
        with _named(self.target):
            os.fsync(self.stream.fileno())

    def close(self) -> None:
        """The same, and write no more."""
        if not self.stream.closed:
            with _named(self.target), self.stream:
                os.fsync(self.stream.fileno())


@dataclass(frozen=True)
class StagedMatrix(MatrixPart):
    """The part of the process that made the file, and says when all have written theirs."""

    rename: Callable[[str], None]

    def commit(self) -> None:
        """Make it the target. FileError if that fails, the target being as it was."""
        self.close()
        self.rename(self.name)


def open_part(name: str, offset: int, shape: Shape, dtype: npt.DTypeLike, target: Path) -> MatrixPart:
    """The matrix (m, n) in a file that another process has staged; FileError if it is not there."""
    try:
        # Write-only: a client of NFS then sends the bytes that were written, not the pages round them.
        stream = io.FileIO(name, "w", opener=_open_existing)
    except FileNotFoundError:
        raise FileError(target, f"the file to be written is not there: {shown(name)}") from None
    except OSError as error:
        raise FileError(target, _reason(error)) from error
    return MatrixPart(stream, offset, shape, np.dtype(dtype), target)


def _open_existing(name: str, flags: int) -> int:
    return os.open(name, flags & ~(os.O_CREAT | os.O_TRUNC))


def _npy_header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """The bytes before the data, for C order."""
    stream = io.BytesIO()
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    return np.frombuffer(stream.getvalue(), np.uint8)


def _reserve(descriptor: int, nbytes: int) -> None:
    """Give a new file its size and its place on the disk: a full disk is found before anything is written.

    Where the file system cannot reserve, the size is all. There glibc would write a byte into every block,
    which costs another host's disk as much as the data; it gives up (EBADF) when the size is there already
    and the descriptor is for writing only.
    """
    os.ftruncate(descriptor, nbytes)
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in CANNOT_RESERVE:
            raise


# ---- what both need ----


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn what the system says (OSError, or ValueError for a NUL in the name) into a FileError on path."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise FileError(path, _reason(error)) from error
    except ValueError as error:
        raise FileError(path, str(error)) from error


def _reason(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "no such file or folder"
    reason = error.strerror or str(error)
    return reason[:1].lower() + reason[1:]


def shown(path: Path) -> str:
    """The name on one line, whatever it holds."""
    name = os.fspath(path)
    return name if name and name.isprintable() else repr(name)
