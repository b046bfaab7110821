"""Matrices and reports as files: refuse at the door, write beside the target and rename at the end.

Everything that is wrong with a file is a `FileError` of one line that names the file and the reason.
"""

import ast
import errno
import math
import os
import re
import secrets
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, BinaryIO

import numpy as np

from mpi_matmul.layout import Array

Path = str | os.PathLike[str]

MAGIC = b"\x93NUMPY"
ZIP_MAGICS = (b"PK\x03\x04", b"PK\x05\x06")  # with and without members
LENGTH_BYTES = {(1, 0): 2, (2, 0): 4, (3, 0): 4}  # of the header's length, by format version
LONGEST_HEADER = 65536  # no matrix needs more; a longer text is not worth parsing
PANEL_BYTES = 16 << 20


class FileError(ValueError):
    """A file that cannot be used: the message is one line, `NAME: reason`."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{shown(path)}: {reason}")


# ---- reading ----


def open_matrix(path: Path) -> Array:
    """The array of a .npy file as a read-only memory map: any shape, order and byte order, numbers only.

    Nothing is ever unpickled. FileError if it is no such file, or is cut short.
    """
    with _named(path):
        size = _regular_file_size(path)
        with open(path, "rb") as stream:
            descr, fortran_order, shape = _read_header(path, stream)
            offset = stream.tell()
        dtype = _number_dtype(path, descr)
        promised = offset + math.prod(shape) * dtype.itemsize
        if size < promised:
            raise FileError(path, f"cut short: the header promises {promised} bytes, the file has {size}")
        return _map(path, dtype, offset, shape, "F" if fortran_order else "C")


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


def _map(path: Path, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...], order: Any) -> Array:
    """A read-only view of the data; where there are none, which cannot be mapped, an ordinary empty array."""
    try:
        if math.prod(shape):
            return np.asarray(np.memmap(path, dtype, "r", offset, shape, order))
        nothing: Array = np.empty(shape, dtype, order)
    except (ValueError, OverflowError):  # an extent or a number of axes that no array can have
        raise FileError(path, "garbled .npy header") from None
    nothing.flags.writeable = False
    return nothing


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

    def write_text(self, text: str) -> None:
        """Write text as UTF-8; FileError if that fails."""
        with self.staged_text(text) as commit:
            commit()

    def staged_array(self, array: Array) -> AbstractContextManager[Callable[[], None]]:
        """Write beside the target now; calling what the context gives renames, else all is as it was."""
        return self._staged(lambda stream: _write_npy(stream, array))

    def staged_text(self, text: str) -> AbstractContextManager[Callable[[], None]]:
        """The same for text."""
        return self._staged(lambda stream: stream.write(text.encode()))

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
    def _temporary(self) -> Iterator[tuple[str, int]]:
        """A new file in the target's folder, as (name, descriptor), gone at the end unless it was renamed."""
        name = os.path.join(self._folder, f".mpi_matmul-{secrets.token_hex(8)}.tmp")
        # 0o666: the kernel takes the umask off
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            yield name, descriptor
        finally:
            os.close(descriptor)
            with suppress(FileNotFoundError):
                os.unlink(name)

    @contextmanager
    def _staged(self, write: Callable[[BinaryIO], object]) -> Iterator[Callable[[], None]]:
        with _named(self.path), self._temporary() as (name, descriptor):
            with open(descriptor, "wb", closefd=False) as stream:
                write(stream)
            with suppress(FileNotFoundError):
                os.fchmod(descriptor, stat.S_IMODE(os.stat(self._target).st_mode))
            os.fsync(descriptor)
            yield lambda: self._commit(name)

    def _commit(self, name: str) -> None:
        with _named(self.path):
            os.replace(name, self._target)


def _write_npy(stream: BinaryIO, array: Array) -> None:
    """Header, then panels of rows, so that a copy in C order is never made of the whole."""
    dtype = array.dtype.newbyteorder("=")
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": array.shape}
    np.lib.format.write_array_header_1_0(stream, header)
    rows = array if array.ndim else array.reshape(1)
    step = max(1, PANEL_BYTES * len(rows) // max(1, array.nbytes))
    for start in range(0, len(rows) if array.size else 0, step):
        panel = np.ascontiguousarray(rows[start : start + step], dtype)
        stream.write(panel.reshape(-1).view(np.uint8).data)


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
