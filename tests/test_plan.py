"""The plan: what it predicts is what happens, byte for byte; what it chooses, says and refuses."""

import io
import json
import math
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from itertools import product

import numpy as np
import pytest
from launcher import job_environment, run_command, run_ranks
from worlds import threads

from mpi_matmul.calibrate import hosts_in_turn
from mpi_matmul.choose import choose, fewer_ranks, reason
from mpi_matmul.costs import Cost, Ranks, cheapest, costs_of, least_touched_items, rank_memory, shard_bytes
from mpi_matmul.kernels import KERNELS
from mpi_matmul.layout import block_range
from mpi_matmul.machine import Machine, default_machine, load_machine, save_machine
from mpi_matmul.mesh import Mesh, all_meshes
from mpi_matmul.operands import pose, random_operands
from mpi_matmul.plan import main
from mpi_matmul.storage import FileError
from mpi_matmul.tile_costs import outline
from mpi_matmul.tiles import Tiles

PLAN = [sys.executable, "-m", "mpi_matmul.plan"]
MACHINE = default_machine(1)
NUMBERS_OF_RANKS = (1, 2, 3, 4, 6, 8, 12)


def problem_of(m, k, n, dtype="f8", b_dtype=None):
    a, _ = random_operands(0, m, k, n, dtype)
    return pose(a, random_operands(0, m, k, n, b_dtype or dtype)[1])


@cache
def strategies_on(number):
    """Every kernel on every mesh of so many ranks, once."""
    return [kernel.on(mesh) for kernel in KERNELS.values() for mesh in dict.fromkeys(kernel.meshes(number))]


# ---- what is predicted is what is sent ----

SHAPES = [(7, 5, 11), (13, 29, 8), (1, 17, 3), (23, 1, 6), (2, 40, 37), (0, 4, 5), (5, 0, 4), (31, 33, 34)]
DTYPES = [("f8", "f8"), ("f4", "i1"), ("f2", "f2"), ("c16", "f4"), ("?", "u1")]


def counted(strategy, problem):
    """Bytes and messages that each rank of the simulator counts."""
    rng = np.random.default_rng(5)
    a, b = (
        (rng.random(shape) * 9).astype(dtype)
        for shape, dtype in ((problem.a_shape, problem.a_dtype), (problem.b_shape, problem.b_dtype))
    )
    ((_, run),) = threads(strategy.mesh.size).product(strategy, a, b)
    return run.kernel_sent_bytes, run.kernel_sent_messages


def assert_predicted(strategy, problem):
    ranks, cost = range(strategy.mesh.size), Cost(strategy, problem, MACHINE)
    sent, messages = counted(strategy, problem)
    assert sent == [strategy.sent_bytes(problem, rank) for rank in ranks], (strategy, problem)
    assert messages == [strategy.sent_messages(problem, rank) for rank in ranks], (strategy, problem)
    assert (cost.sent_bytes, cost.most_sent_bytes) == (sum(sent), max(sent)), (strategy, problem)
    assert cost.sent_messages == max(messages), (strategy, problem)


@pytest.mark.parametrize("number", NUMBERS_OF_RANKS)
def test_bytes_and_messages_are_those_that_are_counted(number):
    cases = list(product(SHAPES, DTYPES))
    for turn, strategy in enumerate(strategies_on(number)):
        for shape, dtypes in [cases[(7 * turn + 11 * i) % len(cases)] for i in range(4)]:
            assert_predicted(strategy, problem_of(*shape, *dtypes))


def test_bytes_and_messages_of_several_blocks_and_tiles():
    for strategy in strategies_on(4):
        assert_predicted(strategy, problem_of(301, 1200, 333))


def test_a_wrong_number_is_seen(monkeypatch):
    strategy = KERNELS["summa"].on(next(iter(KERNELS["summa"].meshes(4))))
    monkeypatch.setattr(type(strategy), "sent_messages", lambda self, problem, rank: 99)
    with pytest.raises(AssertionError):
        assert_predicted(strategy, problem_of(7, 5, 11))


def listed_messages(problem, mesh, rank):
    """What `Tiles` lists, one by one."""
    tiles, (i, l, j) = Tiles(problem, mesh, mesh.coordinates(rank)), mesh.coordinates(rank)  # noqa: E741
    of_a = sum(part.a_owner != (j + 1) % mesh.n for part in tiles.parts)
    of_b = sum(part.b_owner != (i + 1) % mesh.m for part in tiles.parts)
    of_c = sum(len(share) for owner, share in enumerate(tiles.shares) if owner != l)
    return of_a * sum(map(len, tiles.shares)) + of_b + of_c


@pytest.mark.parametrize("shape", [(5000, 7001, 3003), (101, 20011, 97), (50, 60, 70), (30011, 211, 5)])
def test_the_most_of_a_rank_is_that_of_the_rank_that_has_most(shape):
    problem = problem_of(*shape)
    for strategy in [*strategies_on(12), *strategies_on(30)]:
        ranks, cost = range(strategy.mesh.size), Cost(strategy, problem, MACHINE)
        assert cost.most_sent_bytes == max(strategy.sent_bytes(problem, rank) for rank in ranks), strategy
        assert cost.sent_bytes == sum(strategy.sent_bytes(problem, rank) for rank in ranks), strategy
        assert cost.sent_messages == max(strategy.sent_messages(problem, rank) for rank in ranks), strategy
        assert cost.memory_bytes == max(rank_memory(strategy, problem, rank) for rank in ranks), strategy
        assert cost.memory_about <= cost.memory_bytes
    for mesh in all_meshes(30):
        strategy = KERNELS["grid3d"].on(mesh)
        for rank in range(30):
            assert strategy.sent_messages(problem, rank) == listed_messages(problem, mesh, rank), mesh
        most = Cost(strategy, problem, MACHINE).sent_messages
        assert most / 2 <= outline(problem, mesh).messages <= 2 * most or most < 10


def test_the_longest_part_and_tile_are_those_of_the_list():
    for shape, mesh in product([(5000, 7001, 3003), (101, 20011, 97), (0, 4, 5), (5, 0, 4)], all_meshes(12)):
        tiles = Tiles(problem_of(*shape), mesh, (0, 0, 0))
        rows = [part.stop - part.start for share in tiles.shares for part in share]
        assert tiles.tile_rows == max(rows, default=0)
        assert sum(map(len, tiles.shares)) == sum(
            tiles.tiles_in(stop - start)
            for start, stop in (block_range(tiles.rows, mesh.k, i) for i in range(mesh.k))
        )


def test_memory_is_no_less_than_the_shards():
    for number, shape in product((1, 4, 6), SHAPES):
        problem = problem_of(*shape)
        for strategy in strategies_on(number):
            shards = [shard_bytes(strategy, problem, rank) for rank in range(number)]
            assert Cost(strategy, problem, MACHINE).memory_bytes >= max(shards)
            copies = strategy.a.copies * math.prod(problem.a_shape) + strategy.b.copies * math.prod(
                problem.b_shape
            )
            assert sum(shards) == 8 * (copies + math.prod(problem.c_shape))


# ---- the bound ----


@pytest.mark.parametrize(
    ("number", "ratio"), [(4, 1.1), (8, 1.1), (16, 1.1), (64, 1.1), (6, 1.25), (12, 1.25), (48, 1.25)]
)
def test_auto_touches_little_more_than_it_must(number, ratio):
    least, problem = least_touched_items(4096, 4096, 4096, number), problem_of(4096, 4096, 4096)
    for machine in (Machine(1e-9, 1e9, 1e15), MACHINE):  # where messages take longer, and where products do
        best = choose("auto", problem, Ranks(number), machine)
        assert 1 - 1e-9 <= best.touched_items / least <= ratio
        assert_predicted(best.strategy, problem_of(48, 48, 48))


def test_of_equal_times_the_fewest_bytes_win_and_what_does_not_fit_never_does():
    costs = costs_of(KERNELS, problem_of(4096, 4096, 4096), Ranks(12), MACHINE)
    fastest = min(cost.seconds for cost in costs)
    best = cheapest(costs)
    assert best.sent_bytes == min(
        cost.sent_bytes + cost.copied_bytes for cost in costs if cost.seconds <= 1.05 * fastest
    )
    frugal = cheapest(costs, lambda cost: cost.memory_bytes < 70e6)
    fitting = [cost for cost in costs if cost.memory_bytes < 70e6]
    assert frugal in fitting
    assert frugal.seconds <= 1.05 * min(cost.seconds for cost in fitting)
    assert cheapest(costs, lambda cost: False) is None


def predicted(name, mesh, *shape, machine):
    return Cost(KERNELS[name].on(Mesh(*mesh)), problem_of(*shape), machine).multiply_seconds


def test_what_takes_longer_is_predicted_to_do_so():
    compute, network = Machine(1e-9, 1e15, 1e9), Machine(1e-9, 1e6, 1e15)
    # Parts of 32 of k are laid together to one; long ones cost nothing more.
    for name in ("grid3d", "fsdp"):
        assert predicted(name, (4, 1, 1), 512, 128, 512, machine=compute) < 1.2 * 2 * 512 * 128 * 512 / 1e9
    assert predicted("summa", (2, 1, 2), 4096, 4096, 4096, machine=compute) == pytest.approx(
        2 * 4096**3 / 1e9, rel=0.1
    )
    # On a slow network the bytes count alone, and copies come before.
    for cost in costs_of(KERNELS, problem_of(2000, 2000, 2000), Ranks(4), network):
        assert cost.seconds == pytest.approx((cost.sent_bytes + cost.copied_bytes) / 1e6, rel=0.01)
    # Sums of c wait for the first piece, and the last piece for them.
    even = Machine(1e-9, 8 * 3 * 2048**2 / 10, 2 * 2048**3 / 10)  # ten seconds each
    assert 12 < predicted("tp_row", (1, 4, 1), 2048, 2048, 2048, machine=even) < 20
    assert 10 < predicted("fsdp", (4, 1, 1), 2048, 2048, 2048, machine=even) < 13
    assert predicted("fsdp", (4, 1, 1), 64, 64, 64, machine=Machine(1.0, 1e9, 1e9)) == pytest.approx(
        3, rel=0.01
    )


def test_the_bound_is_below_every_strategy():
    for shape, number in product(
        [(64, 64, 64), (4096, 64, 64), (64, 4096, 2048), (7, 1000, 3)], (1, 2, 6, 12, 48)
    ):
        least = least_touched_items(*shape, number)
        for cost in costs_of(KERNELS, problem_of(*shape), Ranks(number), MACHINE):
            assert cost.touched_items >= least * (1 - 1e-9), cost


# ---- the program ----


def plan(*arguments, **env):
    """The program, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.delenv("MPI_MATMUL_MACHINE", raising=False)
        patch.setenv("XDG_CONFIG_HOME", "/nonexistent")
        for name, value in env.items():
            patch.setenv(name, value)
        status = main(list(map(str, arguments)))
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def plan_as_a_process(*arguments, timeout=30):
    return run_command(
        [*PLAN, *map(str, arguments)], timeout, job_environment({"XDG_CONFIG_HOME": "/nonexistent"})
    )


def planned(*arguments, **env):
    job = plan(*arguments, "--json", "-", **env)
    assert job.returncode == 0, job.stderr
    return json.loads(job.stdout)


def refused(job, *parts):
    """Status 2 and one line that says all of this."""
    assert job.returncode == 2, (job.stdout, job.stderr)
    assert job.stdout == ""
    assert job.stderr.startswith("mpi_matmul: ")
    assert job.stderr.count("\n") == 1
    assert all(str(part) in job.stderr for part in parts), job.stderr
    return True


CUBE = ("--shape", 4096, 4096, 4096, "--ranks", 8)


def test_the_table():
    job = plan(*CUBE)
    assert (job.returncode, job.stderr) == (0, "")
    lines = job.stdout.splitlines()
    assert lines[0] == "(4096 x 4096) @ (4096 x 4096) float64 on 8 ranks, 1 host"
    assert lines[1].startswith(
        "machine: a host with 640 GFLOP/s, 4 GB/s, 20 us a message (defaults, not measured"
    )
    assert lines[2] == "some rank must touch 12582912 items of a, b and c at least: 101 MB"
    assert lines[3].split()[:3] == ["strategy", "mesh", "memory"]
    rows = [line.split()[:2] for line in lines[4:-1]]
    assert list(dict.fromkeys(name for name, _ in rows)) == list(KERNELS)
    assert ["dp", "8x1x1"] in rows
    assert [name for name, _ in rows].count("summa") == 3
    assert all(line.endswith("-") for line in lines[4:-1])
    assert lines[-1].startswith("auto: ")
    assert (
        len(plan(*CUBE, "--all").stdout.splitlines())
        == 5 + len(strategies_on(8)) - len(KERNELS["fsdp_tp"].meshes(8)) + 1
    )


def test_the_plan_for_programs():
    facts = planned(*CUBE, "--hosts", 2, "--dtype", "f4", "--max-memory", "60MB")
    problem = problem_of(4096, 4096, 4096, "f4")
    costs = {
        (cost.strategy.name, cost.mesh.shape): cost
        for cost in costs_of(KERNELS, problem, Ranks(8, 2), default_machine(2))
    }
    assert {(one["strategy"], tuple(one["mesh"])) for one in facts["strategies"]} == set(costs)
    for one in facts["strategies"]:
        cost = costs[one["strategy"], tuple(one["mesh"])]
        for name in (
            "memory_bytes",
            "most_sent_bytes",
            "sent_bytes",
            "copied_bytes",
            "sent_messages",
            "seconds",
        ):
            assert one[name] == getattr(cost, name)
        assert one["fits"] == (one["memory_bytes"] <= 60e6)
        assert one["touched_ratio"] >= 1
    assert facts["chosen"] in facts["strategies"]
    assert (facts["shape"], facts["ranks"], facts["hosts"], facts["dtype"]) == ([4096] * 3, 8, 2, "float32")
    assert facts["machine"] == {"file": None, "latency": 50e-6, "bandwidth": 1.25e9, "flops": 640e9}


def moved(one):
    return one["sent_bytes"] + one["copied_bytes"]


def test_the_choice_is_the_fastest_that_fits():
    free, every = (planned(*CUBE)[name] for name in ("chosen", "strategies"))
    fastest = min(one["seconds"] for one in every)
    as_good = [one for one in every if one["seconds"] <= 1.05 * fastest]
    assert free in as_good
    assert moved(free) == min(map(moved, as_good))
    tight = planned(*CUBE, "--max-memory", free["memory_bytes"] - 1)["chosen"]
    assert (tight["strategy"], tight["mesh"]) != (free["strategy"], free["mesh"])
    assert tight["fits"]
    assert tight["memory_bytes"] < free["memory_bytes"]
    table = plan(*CUBE, "--max-memory", free["memory_bytes"] - 1).stdout
    assert {line.split()[-1] for line in table.splitlines()[4:] if not line.startswith("auto")} == {
        "yes",
        "no",
    }


def test_a_report_in_a_file(tmp_path):
    job = plan(*CUBE, "--json", tmp_path / "plan.json")
    assert job.returncode == 0
    assert "auto: " in job.stdout
    assert json.loads((tmp_path / "plan.json").read_text()) == planned(*CUBE)


@pytest.mark.parametrize("number", [1, 7, 99991, 100000, 98280])
def test_any_number_of_ranks(number):
    job = plan_as_a_process("--shape", 100000, 100000, 100000, "--ranks", number)
    assert job.returncode == 0, job.stderr
    assert f"on {number} rank" in job.stdout


@pytest.mark.parametrize("shape", [(0, 4, 5), (4, 0, 5), (1, 1, 1), (10**9, 1, 10**9)])
def test_any_shape(shape):
    facts = planned("--shape", *shape, "--ranks", 6)
    assert all(one["touched_ratio"] >= 1 - 1e-9 for one in facts["strategies"])


WRONG = {
    "no shape": (["--ranks", "2"], "--shape"),
    "no ranks": (["--shape", "1", "2", "3"], "--ranks"),
    "no rank": (["--shape", "1", "2", "3", "--ranks", "0"], "'0'"),
    "a size that is none": (["--shape", "1", "x", "3", "--ranks", "2"], "'x'"),
    "a memory that is none": ([*map(str, CUBE), "--max-memory", "much"], "'much'"),
    "a dtype that is none": ([*map(str, CUBE), "--dtype", "str"], "'str'"),
    "more hosts than ranks": ([*map(str, CUBE), "--hosts", "9"], "--hosts 9"),
    "a flag that is none": ([*map(str, CUBE), "--no-such-flag"], "--no-such-flag"),
    "no folder for the report": ([*map(str, CUBE), "--json", "/nonexistent/plan.json"], "/nonexistent"),
    "a product too large for any memory": (["--shape", *["1000000000000"] * 3, "--ranks", "2"], "no memory"),
}


@pytest.mark.parametrize(("arguments", "part"), WRONG.values(), ids=WRONG)
def test_bad_usage_is_refused_in_one_line(arguments, part):
    assert refused(plan(*arguments), part)


def test_a_process_refuses_in_one_line_too():
    assert refused(plan_as_a_process(*CUBE, "--max-memory", "1kB"), "needs least")


def test_what_fits_nowhere_is_refused_with_what_needs_least():
    every = planned(*CUBE)["strategies"]
    least = min(every, key=lambda one: one["memory_bytes"])
    mesh = "x".join(map(str, least["mesh"]))
    assert refused(plan(*CUBE, "--max-memory", "1MB"), "1.0 MB", mesh, "needs least", "MB on a rank")
    assert plan(*CUBE, "--max-memory", least["memory_bytes"]).returncode == 0


def test_fewer_ranks_are_named_where_they_are_faster():
    small, large = problem_of(64, 64, 64), problem_of(20000, 20000, 20000)
    assert "rank is predicted" in fewer_ranks(
        choose("auto", small, Ranks(16), MACHINE), small, Ranks(16), MACHINE
    )
    assert fewer_ranks(choose("auto", large, Ranks(16), MACHINE), large, Ranks(16), MACHINE) is None
    assert "1 rank is predicted to be faster" in plan("--shape", 64, 64, 64, "--ranks", 16).stdout
    assert "faster for this product" not in plan("--shape", *[20000] * 3, "--ranks", 16).stdout


def test_no_mpi_is_imported():
    code = (
        "import sys; from mpi_matmul.plan import main; main(sys.argv[1:]);"
        "assert not [name for name in sys.modules if name.startswith('mpi4py')]"
    )
    for arguments in (["--help"], list(map(str, CUBE))):
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=60, capture_output=True)


# ---- the machine ----


def test_a_calibrated_machine_is_used(tmp_path):
    file = save_machine(Machine(1e-3, 1e6, 1e9, 4), tmp_path / "machine.json")
    for facts in (planned(*CUBE, "--machine", file), planned(*CUBE, MPI_MATMUL_MACHINE=str(file))):
        assert facts["machine"] == {"file": str(file), "latency": 1e-3, "bandwidth": 1e6, "flops": 1e9}
    assert (
        f"1 GFLOP/s, 0.001 GB/s, 1e+03 us a message (calibrated, {file})"
        in plan(*CUBE, "--machine", file).stdout
    )


NONE = {"latency": 1e-5, "bandwidth": 1e9, "flops": 1e9}


@pytest.mark.parametrize(
    "wrong",
    [
        {"ranks": "x"},
        {"ranks": None},
        {"ranks": 2.5},
        {"hosts": 0},
        {"bandwidth": True},
        {"bandwidth": 10**400},
        {"flops": 1e-320},
        {"latency": float("nan")},
        {"colour": 1},
    ],
    ids=str,
)
def test_numbers_that_no_machine_has_are_refused(tmp_path, wrong):
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({**NONE, **wrong}))
    with pytest.raises(FileError, match="is not a calibration"):
        load_machine(1, path=file)


def test_what_one_host_says_of_the_network_is_not_believed(tmp_path):
    file = save_machine(Machine(1e-6, 1e12, 1e9, 4), tmp_path / "machine.json")
    assert load_machine(1, path=file).bandwidth == 1e12
    assert load_machine(2, path=file).bandwidth == default_machine(2).bandwidth
    file = save_machine(Machine(1e-6, 1e10, 1e9, 4, hosts=2), tmp_path / "machine.json")
    assert load_machine(3, path=file).bandwidth == 1e10


def test_hops_inside_a_host_are_cheap_where_it_is_known_who_is_there():
    problem, machine = problem_of(4096, 4096, 4096), default_machine(4)
    anywhere, placed = (
        Cost(KERNELS["fsdp"].on(Mesh(64, 1, 1)), problem, machine, 4, known) for known in (False, True)
    )
    assert placed.seconds < 0.5 * anywhere.seconds
    assert not Ranks.on(["h1", "h2", "h1"]).placed
    assert Ranks.on(["h1", "h1", "h2"]).placed


def test_fewer_ranks_that_have_no_room_are_not_recommended():
    problem, ranks, machine = problem_of(4096, 4096, 4096), Ranks(64), Machine(1e-9, 1e6, 1e15)
    best = choose("auto", problem, ranks, machine)
    assert fewer_ranks(best, problem, ranks, machine)
    assert fewer_ranks(best, problem, ranks, machine, best.memory_bytes) is None


def test_little_memory_raises_the_bound():
    enough = (1000**3 / 8) ** (2 / 3)
    without = least_touched_items(1000, 1000, 1000, 8)
    assert least_touched_items(1000, 1000, 1000, 8, enough) == without
    assert least_touched_items(1000, 1000, 1000, 8, enough * 0.999) == pytest.approx(without, rel=1e-3)
    assert least_touched_items(1000, 1000, 1000, 8, enough / 4) == pytest.approx(
        4 * enough + enough / 4, rel=1e-9
    )


@pytest.mark.parametrize("shape", [(0, 3, 0), (0, 0, 0), (0, 5, 2), (3, 0, 2), (2, 5, 0)])
@pytest.mark.parametrize("number", [1, 2, 7])
def test_a_product_of_nothing_has_a_choice(shape, number):
    problem = problem_of(*shape)
    best = choose("auto", problem, Ranks(number), MACHINE)
    assert reason(best, problem, Ranks(number), MACHINE)
    assert fewer_ranks(best, problem, Ranks(number), MACHINE) is None or number > 1


def test_a_machine_that_is_none_is_refused(tmp_path):
    file = tmp_path / "machine.json"
    assert refused(plan(*CUBE, "--machine", file), file, "no such file")
    for text in ("", "[]", "{}", '{"latency": 1}', '{"latency": 1, "bandwidth": 0, "flops": 1}', "nonsense"):
        file.write_text(text)
        assert refused(plan(*CUBE, MPI_MATMUL_MACHINE=str(file)), file, "is not a calibration")


def calibrated(number, *arguments, **options):
    return run_ranks(
        number, [sys.executable, "-m", "mpi_matmul.bench", "--calibrate", *map(str, arguments)], **options
    )


def test_a_calibration_is_what_a_plan_reads(tmp_path):
    file = tmp_path / "folder" / "machine.json"
    job = calibrated(2, "--machine", file)
    assert (job.returncode, job.stderr) == (0, "")
    assert job.stdout.splitlines()[-1] == f"wrote {file}"
    machine = load_machine(1, path=file)
    assert (machine.ranks, machine.measured) == (2, True)
    assert 1e-7 < machine.latency < 1e-1
    assert machine.bandwidth > 1e6
    assert machine.flops > 1e8
    assert str(machine) in job.stdout
    numbers = {"latency": machine.latency, "bandwidth": machine.bandwidth, "flops": machine.flops}
    assert planned(*CUBE, "--machine", file)["machine"] == {"file": str(file), **numbers}


def test_one_rank_sends_nothing_to_be_measured(tmp_path):
    file = tmp_path / "machine.json"
    job = calibrated(1, env={"MPI_MATMUL_MACHINE": str(file)})
    assert job.returncode == 0, job.stderr
    assert "one rank sends nothing" in job.stdout
    machine = load_machine(1, path=file)
    assert (machine.latency, machine.bandwidth) == (MACHINE.latency, MACHINE.bandwidth)


def test_neighbours_on_the_ring_are_on_different_hosts():
    hosts = ["h1"] * 3 + ["h2"] * 3 + ["h3"] * 2
    order = [hosts[rank] for rank in hosts_in_turn(hosts)]
    assert order == ["h1", "h2", "h3", "h1", "h2", "h3", "h1", "h2"]
    assert sorted(hosts_in_turn(hosts)) == list(range(8))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--calibrate", "--shape", "1", "2", "3"], "--calibrate"),
        (["--machine", "machine.json"], "MPI_MATMUL_MACHINE"),
        (["--calibrate", "--machine", "/dev/null/machine.json"], "/dev/null"),
    ],
)
def test_a_calibration_that_cannot_be(arguments, part):
    job = run_ranks(2, [sys.executable, "-m", "mpi_matmul.bench", *arguments])
    lines = [line for line in job.stderr.splitlines() if line.startswith("mpi_matmul:")]
    assert job.returncode == 2, job.stderr
    assert len(lines) == 1
    assert part in lines[0]
