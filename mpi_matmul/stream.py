"""What a kernel hears of rows of a that are still on their way, and says of rows of c that are final."""

from __future__ import annotations

from collections.abc import Iterator


class Stream:
    """This one: all rows of a are there, and nobody waits for c."""

    def panels(self, rows: int) -> Iterator[slice]:
        """All ``rows`` of a_shard, in the panels in which they come; asked for once, at the start."""
        yield slice(0, rows)

    def finished(self, stop: int) -> None:
        """The rows of c_shard before ``stop`` are final: they may leave."""


ALL_HERE = Stream()
