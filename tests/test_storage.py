"""Files as a specification: what is read, what is refused and why, and what a failed write leaves."""

import errno
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpi_matmul.storage import FileError, OutputFile, open_matrix

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
            open_matrix(path)
        message = str(caught.value)
        assert message.startswith(f"{path}: ")
        assert reason in message.removeprefix(str(path))
        assert "\n" not in message
        assert "pickle=" not in message

    def test_the_hand_made_file_is_otherwise_right(self, tmp_path: Path) -> None:
        (tmp_path / "A.npy").write_bytes(npy_bytes())
        np.testing.assert_array_equal(open_matrix(tmp_path / "A.npy"), [0.0])

    def test_counts_the_bytes_that_are_missing(self, tmp_path: Path) -> None:
        path = tmp_path / "A.npy"
        np.save(path, np.zeros((1000, 1000)))
        os.truncate(path, 8000120)
        with pytest.raises(FileError, match="header promises 8000128 bytes, the file has 8000120"):
            open_matrix(path)

    def test_an_npz_is_called_by_its_name(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "A.npz", NUMBERS)
        with pytest.raises(FileError, match=r"\.npz archive"):
            open_matrix(tmp_path / "A.npz")

    def test_unpickles_nothing(self, tmp_path: Path) -> None:
        objects = np.array([Bomb(tmp_path / "boom")], dtype=object)
        np.save(tmp_path / "A.npy", objects, allow_pickle=True)
        with pytest.raises(FileError, match="never unpickled"):
            open_matrix(tmp_path / "A.npy")
        assert names(tmp_path) == ["A.npy"]

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(FileError, match=r"A\.npy: no such file"):
            open_matrix(tmp_path / "A.npy")

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(FileError, match="is a directory"):
            open_matrix(tmp_path)

    def test_a_pipe_that_nobody_writes_to(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "A.npy")
        with pytest.raises(FileError, match="not a regular file"):
            open_matrix(tmp_path / "A.npy")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_a_file_of_somebody_else(self, tmp_path: Path) -> None:
        (tmp_path / "A.npy").write_bytes(npy_bytes())
        (tmp_path / "A.npy").chmod(0)
        with pytest.raises(FileError, match="permission denied"):
            open_matrix(tmp_path / "A.npy")

    @pytest.mark.parametrize("name", ["a\nb.npy", "a\0b.npy", ""], ids=["line feed", "NUL", "no name"])
    def test_a_strange_name_still_makes_one_line(self, name: str) -> None:
        with pytest.raises(FileError) as caught:
            open_matrix(name)
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
