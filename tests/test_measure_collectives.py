"""The bench of the collectives: what it says and refuses, and that it sees what is wrong. No time counts."""

import json
import sys

import numpy as np
import pytest
from launcher import run_ranks
from worlds import threads

from mpi_matmul import measure_collectives
from mpi_matmul.comm.mailbox import mailbox_of
from mpi_matmul.measure import Stopped, World
from mpi_matmul.measure_collectives import Case, cases, measure, sent_bytes

BENCH = [sys.executable, "-m", "mpi_matmul.bench", "--collectives"]
NUMBERS = {"bytes", "ranks", "seconds_median", "library_seconds_median", "of_library", "repeat"}
PER_RANK = {"sent_bytes", "predicted_sent_bytes", "hosts"}


# ---- good runs ----


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_row_for_each_collective_and_topology(num_ranks):
    job = run_ranks(num_ranks, [*BENCH, "8", "100003", "--repeat", "2", "--json", "-"])
    assert job.returncode == 0, job.stderr
    report = json.loads(job.stdout)
    assert set(report) == {"collectives"}
    rows = report["collectives"]
    assert [(row["collective"], row["topology"], row["bytes"]) for row in rows] == [
        (case.name, case.way, case.nbytes) for case in cases([8, 100003])
    ]
    for row in rows:
        assert set(row) == NUMBERS | PER_RANK | {"collective", "topology", "mpi_library"}
        assert (row["ranks"], row["repeat"]) == (num_ranks, 2)
        assert row["bytes"] in (8, 100000)
        assert row["of_library"] == row["seconds_median"] / row["library_seconds_median"]
        assert row["sent_bytes"] == row["predicted_sent_bytes"]
        assert len(row["sent_bytes"]) == len(row["hosts"]) == num_ranks


def test_the_table():
    job = run_ranks(2, [*BENCH, "800", "--repeat", "1"])
    assert job.returncode == 0, job.stderr
    title, heads, *rows = job.stdout.splitlines()
    assert "ranks: 2" in title
    assert heads.split()[:3] == ["collective", "topology", "bytes"]
    assert [row.split()[:4] for row in rows] == [[case.name, case.way, "800", "2"] for case in cases([800])]
    assert {len(row) for row in rows} == {len(heads)}


@pytest.mark.parametrize("arguments", [["--plot", "x.png"], ["0"], ["many"]])
def test_what_is_refused(arguments):
    job = run_ranks(2, [*BENCH, *arguments])
    assert job.returncode == 2
    assert len([line for line in job.stderr.splitlines() if line.startswith("mpi_matmul")]) == 1, job.stderr
    assert "Traceback" not in job.stderr


def test_the_cases():
    of_one_size = list(cases([800]))
    assert len(of_one_size) == len(set(of_one_size)) == 2 * 5 + 3 + 2
    assert {case.nbytes for case in cases([])} == set(measure_collectives.SIZES)
    assert {case.nbytes for case in cases([1, 15, 16])} == {8, 16}


# ---- what is wrong is seen ----


def alone(case, library):
    return threads(1).run(
        lambda comm, rank: measure(World(mailbox_of(comm, rank), "none"), library, case, 1)
    )[0]


def good_library(name, send, receive, *_):
    receive[...] = send


def no_library(*_):
    pass


REDUCE = Case("reduce", "tree", 80)


def test_a_good_one():
    (row,) = alone(REDUCE, good_library)
    assert row["sent_bytes"] == row["predicted_sent_bytes"] == [0]


def test_a_wrong_library():
    with pytest.raises(Stopped) as stopped:
        alone(REDUCE, no_library)
    assert "the library's is wrong" in stopped.value.text


def test_a_wrong_result(monkeypatch):
    monkeypatch.setattr(measure_collectives, "reduce", no_library_with_options)
    with pytest.raises(Stopped) as stopped:
        alone(REDUCE, good_library)
    assert "ours is wrong" in stopped.value.text


def no_library_with_options(*_, **options):
    pass


def test_a_changed_operand(monkeypatch):
    def changing(mailbox, array, root, out, topology):
        out[...] = array
        array += 1

    monkeypatch.setattr(measure_collectives, "reduce", changing)
    with pytest.raises(Stopped) as stopped:
        alone(REDUCE, good_library)
    assert "ours is wrong" in stopped.value.text


def test_other_bytes_than_predicted(monkeypatch):
    monkeypatch.setattr(measure_collectives, "sent_bytes", lambda *_: 7)
    with pytest.raises(Stopped) as stopped:
        alone(REDUCE, good_library)
    assert "rank 0 sent 0 bytes, 7 by the formula" in stopped.value.text


@pytest.mark.parametrize("name", measure_collectives.NAMES)
@pytest.mark.parametrize("number", [2, 3, 5])
def test_a_result_is_right_only_if_it_is(name, number):
    """One item that is wrong on the rank that has a result."""
    has_one = {"broadcast": number - 1, "reduce": 0, "gather": 0}.get(name, number - 1)

    def program(comm, rank):
        if rank != has_one:
            return
        arrays = measure_collectives._Arrays(Case(name, None, 800), mailbox_of(comm, rank))
        place = arrays.places[rank] if "scatter" in name else arrays.out
        assert not arrays.are_right()
        place[...] = arrays._expected()
        assert arrays.are_right()
        place[-1] += 1
        assert not arrays.are_right()

    threads(number).run(program)


def test_the_formulas_for_equal_parts():
    """What is known of p equal parts: (p - 1) / p of the array, and twice that for all_reduce."""
    for p in (1, 2, 4, 8):
        parts = [100] * p
        for rank in range(p):
            one = {
                name: sent_bytes(Case(name, "ring", 0), parts, rank) for name in ("all_gather", "all_reduce")
            }
            assert one["all_gather"] == 100 * (p - 1)
            assert one["all_reduce"] == 2 * 100 * (p - 1)
            for topology in ("tree", "direct"):
                assert sent_bytes(Case("all_gather", topology, 0), parts, rank) == 100 * (p - 1)
            doubled = sent_bytes(Case("all_reduce", "tree", 0), parts, rank)
            assert doubled == 100 * p * int(np.log2(p))
