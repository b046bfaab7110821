"""A pytest plugin: the ranks of one `mpirun -n P python -m pytest --with-mpi` act as one test session.

pytest knows nothing of its siblings on the other ranks. Left alone, a test that fails on one rank leaves the
others waiting for a message that never comes, each rank prints a report of its own, and all of them write the
same report file. With this plugin

- after each test the ranks agree on its outcome: it failed if it failed anywhere;
- a failing rank whose siblings do not arrive within GRACE_SECONDS prints its failure and ends the job;
- a test over its time limit prints where each rank hangs and ends the job;
- rank 0 alone reports: on the terminal, to files, and in the exit status that every rank returns.

Without --with-mpi it only refuses to call a session green whose MPI tests were all skipped, and mpi4py is not
imported.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

# How long a rank that failed waits for ranks that may be waiting for it.
GRACE_SECONDS = 5.0
# How long a rank that reached its time limit lets the others print where they are.
DUMP_SECONDS = 2.0
# The launcher's word on how many ranks it starts. A world of another size means that mpirun and the MPI that
# mpi4py loads do not belong together, so that each process believes to be alone.
EXPECTED_SIZE = "MPI_MATMUL_EXPECTED_RANKS"

HOW_TO_RUN = (
    "run them with `mpirun -n 4 python -m pytest --with-mpi -m mpi`, or leave them out with -m 'not mpi'"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("mpi_grace", "seconds a failed rank waits for the others", default=str(GRACE_SECONDS))


# Before pytest_configure, where the writer of the report file is made: that file belongs to rank 0.
@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    config.pluginmanager.register(SkippedIsNotGreen(config), "mpi-skipped-is-not-green")
    if config.getoption("--with-mpi") or config.getoption("--only-mpi"):
        config.pluginmanager.register(MpiSession(config), "mpi-session")


@pytest.fixture
def mpi_comm(request: pytest.FixtureRequest) -> Any:
    """A communicator of all ranks that this test has for itself."""
    session = request.config.pluginmanager.get_plugin("mpi-session")
    if session is None or session.test_comm is None:
        pytest.fail("mpi_comm is for tests marked mpi that run with --with-mpi under mpirun")
    return session.test_comm


class SkippedIsNotGreen:
    """A session that selected MPI tests and ran none of them has failed."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.selected = 0
        self.ran = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.selected = sum(is_mpi_test(item) for item in session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        skipped = report.skipped and not hasattr(report, "wasxfail")
        if "mpi" in report.keywords and not skipped and (report.when == "call" or report.failed):
            self.ran += 1

    # Around everything else, so that the line comes after pytest's own summary.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        none_ran = self.selected > 0 and self.ran == 0 and not self.config.option.collectonly
        if none_ran and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        yield
        if none_ran:
            reporter = self.config.pluginmanager.get_plugin("terminalreporter")
            reporter.write_line(self.closing_line(), red=True, bold=True)

    def closing_line(self) -> str:
        mpi_session = self.config.pluginmanager.get_plugin("mpi-session")
        if mpi_session is None:
            return f"FAILED: {self.selected} tests marked mpi were selected and none ran: {HOW_TO_RUN}"
        size = mpi_session.size
        return (
            f"FAILED: {self.selected} tests marked mpi were selected and none ran on {size} rank(s): "
            "use a higher -n, or select other tests"
        )


def is_mpi_test(item: pytest.Item) -> bool:
    return item.get_closest_marker("mpi") is not None


class Outcome(NamedTuple):
    """What one rank tells the others when it comes to a meeting point."""

    place: str
    failed: bool = False
    skipped: bool = False
    text: str = ""
    reason: str = ""


class MpiSession:
    """This rank's part in the common session."""

    def __init__(self, config: pytest.Config) -> None:
        from mpi4py import MPI

        self.config = config
        # Ours alone: no message of a test, sent or forgotten, can be taken for one of these.
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.check_size()
        # The real stderr; during a test pytest puts a file in its place.
        self.stderr = os.dup(2)
        self.test_comm: Any = None
        # Where this rank waits for the others, with what it has to tell.
        self.waiting: Outcome | None = None
        self.collect_errors: list[str] = []
        self.timer: threading.Timer | None = None
        self.prepare_report_file()

    def check_size(self) -> None:
        expected = os.environ.get(EXPECTED_SIZE)
        if expected is not None and int(expected) != self.size:
            raise pytest.UsageError(
                f"mpirun starts {expected} ranks, but MPI here knows of {self.size}: "
                "mpirun and the MPI library that mpi4py loads are of different makers"
            )

    def prepare_report_file(self) -> None:
        xmlpath = self.config.option.xmlpath
        if self.rank > 0:
            self.config.option.xmlpath = None
        elif xmlpath:
            # A job that is ended early writes none, and an older one would tell of another session.
            Path(xmlpath).unlink(missing_ok=True)

    # After the terminal reporter has been made.
    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        if self.rank > 0:
            silence_terminal(config)
            silence_cache(config)

    # ---------------------------------------------------------------- meeting the other ranks

    def meet(self, outcome: Outcome, patience: float | None = None) -> list[Outcome]:
        """Wait for all ranks to come to this place and return their outcomes, in rank order.

        Ranks share cores, so waiting means sleeping. A rank that waits longer than `patience` ends the job.
        """
        self.waiting = outcome
        arrival = self.comm.Ibarrier()
        start, pause = time.monotonic(), 0.0002
        while not arrival.Test():
            if patience is not None and time.monotonic() - start > patience:
                self.abort(
                    f"{outcome.place}\n{outcome.text}\nthe other ranks did not follow for {patience:g} s"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, 0.01)
        outcomes = self.comm.allgather(outcome)
        self.waiting = None
        self.check_same_place(outcomes)
        return outcomes

    def check_same_place(self, outcomes: list[Outcome]) -> None:
        if len({outcome.place for outcome in outcomes}) == 1:
            return
        # All ranks see this at once; one tells it, and the others wait to be ended.
        if self.rank == 0:
            lines = [f"rank {rank} is at {one.place}\n{one.text}" for rank, one in enumerate(outcomes)]
            self.abort("the ranks do not run the same tests:\n" + "\n".join(lines))
        time.sleep(60)

    def abort(self, text: str) -> None:
        """Print why, where nothing can swallow it, and end the job on all ranks."""
        self.tell(text)
        # Time for the text to pass through mpirun, which is about to end.
        time.sleep(0.3)
        self.comm.Abort(1)

    def tell(self, text: str) -> None:
        title = f" rank {self.rank} of {self.size} "
        data = f"\n{title:=^80}\n{text.rstrip()}\n".encode(errors="backslashreplace")
        while data:
            data = data[os.write(self.stderr, data) :]

    # ---------------------------------------------------------------- collection

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.collect_errors.append(report.longreprtext)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out unmarked tests: they are for one process, and may start an mpirun themselves."""
        others = [item for item in items if not is_mpi_test(item)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if is_mpi_test(item)]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        errors = "\n".join(self.collect_errors)
        place = "collection of " + " ".join(item.nodeid for item in session.items)
        outcomes = self.meet(Outcome(place, failed=bool(errors), text=errors), patience=60)
        # An error on all ranks is rank 0's to report; one elsewhere would go unseen.
        if errors and not outcomes[0].failed:
            self.abort(f"collection failed\n{errors}")
        if any(outcome.failed for outcome in outcomes) and not outcomes[0].failed:
            time.sleep(60)

    # ---------------------------------------------------------------- one test

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        # For every test, and not by the fixture: a rank that skips the test must take part all the same.
        self.test_comm = self.comm.Dup()
        try:
            return (yield)
        finally:
            self.test_comm.Free()
            self.test_comm = None

    # Outermost, to see the report as all other plugins left it.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        # Each rank meets the others twice a test: with the outcome (the setup's, where that was the end), and
        # when all is cleaned up.
        if report.when != "setup" or not report.passed:
            place = f"{item.nodeid} ({'teardown' if report.when == 'teardown' else 'outcome'})"
            self.agree(report, place)
        return report

    def agree(self, report: pytest.TestReport, place: str) -> None:
        """Make the report say what happened on all ranks."""
        text, reason = (report_text(report), report_reason(report)) if report.failed else ("", "")
        mine = Outcome(place, report.failed, report.skipped, text, reason)
        outcomes = self.meet(mine, patience=self.grace() if report.failed else None)
        if not any(outcome.failed for outcome in outcomes):
            return
        elsewhere = failures_elsewhere(outcomes, mine)
        if not report.failed:
            report.outcome = "failed"
            report.longrepr = "\n".join(f"{title}\n{text}" for title, text in elsewhere)
            # The mark of an expected failure would turn this one into a success.
            with contextlib.suppress(AttributeError):
                del report.wasxfail
        else:
            report.sections += elsewhere

    def grace(self) -> float:
        return float(self.config.getini("mpi_grace"))

    # ---------------------------------------------------------------- time limit

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool:
        """Replace pytest-timeout's own timers: they write to the terminal, which is mute on most ranks."""
        self.timer = threading.Timer(settings.timeout, self.on_time_limit, (item.nodeid, settings.timeout))
        self.timer.daemon = True
        self.timer.start()
        # The net below: C code that holds Python's lock stops the timer thread too, but not this.
        reserve = settings.timeout + 5 * DUMP_SECONDS
        faulthandler.dump_traceback_later(reserve, exit=True, file=self.stderr)
        return True

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> bool:
        faulthandler.cancel_dump_traceback_later()
        if self.timer is not None:
            self.timer.cancel()
        return True

    def on_time_limit(self, nodeid: str, limit: float) -> None:
        if self.waiting is None:
            here = stack_of_test()
        else:
            here = f"waiting for the other ranks in {self.waiting.place}\n{self.waiting.text}"
        self.tell(f"{nodeid} still runs after {limit:g} s, and is here:\n{here}")
        time.sleep(DUMP_SECONDS)
        self.comm.Abort(1)

    # ---------------------------------------------------------------- the end

    def pytest_internalerror(self, excrepr: Any) -> None:
        if self.rank > 0:
            self.tell(f"INTERNAL ERROR\n{excrepr}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        status = int(session.exitstatus)
        outcomes = self.meet(Outcome("end of session", text=str(status)), patience=30)
        session.exitstatus = max(int(outcome.text) for outcome in outcomes)

    def pytest_unconfigure(self) -> None:
        self.comm.Free()
        os.close(self.stderr)


def silence_terminal(config: pytest.Config) -> None:
    """Put a reporter that writes nowhere in the place of the terminal's."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    config.pluginmanager.unregister(reporter)
    mute = type(reporter)(config, open(os.devnull, "w"))  # noqa: SIM115 (open as long as the session)
    config.pluginmanager.register(mute, "terminalreporter")


def silence_cache(config: pytest.Config) -> None:
    """Keep ranks from writing the same cache files at once."""
    if hasattr(config, "cache"):
        config.cache.set = lambda key, value: None


def stack_of_test() -> str:
    """Where the main thread is, from the test's own code inwards."""
    stack = traceback.extract_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    machinery = [
        i for i, frame in enumerate(stack) if {"_pytest", "pluggy"} & set(Path(frame.filename).parts)
    ]
    start = machinery[-1] + 1 if machinery else 0
    return "".join(traceback.format_list(stack[start:] or stack))


def report_text(report: pytest.TestReport) -> str:
    """The failure as pytest would print it, and what the test had printed."""
    captured = [f"--- {title}\n{text}" for title, text in report.sections if text]
    return "\n".join([report.longreprtext, *captured])


def report_reason(report: pytest.TestReport) -> str:
    """The first line of the error, where pytest knows it."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message.partition("\n")[0] if crash else "see below"


def failures_elsewhere(outcomes: list[Outcome], mine: Outcome) -> list[tuple[str, str]]:
    """(title, text) of each failure that is not mine; ranks with the same one share a title."""
    ranks_of: dict[Outcome, list[str]] = {}
    for rank, outcome in enumerate(outcomes):
        if outcome.failed and outcome.text != mine.text:
            ranks_of.setdefault(outcome, []).append(str(rank))
    return [(f"failed on rank {', '.join(ranks)}: {one.reason}", one.text) for one, ranks in ranks_of.items()]
