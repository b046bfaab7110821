"""What keeps transfers going, by requests that finish when the test says so."""

from __future__ import annotations

import threading
import time

import pytest

from mpi_matmul.comm import engine as engine_module
from mpi_matmul.comm.engine import IN_FLIGHT, LARGE_BYTES, OPEN, WATCHED_BYTES, Engine, Outgoing

PATIENCE = 10  # seconds, until something that should happen counts as a hang


class Request:
    """Finished when ``done`` is set, or once it was asked ``asks`` times."""

    def __init__(self, asks=None):
        self.done, self.asks, self.asked = False, asks, 0
        self._inside = threading.Lock()

    def Test(self):
        assert self._inside.acquire(blocking=False), "two threads are inside the library"
        self.asked += 1
        time.sleep(0)  # another thread may come
        self.done = self.done or self.asked == self.asks
        self._inside.release()
        return self.done


class Sends:
    """Makes sends of pieces of given sizes; ``started`` are the numbers of the pieces that left, in order."""

    def __init__(self, asks=None):
        self.requests, self.started, self._asks = [], [], asks

    def send(self, *sizes):
        return Outgoing([(size, self._starter(Request(self._asks))) for size in sizes])

    def _starter(self, request):
        number = len(self.requests)
        self.requests.append(request)

        def start():
            self.started.append(number)
            return request

        return start

    def finish(self, *numbers):
        for number in numbers:
            self.requests[number].done = True


class Receive:
    """Can be let in when ``known`` is set, then finished when ``done`` is set; ``log`` has the order."""

    def __init__(self, log=None, name=None, nbytes=8, known=True):
        self.log, self.name, self.nbytes, self.known = [] if log is None else log, name, nbytes, known
        self.done = self.is_in = False

    def let_in(self):
        if self.known and not self.is_in:
            self.is_in = True
            self.log.append(self.name)
        return self.is_in

    def finished(self):
        return self.is_in and self.done


def look_in(engine):
    engine.wait(lambda: True)


def eventually(holds):
    """Wait until it holds; meanwhile nobody but the thread looks in."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "it does not come to pass"
        time.sleep(1e-3)


def in_time(*actions):
    """Run the actions side by side; a hang and an exception are failures here."""
    failures = []

    def run(action):
        try:
            action()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(action,), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "it hangs"
    if failures:
        raise failures[0]


@pytest.fixture
def engine():
    return Engine(in_background=True)


LARGE, SMALL = LARGE_BYTES, LARGE_BYTES - 1


# ---- sends ----


def test_to_one_rank_few_large_pieces_are_on_their_way(engine):
    sends = Sends()
    engine.start_send(1, sends.send(*[LARGE] * 6))
    assert sends.started == list(range(IN_FLIGHT))
    for finished in range(6):
        sends.finish(finished)
        look_in(engine)
        assert sends.started == list(range(min(6, finished + 1 + IN_FLIGHT)))


def test_the_limit_holds_for_all_sends_to_a_rank_together(engine):
    sends = Sends()
    for _ in range(5):
        engine.start_send(1, sends.send(LARGE))
    assert sends.started == list(range(IN_FLIGHT))


def test_each_rank_has_a_limit_of_its_own(engine):
    sends = Sends()
    for dst in (1, 2, 3):
        engine.start_send(dst, sends.send(*[LARGE] * 3))
    assert len(sends.started) == 3 * IN_FLIGHT


def test_whichever_piece_is_done_the_next_starts(engine):
    sends = Sends()
    engine.start_send(1, sends.send(*[LARGE] * 6))
    sends.finish(IN_FLIGHT - 1)  # the latest
    look_in(engine)
    assert sends.started == list(range(IN_FLIGHT + 1))
    sends.finish(*sends.started)
    look_in(engine)
    assert sends.started == list(range(min(6, 2 * IN_FLIGHT + 1)))


def test_every_piece_on_its_way_is_asked_at_each_look(engine):
    sends = Sends()
    engine.start_send(1, sends.send(*[SMALL] * 5))
    before = [request.asked for request in sends.requests]
    look_in(engine)
    assert [request.asked for request in sends.requests] == [asked + 1 for asked in before]


def test_a_finished_piece_is_not_asked_again(engine):
    sends = Sends()
    engine.start_send(1, sends.send(*[SMALL] * 3))
    sends.finish(1)
    look_in(engine)
    asked = sends.requests[1].asked
    look_in(engine)
    assert sends.requests[1].asked == asked


def test_small_pieces_leave_at_once(engine):
    sends = Sends()
    engine.start_send(1, sends.send(*[SMALL] * 20))
    assert sends.started == list(range(20))


def test_small_pieces_leave_while_large_ones_are_on_their_way(engine):
    sends = Sends()
    engine.start_send(1, sends.send(*[LARGE] * IN_FLIGHT))
    engine.start_send(1, sends.send(SMALL, SMALL))
    assert sends.started == list(range(IN_FLIGHT + 2))


def test_a_small_piece_that_is_done_makes_no_room_for_a_large_one(engine):
    sends = Sends()
    engine.start_send(1, sends.send(SMALL, *[LARGE] * (IN_FLIGHT + 1)))
    sends.finish(0)
    look_in(engine)
    assert sends.started == list(range(1 + IN_FLIGHT))


def test_a_small_piece_does_not_overtake_a_large_one_that_waits(engine):
    sends = Sends()
    engine.start_send(1, sends.send(*[LARGE] * (IN_FLIGHT + 1)))
    engine.start_send(1, sends.send(SMALL, LARGE))
    assert sends.started == list(range(IN_FLIGHT))
    sends.finish(0)
    look_in(engine)
    assert sends.started == list(range(IN_FLIGHT + 2))


def test_a_new_send_lets_the_next_piece_start_if_the_oldest_is_done(engine):
    sends = Sends()
    engine.start_send(1, sends.send(*[LARGE] * (IN_FLIGHT + 1)))
    sends.finish(0)
    engine.start_send(1, sends.send(SMALL))
    assert sends.started == list(range(IN_FLIGHT + 2))


def test_a_send_is_finished_when_all_its_pieces_are(engine):
    sends = Sends()
    send = sends.send(SMALL, LARGE, SMALL)
    assert send.nbytes == 2 * SMALL + LARGE
    engine.start_send(1, send)
    for number in (2, 0, 1):
        look_in(engine)
        assert not send.finished()
        sends.finish(number)
    look_in(engine)
    assert send.finished()


def test_a_send_of_no_pieces_is_finished(engine):
    send = Outgoing([])
    engine.start_send(1, send)
    assert send.finished()
    in_time(engine.finish)


def test_without_a_thread_all_pieces_leave_at_once():
    """Nobody would start the others while the rank multiplies."""
    sends, engine = Sends(), Engine(in_background=False)
    engine.start_send(1, sends.send(*[WATCHED_BYTES] * 20))
    assert sends.started == list(range(20))
    assert engine._thread is None


# ---- receives ----


def receives(log, *known):
    return [Receive(log, number, known=is_known) for number, is_known in enumerate(known)]


def test_few_receives_from_one_rank_are_open(engine):
    log = []
    started = receives(log, *[True] * (OPEN + 3))
    for receive in started:
        engine.start_receive(1, receive)
    assert log == list(range(OPEN))
    started[0].done = True
    look_in(engine)
    look_in(engine)
    assert log == list(range(OPEN + 1))


def test_receives_from_several_ranks_do_not_wait_for_one_another(engine):
    log = []
    for src in (1, 2, 3):
        for number in range(OPEN):
            engine.start_receive(src, Receive(log, (src, number)))
    assert log == [(src, number) for src in (1, 2, 3) for number in range(OPEN)]


def test_a_receive_whose_place_is_not_known_holds_up_the_later_ones(engine):
    log = []
    started = receives(log, True, False, True)
    for receive in started:
        engine.start_receive(1, receive)
    look_in(engine)
    assert log == [0]
    started[1].known = True
    look_in(engine)
    assert log == [0, 1, 2]


def test_a_receive_whose_place_is_known_does_not_let_in_the_next_before_its_turn(engine):
    log = []
    started = receives(log, False, True, True, True)
    for receive in started:
        engine.start_receive(1, receive)
    assert log == []
    started[0].known = True
    look_in(engine)
    assert log == [0, 1, 2, 3]


def test_receives_finish_in_order(engine):
    log = []
    started = receives(log, *[True] * (OPEN + 2))
    for receive in started:
        engine.start_receive(1, receive)
    for receive in started[1:]:
        receive.done = True
    look_in(engine)
    look_in(engine)
    assert log == list(range(OPEN))
    started[0].done = True
    look_in(engine)
    look_in(engine)
    assert log == list(range(OPEN + 2))


# ---- the thread ----


def is_asleep(engine):
    return not engine._watch.is_set()


def test_little_needs_no_thread(engine):
    sends = Sends()
    engine.start_send(1, sends.send(WATCHED_BYTES - 9))
    engine.start_receive(1, Receive())
    assert engine._thread is None


ENOUGH = {
    "one send": ([WATCHED_BYTES], 0),
    "many pieces": ([WATCHED_BYTES // 16] * 16, 0),
    "with what is received": ([WATCHED_BYTES // 2], WATCHED_BYTES // 2),
}


@pytest.mark.parametrize(("sizes", "received"), ENOUGH.values(), ids=ENOUGH)
def test_transfers_go_on_while_the_rank_is_away(engine, sizes, received):
    sends, receive = Sends(asks=3), Receive(nbytes=received)
    send = sends.send(*sizes)
    engine.start_receive(1, receive)
    engine.start_send(1, send)
    receive.done = True
    eventually(send.finished)
    assert sends.started == list(range(len(sizes)))
    eventually(lambda: is_asleep(engine))
    in_time(engine.finish)


def test_the_thread_lets_receives_in_while_the_rank_is_away(engine):
    log = []
    started = [Receive(log, number, nbytes=WATCHED_BYTES, known=False) for number in range(OPEN + 3)]
    for receive in started:
        receive.done = True
        engine.start_receive(1, receive)
    assert log == []
    for receive in started:
        receive.known = True
    eventually(lambda: log == list(range(OPEN + 3)))
    eventually(lambda: is_asleep(engine))
    in_time(engine.finish)


def test_the_thread_sleeps_until_there_is_something_again(engine):
    sends = Sends(asks=2)
    for _ in range(3):
        send = sends.send(WATCHED_BYTES)
        engine.start_send(1, send)
        thread = engine._thread
        eventually(send.finished)
        eventually(lambda: is_asleep(engine))
        assert engine._thread is thread
        assert thread.is_alive()
    in_time(engine.finish)


def test_the_thread_is_awake_while_anything_is_under_way(engine):
    sends = Sends()
    engine.start_send(1, sends.send(WATCHED_BYTES, SMALL))
    sends.finish(0)
    asked = sends.requests[1].asked
    eventually(lambda: sends.requests[1].asked > asked + 3)
    assert not is_asleep(engine)
    sends.finish(1)
    eventually(lambda: is_asleep(engine))
    in_time(engine.finish)


def test_the_rank_and_the_thread_are_never_inside_at_once(engine, monkeypatch):
    monkeypatch.setattr(engine_module, "SHORT_NAP", 1e-5)
    monkeypatch.setattr(engine_module, "LONG_NAP", 1e-5)
    sends = Sends(asks=40)
    send = sends.send(*[WATCHED_BYTES] * 8)
    engine.start_send(1, send)
    in_time(lambda: engine.wait(send.finished))
    in_time(engine.finish)


class Lost(Exception):
    pass


class LostInTheThread(Request):
    """Fails where nobody sees it."""

    def Test(self):
        if threading.current_thread().name == "transfers":
            raise Lost("the network has gone")
        return False


def test_what_goes_wrong_in_the_thread_is_raised_where_the_rank_waits(engine):
    engine.start_send(1, Outgoing([(WATCHED_BYTES, LostInTheThread)]))
    with pytest.raises(Lost, match="the network has gone"):
        in_time(lambda: engine.wait(lambda: False))
    with pytest.raises(Lost):
        in_time(engine.finish)
    eventually(lambda: is_asleep(engine))


def test_what_goes_wrong_while_the_rank_waits_is_raised_there(engine):
    class LostAtOnce(Request):
        def Test(self):
            raise Lost

    engine.start_send(1, Outgoing([(SMALL, LostAtOnce)]))
    with pytest.raises(Lost):
        in_time(lambda: engine.wait(lambda: False))


# ---- waiting ----


def test_wait_asks_until_it_is_done(engine):
    answers = iter([False] * 30 + [True])
    in_time(lambda: engine.wait(lambda: next(answers)))
    assert next(answers, None) is None


def test_a_wait_for_one_send_moves_the_others(engine):
    """Those to another rank, and those that have not started yet."""
    sends = Sends(asks=3)
    others = [sends.send(*[LARGE] * 7), sends.send(*[SMALL] * 7)]
    for dst, send in enumerate(others):
        engine.start_send(dst, send)
    in_time(lambda: engine.wait(lambda: all(send.finished() for send in others)))


class Link:
    """From one rank to another: a send is finished when it has been let in over there."""

    def __init__(self, asks):
        self.nbytes, self.is_in, self._asks = LARGE, False, asks

    def Test(self):
        return self.is_in

    def let_in(self):
        self._asks -= 1
        self.is_in = self._asks < 0
        return self.is_in

    def finished(self):
        return self.is_in


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_ranks_that_all_wait_for_their_sends_take_what_is_sent_to_them(world_size, in_background):
    links = [Link(asks=20) for _ in range(world_size)]

    def rank(number):
        engine, ahead, behind = Engine(in_background), links[number], links[number - 1]
        engine.start_receive(0, behind)
        send = Outgoing([(LARGE, lambda: ahead)])
        engine.start_send(1, send)
        engine.wait(send.finished)
        engine.wait(behind.finished)
        engine.finish()

    in_time(*(lambda number=number: rank(number) for number in range(world_size)))
    assert all(link.is_in for link in links)


# ---- the end ----


@pytest.mark.parametrize("size", [SMALL, LARGE, WATCHED_BYTES])
@pytest.mark.parametrize("in_background", [True, False])
def test_finish_waits_for_every_send_and_ends_the_thread(size, in_background):
    sends, engine = Sends(asks=5), Engine(in_background)
    started = [sends.send(*[size] * 4) for _ in range(3)]
    for dst, send in enumerate(started):
        engine.start_send(dst, send)
    assert (engine._thread is not None) == (in_background and 12 * size >= WATCHED_BYTES)
    in_time(engine.finish)
    assert all(send.finished() for send in started)
    assert engine._thread is None or not engine._thread.is_alive()


def test_finish_ends_a_thread_that_sleeps(engine):
    engine.start_send(1, Sends(asks=1).send(WATCHED_BYTES))
    eventually(lambda: is_asleep(engine))
    assert engine._thread.is_alive()
    in_time(engine.finish)
    assert not engine._thread.is_alive()


def test_finish_ends_a_thread_that_watches_a_receive_of_nobody(engine):
    engine.start_receive(1, Receive(nbytes=WATCHED_BYTES))
    assert not is_asleep(engine)
    in_time(engine.finish)
    assert not engine._thread.is_alive()


def test_finish_when_nothing_was_sent(engine):
    in_time(engine.finish)
