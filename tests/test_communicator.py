"""The contract of a communicator, in every world."""

from __future__ import annotations

import operator
import random
import threading
import time

import numpy as np
import pytest
import worlds

from mpi_matmul import Communicator
from mpi_matmul.comm.counting import CountingMailbox
from mpi_matmul.comm.mailbox import mailbox_of
from mpi_matmul.comm.threads import Deadlock, DeviceFailed
from mpi_matmul.launch import on_threads

DTYPES = [
    *("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "g", "c8", "c16", "G"),
    *(">i4", ">f8", ">c16", ">f2"),
]
LAYOUTS = {
    "C order": lambda x: x,
    "Fortran order": np.asfortranarray,
    "transposed": lambda x: x.T,
    "every second column": lambda x: x[:, ::2],
    "negative strides": lambda x: x[::-1, ::-1],
    "one column": lambda x: x[:, 1],
    "repeated without memory": lambda x: np.broadcast_to(x[:1], (4, x.shape[1])),
    "no rows": lambda x: x[:0],
    "no columns": lambda x: x[:, :0],
    "a single number": lambda x: x[1, 1],
    "no dimensions": lambda x: np.array(x[1, 1]),
    "three dimensions": lambda x: x.reshape(5, 2, 3),
    "read-only": lambda x: operator.setitem(x.flags, "WRITEABLE", False) or x,
}


def neighbours(comm, rank):
    return (rank + 1) % comm.num_devices, (rank - 1) % comm.num_devices


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_dtype_and_layout_arrives_by_value(world, layout):
    def program(comm, rank):
        ahead, behind = neighbours(comm, rank)
        for dtype in DTYPES:
            values = LAYOUTS[layout](np.arange(30).reshape(5, 6).astype(dtype))
            comm.send(rank, ahead, values)
            src, data = comm.recv(rank)
            assert src == behind
            assert isinstance(data, np.ndarray)
            assert data.dtype == np.asarray(values).dtype.newbyteorder("=")
            assert data.dtype.isnative or world.name.startswith("bare")
            assert data.shape == np.shape(values)
            assert data.flags.c_contiguous
            assert data.flags.writeable
            np.testing.assert_array_equal(data, values)
            data[...] = 0  # its own: the sender's values stay
            np.testing.assert_array_equal(values, LAYOUTS[layout](np.arange(30).reshape(5, 6).astype(dtype)))

    if not world.name.startswith("bare"):  # what a foreign communicator makes of a layout is its own business
        world.run(program)


def test_messages_of_one_sender_keep_their_order(world):
    def program(comm, rank):
        for number in range(50):
            for dst in range(comm.num_devices):
                comm.send(rank, dst, np.array([rank, number]))
        seen = {src: [] for src in range(comm.num_devices)}
        for _ in range(50 * comm.num_devices):
            src, data = comm.recv(rank)
            assert data[0] == src
            seen[src].append(int(data[1]))
        assert all(numbers == list(range(50)) for numbers in seen.values())

    world.run(program)


@pytest.mark.parametrize("size", [64, 10_000, 200_000, 8 * 2**20])
def test_the_receiver_sees_the_value_at_the_call(world, size):
    times = 200 if size < 2**20 else 20

    def program(comm, rank):
        ahead, _ = neighbours(comm, rank)
        data = np.empty(size // 8)
        for number in range(times):
            data[:] = number
            comm.send(rank, ahead, data)
            data[:] = -1
        for number in range(times):
            assert (comm.recv(rank)[1] == number).all()

    world.run(program)


@pytest.mark.parametrize("size", [1 << 10, 1 << 16, 1 << 20, (16 << 20) + 8, 64 << 20])
def test_a_ring_in_which_everyone_sends_first(world, size):
    def program(comm, rank):
        ahead, behind = neighbours(comm, rank)
        comm.send(rank, ahead, np.full(size, rank, np.uint8))
        src, data = comm.recv(rank)
        assert (src, data.size) == (behind, size)
        assert (data == behind).all()

    world.run(program)


def test_the_mailbox_serves_the_rank_that_is_asked_for(world):
    def program(comm, rank):
        mailbox, delays = mailbox_of(comm, rank), random.Random(rank)
        for number in range(20):
            time.sleep(delays.random() * 1e-3)
            for dst in range(comm.num_devices):
                mailbox.send(dst, np.array([rank, number]))
        for number in range(20):
            for src in reversed(range(comm.num_devices)):
                assert mailbox.recv(src).tolist() == [src, number]

    world.run(program)


def test_transfers_go_into_the_array_that_is_given(world):
    def program(comm, rank):
        mailbox = mailbox_of(comm, rank)
        ahead, behind = neighbours(comm, rank)
        for out in (np.zeros((3, 4)), np.zeros((3, 8))[:, ::2], np.zeros((4, 3)).T, np.zeros((0, 4))):
            sent = np.full(out.shape, rank + 1.0)
            sending, arriving = mailbox.start_send(ahead, sent), mailbox.start_recv(behind, out)
            assert sending.wait() is sent
            assert arriving.wait() is out
            assert (out == behind + 1.0).all()

    world.run(program)


def test_receives_are_served_in_the_order_in_which_they_were_started(world):
    """Whatever the order in which they are waited for, and however often."""

    def program(comm, rank):
        mailbox = mailbox_of(comm, rank)
        ahead, behind = neighbours(comm, rank)
        for number in range(1, 4):
            mailbox.send(ahead, np.array([number]))
        first, second, into = mailbox.start_recv(behind), mailbox.start_recv(behind), np.zeros(1, int)
        third = mailbox.start_recv(behind, into)
        received = [transfer.wait().tolist() for transfer in (third, second, first, second, third)]
        assert received == [[3], [2], [1], [2], [3]]
        assert into.tolist() == [3]
        mailbox.send(ahead, np.array([4]))
        assert mailbox.recv(behind).tolist() == [4]

    world.run(program)


def test_ranks_that_all_wait_for_their_sends_first_still_receive(world):
    def program(comm, rank):
        mailbox = mailbox_of(comm, rank)
        ahead, behind = neighbours(comm, rank)
        sending, arriving = mailbox.start_send(ahead, np.full(10**6, rank)), mailbox.start_recv(behind)
        sending.wait()
        assert (arriving.wait() == behind).all()

    world.run(program)


def test_a_message_that_does_not_fit_its_place_is_an_error(world):
    def program(comm, rank):
        mailbox = mailbox_of(comm, rank)
        ahead, behind = neighbours(comm, rank)
        mailbox.send(ahead, np.zeros((2, 3), np.float32))
        with pytest.raises(RuntimeError, match=r"\(2, 3\) float32, expected \(3, 2\) float32"):
            mailbox.start_recv(behind, np.zeros((3, 2), np.float32)).wait()

    world.run(program)


def test_counting_counts_messages_and_bytes(world):
    def program(comm, rank):
        counter = CountingMailbox(mailbox_of(comm, rank))
        ahead, behind = neighbours(comm, rank)
        counter.send(ahead, np.zeros(3))
        counter.start_send(ahead, np.zeros((2, 5), np.float32)).wait()
        counter.recv(behind)
        counter.recv(behind)
        assert (counter.sent_messages, counter.sent_bytes) == (2, 24 + 40)

    world.run(program)


def test_ranks_outside_the_world_are_refused(world):
    def program(comm, rank):
        beyond = comm.num_devices
        for call in (
            lambda: comm.send(rank, beyond, np.zeros(1)),
            lambda: comm.send(beyond, rank, np.zeros(1)),
            lambda: comm.send(rank, -1, np.zeros(1)),
            lambda: comm.recv(beyond),
            lambda: comm.recv(-1),
        ):
            with pytest.raises(ValueError, match=rf"(-1|{beyond}), expected a rank from 0 to {beyond - 1}"):
                call()
        with pytest.raises(TypeError):
            comm.send(rank, 0.5, np.zeros(1))

    if not world.name.startswith("bare"):
        world.run(program)


def test_python_objects_are_refused(world):
    def program(comm, rank):
        with pytest.raises(TypeError, match="object"):
            comm.send(rank, rank, np.array([1, "a", None], dtype=object))
        with pytest.raises(TypeError, match="cannot be sent"):
            comm.send(rank, rank, np.zeros(2, dtype=[("x", "f8")]))

    if not world.name.startswith("bare"):
        world.run(program)


# ---- threads only ----


@pytest.mark.parametrize("number", [0, -1])
def test_a_world_has_at_least_one_device(number):
    with pytest.raises(ValueError, match=f"num_devices is {number}"):
        Communicator(number)


def test_inboxes_are_one_queue_a_device():
    comm = Communicator(3)
    comm.send(0, 2, [1, 2])
    assert [inbox.qsize() for inbox in comm.inboxes] == [0, 0, 1]
    comm.inboxes[1].put((2, np.zeros(1)))
    assert comm.recv(1)[0] == 2


def test_a_failing_device_wakes_the_others_and_is_named():
    woken = []

    def program(comm, rank):
        if rank == 2:
            time.sleep(0.1)
            raise KeyError("lost")
        try:
            comm.recv(rank)
        except DeviceFailed as error:
            woken.append(str(error))
            raise

    before = threading.active_count()
    with pytest.raises(KeyError, match="lost") as caught:
        on_threads(4, program)
    assert any("device 2" in note for note in caught.value.__notes__)
    assert len(woken) == 3
    assert all("device 2 failed: KeyError" in text for text in woken)
    assert threading.active_count() == before


def test_waiting_for_what_nobody_sends_is_a_deadlock_not_a_hang():
    def program(comm, rank):
        if rank:
            comm.recv(rank)

    before = threading.active_count()
    with pytest.raises(Deadlock, match=r"still runs \(1, 2\) waits"):
        on_threads(3, program)
    assert threading.active_count() == before


def test_early_arrivals_live_as_long_as_their_communicator():
    comm = worlds.BareCommunicator(3)
    first, second = mailbox_of(comm, 0), mailbox_of(comm, 0)
    comm.send(1, 0, np.array(1))
    comm.send(2, 0, np.array(2))
    assert int(first.recv(2)) == 2  # 1 may have come early, in the mailbox of the first product
    assert int(second.recv(1)) == 1
    other = worlds.BareCommunicator(3)
    other.send(1, 0, np.array(7))
    assert int(mailbox_of(other, 0).recv(1)) == 7


class Slotted:
    """Can be neither hashed nor referred to weakly."""

    __hash__ = None
    __slots__ = ("inner", "num_devices")

    def __init__(self, num_devices):
        self.inner, self.num_devices = worlds.BareCommunicator(num_devices), num_devices

    def __eq__(self, other):
        return True

    def send(self, src, dst, data):
        self.inner.send(src, dst, data)

    def recv(self, dst):
        return self.inner.recv(dst)


def test_any_object_with_the_two_methods_will_do():
    comms = [Slotted(2), Slotted(2)]
    for number, comm in enumerate(comms):
        comm.send(1, 0, np.array(number))
    assert [int(mailbox_of(comm, 0).recv(1)) for comm in comms] == [0, 1]


# ---- MPI only ----


@pytest.mark.mpi(min_size=2)
def test_on_mpi_a_rank_speaks_for_itself_only(mpi_comm):
    def program(comm, rank):
        other = (rank + 1) % comm.num_devices
        with pytest.raises(ValueError, match=f"src is {other}, expected {rank}"):
            comm.send(other, rank, np.zeros(1))
        with pytest.raises(ValueError, match=f"dst is {other}, expected {rank}"):
            comm.recv(other)

    worlds.mpi(mpi_comm).run(program)


@pytest.mark.mpi
def test_messages_of_the_user_never_mix_with_ours(mpi_comm):
    from mpi4py import MPI

    users = np.zeros(1, np.int64)
    pending = mpi_comm.Irecv(users, MPI.ANY_SOURCE, MPI.ANY_TAG)

    def program(comm, rank):
        ahead, _ = neighbours(comm, rank)
        comm.send(rank, ahead, np.array([5, 6, 7]))
        assert comm.recv(rank)[1].tolist() == [5, 6, 7]

    worlds.mpi(mpi_comm).run(program)
    assert not pending.Test()
    mpi_comm.Barrier()  # nobody sends what is awaited before all have looked
    sent = mpi_comm.Isend(np.array([42]), (mpi_comm.rank + 1) % mpi_comm.size, 7)
    pending.Wait()
    sent.Wait()
    assert users.tolist() == [42]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("shape", "dtype"), [((2**31 + 16,), np.uint8), ((2**28 + 2,), np.float64)])
def test_one_message_above_two_gib(mpi_comm, shape, dtype):
    if mpi_comm.size > 2:
        pytest.skip("two ranks are enough, and the memory of more is not certain")

    def program(comm, rank):
        if rank == 0:
            data = np.zeros(shape, dtype)
            data[[0, -1]] = 7
            comm.send(0, 1, data)
        else:
            _, data = comm.recv(1)
            assert data.shape == shape
            assert data.dtype == dtype
            assert data[[0, 1, -2, -1]].tolist() == [7, 0, 0, 7]

    worlds.mpi(mpi_comm).run(program)


@pytest.mark.mpi(min_size=2)
def test_a_message_larger_than_its_place_harms_nothing(mpi_comm):
    """It is an error, no byte of it goes elsewhere, and the next message is the next message."""

    def program(comm, rank):
        mailbox = mailbox_of(comm, rank)
        if rank == 0:
            mailbox.start_send(1, np.zeros((8, 1 << 18))).wait()
            mailbox.send(1, np.arange(5.0))
        elif rank == 1:
            place = np.ones((7, 1 << 18))
            with pytest.raises(RuntimeError, match="expected"):
                mailbox.start_recv(0, place).wait()
            assert (place == 1).all()
            assert mailbox.recv(0).tolist() == [0, 1, 2, 3, 4]

    worlds.mpi(mpi_comm).run(program)


@pytest.mark.mpi(min_size=2)
def test_hundreds_of_sends_are_finished_at_the_end(mpi_comm):
    """They are more than MPI keeps on the way by itself, and the receiver is late."""

    def program(comm, rank):
        ahead, behind = neighbours(comm, rank)
        for number in range(600):
            comm.send(rank, ahead, np.full(8200, number))
        time.sleep(0.1 * rank)
        for number in range(600):
            src, data = comm.recv(rank)
            assert (src, data[0], data[-1]) == (behind, number, number)

    def one_way(comm, rank):
        if rank == 0:
            for number in range(300):
                comm.send(0, 1, np.full(8200, number))
        mpi_comm.Barrier()
        if rank == 1:
            assert [int(comm.recv(1)[1][-1]) for _ in range(300)] == list(range(300))

    worlds.mpi(mpi_comm).run(program)
    worlds.mpi(mpi_comm).run(one_way)


@pytest.mark.mpi
def test_many_communicators_one_after_the_other(mpi_comm):
    for number in range(50):
        world = worlds.mpi(mpi_comm)

        def program(comm, rank, number=number):
            comm.send(rank, (rank + 1) % comm.num_devices, np.array(number))
            assert int(comm.recv(rank)[1]) == number

        world.run(program)
