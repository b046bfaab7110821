"""How shards of b are cut into the blocks that travel: one rule, of integers alone.

A block is ``rows`` of k by the columns (or a tile of the columns) of one rank's shard.

* A block is about BLOCK_BYTES, and what is multiplied at once PANEL_BYTES: small enough that the first comes
  soon and that few megabytes are on the way, large enough that a message costs little beside its product.
* But about LEAST_ROWS rows at least: with each block all of c is read and written once more, and BLAS is
  slower with fewer rows. So that the two go together, a shard whose rows are long is first cut into tiles.
* What does not fill a block stays whole: a small product is one block a rank, as if nothing had been cut.
* float16 is not cut along k: numpy adds it up in float32, and partial sums may be too large for float16.

On the receiver blocks of several ranks may be laid side by side and be multiplied at once, because BLAS is
slow with few columns of b: it prepares a anew each time. Copying a block of b costs as much as preparing as
many numbers of a, so it pays when b has fewer columns than a has rows; and always below LEAST_COLUMNS.

>>> [step.rows for step in Cut(k=4096, n=4096, itemsize=8, world_size=2).steps][:2]
[slice(0, 256, None), slice(256, 512, None)]
>>> [step.rows for step in Cut(k=512, n=512, itemsize=8, world_size=2).steps]
[slice(0, 512, None)]
>>> together(65536, Cut(k=512, n=512, itemsize=8, world_size=2), rank=1)
[[1, 0]]
>>> together(4096, Cut(k=4096, n=4096, itemsize=8, world_size=2), rank=1)
[[1], [0]]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from mpi_matmul.layout import Shape, block_range, length

BLOCK_BYTES = 4 << 20
PANEL_BYTES = 8 << 20
BLOCKS = (
    8  # so many at least, if that leaves them half of BLOCK_BYTES: after the last one comes only its product
)
LEAST_ROWS = 256
LEAST_COLUMNS = 256
GOOD_COLUMNS = 2048  # from here on BLAS gains nothing by more
MOST_BLOCKS = 64  # of a shard, where the width of the others is not known
WINDOW = 3  # blocks on their way to a rank, besides the one that is multiplied

# Of sums that travel (see `mpi_matmul.tiles`).
SUM_BYTES = 8 << 20
LEAST_SUM_ROWS = 64  # with fewer rows BLAS prepares b for too little
SUM_WINDOW = 2
GOOD_ROWS = 2048  # of a tile of a


@dataclass(frozen=True)
class Step:
    """One block of every rank: ``rows`` of k, and which tile of the columns of each shard."""

    rows: slice
    tile: int


class Cut:
    """How every rank's shard of b (k, n / world_size) is cut; the same on every rank."""

    def __init__(self, k: int, n: int, itemsize: int, world_size: int, split_k: bool = True) -> None:
        self.n, self.itemsize, self.world_size = n, itemsize, world_size
        widest = max(1, -(-n // world_size))
        least_rows = min(k, LEAST_ROWS) if split_k else k
        least_bytes = widest * least_rows * itemsize
        self.tiles = 1 if least_bytes <= 2 * BLOCK_BYTES else min(widest, -(-least_bytes // BLOCK_BYTES))
        block_row = -(-widest // self.tiles) * itemsize
        panel_row = min(n, GOOD_COLUMNS) * itemsize if self.tiles == 1 else 0
        number = max(-(-k * block_row // BLOCK_BYTES), -(-k * panel_row // PANEL_BYTES))
        number = max(number, min(BLOCKS, 2 * k * block_row // BLOCK_BYTES))
        # No block of twice the size, for the sake of memory, whatever becomes of its rows.
        least = max(-(-k * block_row // (2 * BLOCK_BYTES)), -(-k * panel_row // (2 * PANEL_BYTES)))
        self._k, self._number = k, number_of_blocks(k, number, least) if split_k else 1

    @cached_property
    def steps(self) -> list[Step]:
        rows = [slice(*block_range(self._k, self._number, index)) for index in range(self._number)]
        return [Step(part, tile) for tile in range(self.tiles) for part in rows]

    @property
    def number_of_steps(self) -> int:
        return self.tiles * self._number

    def columns(self, owners: list[int], step: Step) -> slice:
        """The columns of c (and of the whole b) to which the blocks of these neighbours belong."""
        parts = [self._columns_of(owner, step.tile) for owner in (min(owners), max(owners))]
        return slice(parts[0].start, parts[1].stop)

    def part(self, owner: int, step: Step) -> tuple[slice, slice]:
        """Where the block of ``owner`` lies in its shard."""
        first, columns = self._columns_of(owner, 0).start, self._columns_of(owner, step.tile)
        return step.rows, slice(columns.start - first, columns.stop - first)

    def shape(self, number: int, owner: int) -> Shape:
        """The shape of the block of ``owner`` at step ``number``."""
        tile, rows = divmod(number, self._number)
        return length(slice(*block_range(self._k, self._number, rows))), length(self._columns_of(owner, tile))

    @property
    def largest_block(self) -> int:
        """The most items of a block that is received; none, if nothing is."""
        return math.prod(self.shape(0, 0)) if self.world_size > 1 else 0

    def largest_panel(self, groups: list[list[int]]) -> Shape:
        """The shape in which the blocks of every group of more than one have room."""
        widths = [length(self.columns(owners, self.steps[0])) for owners in groups if len(owners) > 1]
        return length(self.steps[0].rows), max(widths, default=0)

    def bytes_in_flight(self) -> int:
        """At most so much memory do the blocks of one rank take: on their way, side by side, and packed."""
        block = math.prod(self.shape(0, 0)) * self.itemsize
        rows, columns = self.shape(0, 0)
        panel = rows * min(self.n, GOOD_COLUMNS + columns) * self.itemsize if columns < GOOD_COLUMNS else 0
        packed = block if self.tiles > 1 else 0
        return (WINDOW + 1) * (block + packed) + panel if self.world_size > 1 else 0

    def _columns_of(self, owner: int, tile: int) -> slice:
        start, stop = block_range(self.n, self.world_size, owner)
        return slice(*(start + end for end in block_range(stop - start, self.tiles, tile)))


def row_blocks(k: int, number: int, least: int = 1) -> list[slice]:
    """The rows of k in so many ranges, see `number_of_blocks`."""
    number = number_of_blocks(k, number, least)
    return [slice(*block_range(k, number, index)) for index in range(number)]


def number_of_blocks(k: int, number: int, least: int = 1) -> int:
    """``number``, or fewer, each of about LEAST_ROWS of the k rows, but ``least``; one, if k is 0."""
    return max(1, min(max(least, min(number, round(k / LEAST_ROWS))), k))


def ring_order(world_size: int, rank: int) -> list[int]:
    """The owners of the blocks, in the order in which they come round the ring to ``rank``."""
    return [(rank - hop) % world_size for hop in range(world_size)]


def at_once(m: int, cut: Cut) -> int:
    """The blocks of about so many owners are multiplied together."""
    wanted = GOOD_COLUMNS if cut.n < m else min(cut.n, LEAST_COLUMNS)
    width = max(1, -(-cut.n // cut.world_size))
    return max(1, -(-wanted // width)) if cut.tiles == 1 else 1


def together(m: int, cut: Cut, rank: int) -> list[list[int]]:
    """The owners whose blocks ``rank`` multiplies at once, in ring order; their columns are neighbours."""
    size = at_once(m, cut)
    if size >= cut.world_size:
        return [ring_order(cut.world_size, rank)]
    groups: list[list[int]] = []
    for owner in ring_order(cut.world_size, rank):
        if not groups or len(groups[-1]) == size or owner == cut.world_size - 1:
            groups.append([])
        groups[-1].append(owner)
    return groups
