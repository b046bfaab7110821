"""What keeps the transfers of one rank going, also while the rank multiplies.

Most MPI libraries move data only while somebody is inside a call of theirs. So a thread looks in now and then
while large transfers are under way: BLAS releases the GIL, and the thread sleeps in between. Each look takes
time from the product (the two share a core), so there are few, LONG_NAP apart, more while they bring
something, and many, SHORT_NAP apart, once the rank has waited for more than a WAITING_SHARE of its time: then
the network is slow, and needs somebody who is there.

The thread also starts what could not start yet, in order:

* To one rank at most IN_FLIGHT large pieces are on their way: sent all at once they would share the network,
  and all arrive together at the end, when the receiver has nothing left to do meanwhile.
* Arrays from one rank are let in one after the other: where a later one goes may not be known before.

Nothing here knows MPI: a request is an object whose ``Test()`` says whether it is finished.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

IN_FLIGHT = 2
OPEN = 4  # receives from one rank that are let in at a time
LARGE_BYTES = 64 << 10  # smaller pieces leave at once: libraries send them without asking the receiver
WATCHED_BYTES = 4 << 20  # what is under way in all, from where the thread looks in
SHORT_NAP, LONG_NAP = 1e-3, 2e-2  # seconds
WAITING_SHARE = 0.15
SPIN = 5e-5  # seconds for which a rank that waits keeps its core; none, where ranks share cores


class Request(Protocol):
    def Test(self) -> bool: ...


Piece = tuple[int, Callable[[], Request]]  # its size in bytes, and what starts it


class Incoming(Protocol):
    """A receive."""

    nbytes: int

    def let_in(self) -> bool:
        """Receive the data if its place is known; whether it is, so that the next may be let in."""
        ...

    def finished(self) -> bool: ...


class Outgoing:
    """A send, in pieces that leave in order."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.waiting = deque(pieces)
        self.nbytes = sum(size for size, _ in self.waiting)
        self._unfinished = len(self.waiting)

    def finished(self) -> bool:
        return not self._unfinished

    def piece_is_done(self) -> None:
        self._unfinished -= 1


class _Outbox:
    """What goes to one rank, in order."""

    def __init__(self, most_large: float) -> None:
        self._most_large = most_large
        self._queue: deque[Outgoing] = deque()  # those with pieces that have not left
        self._flying: deque[tuple[Request, int, Outgoing]] = deque()
        self._large = 0  # of those

    def add(self, send: Outgoing) -> int:
        """Start what may start; only the oldest is asked: to ask all at each send would be quadratic."""
        self._queue.append(send)
        done = 0
        while self._flying and self._flying[0][0].Test():
            done += self._landed(self._flying.popleft())
        self._launch()
        return done

    def advance(self) -> int:
        """Ask every piece; the bytes that are done.

        Every one: with MPICH 5.0, asking for one of many again and again does not move the others.
        """
        flying, done = deque[tuple[Request, int, Outgoing]](), 0
        for piece in self._flying:
            if piece[0].Test():
                done += self._landed(piece)
            else:
                flying.append(piece)
        self._flying = flying
        self._launch()
        return done

    def empty(self) -> bool:
        return not self._queue and not self._flying

    def _landed(self, piece: tuple[Request, int, Outgoing]) -> int:
        _, size, send = piece
        send.piece_is_done()
        self._large -= size >= LARGE_BYTES
        return size

    def _launch(self) -> None:
        while self._queue:
            send = self._queue[0]
            while send.waiting:
                size, start = send.waiting[0]
                large = size >= LARGE_BYTES
                if large and self._large >= self._most_large:
                    return
                send.waiting.popleft()
                self._flying.append((start(), size, send))
                self._large += large
            self._queue.popleft()


class Engine:
    """The sends and receives of one rank that are not finished."""

    def __init__(self, in_background: bool) -> None:
        """``in_background``: whether a thread may look in while another one is inside the MPI library."""
        self._lock = threading.RLock()
        self.spin = SPIN
        self._most_large = IN_FLIGHT if in_background else math.inf
        self._outboxes: dict[int, _Outbox] = {}
        self._receives: defaultdict[int, deque[Incoming]] = defaultdict(deque)
        self._under_way = 0
        self._in_background = in_background
        self._watch = threading.Event()
        self._thread: threading.Thread | None = None
        self._since, self._waited, self._network_is_slow = 0.0, 0.0, False  # of what is under way now
        self._ended = False
        self._failure: BaseException | None = None

    def start_send(self, dst: int, send: Outgoing) -> None:
        with self._lock:
            if dst not in self._outboxes:
                self._outboxes[dst] = _Outbox(self._most_large)
            self._under_way += send.nbytes - self._outboxes[dst].add(send)
            self._watch_if_large()

    def start_receive(self, src: int, receive: Incoming) -> None:
        with self._lock:
            queue = self._receives[src]
            queue.append(receive)
            self._under_way += receive.nbytes
            if len(queue) <= OPEN:
                _let_in(queue)
            self._watch_if_large()

    def wait(self, done: Callable[[], bool]) -> None:
        """Poll ``done``, and meanwhile keep everything else going: eagerly at first, then with short naps.

        Without the rest, ranks that all wait for their sends would never take what is sent to them. MPI's own
        waits keep a core busy, which another rank on this host may need for its product.
        """
        start = time.perf_counter()
        while not self._advance_and(done):
            waited = time.perf_counter() - start
            if waited > 1e-3:
                self._network_is_slow |= self._is_long(waited)
                time.sleep(min(waited / 20, 2e-4))
            elif waited > self.spin:
                os.sched_yield()
        self._waited += time.perf_counter() - start

    def _is_long(self, waited: float) -> bool:
        return self._waited + waited > WAITING_SHARE * (time.perf_counter() - self._since)

    def finish(self) -> None:
        """Wait until every send is finished, and end the thread."""
        self.wait(lambda: all(outbox.empty() for outbox in self._outboxes.values()))
        self._ended = True
        if self._thread is not None:
            self._watch.set()
            self._thread.join()

    def _watch_if_large(self) -> None:
        if self._under_way < WATCHED_BYTES or not self._in_background or self._watch.is_set():
            return
        self._since, self._waited, self._network_is_slow = time.perf_counter(), 0.0, False
        if self._thread is None:
            self._thread = threading.Thread(target=self._background, name="transfers", daemon=True)
            self._thread.start()
        self._watch.set()

    def _background(self) -> None:
        nap = SHORT_NAP
        while self._watch.wait() and not self._ended:
            time.sleep(nap)
            with self._lock:
                before = self._under_way
                try:
                    self._advance()
                except BaseException as error:
                    self._failure = error  # for the thread that waits
                    self._under_way = 0
                brought = self._under_way < before or self._network_is_slow
                nap = SHORT_NAP if brought else LONG_NAP
                if not self._under_way and not self._ended:
                    self._watch.clear()

    def _advance_and(self, done: Callable[[], bool]) -> bool:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._advance()
            return done()

    def _advance(self) -> None:
        for outbox in self._outboxes.values():
            self._under_way -= outbox.advance()
        for queue in self._receives.values():
            _let_in(queue)
            while queue and queue[0].finished():
                self._under_way -= queue.popleft().nbytes


def _let_in(queue: deque[Incoming]) -> None:
    """The oldest few, up to the first whose place is not known."""
    for receive in islice(queue, OPEN):
        if not receive.let_in():
            return
