"""Tensor parallel by columns (tp_column): nothing travels; every rank has the whole a and columns of b.

| matrix | global | placement  | on one rank |
| ------ | ------ | ---------- | ----------- |
| a      | (m, k) | replicated | (m, k)      |
| b      | (k, n) | columns    | (k, n/p)    |
| c      | (m, n) | columns    | (m, n/p)    |

Mesh: 1 x 1 x p. Messages and bytes per rank: none. Memory per rank: A + B/p + C/p.

The first half of a layer of a large model: every rank has the whole batch a, and a part of the parameters b
that makes some of the outputs. Source: Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language
Models Using Model Parallelism, arXiv:1909.08053, 2019, section 3 (column parallel).
"""

from __future__ import annotations

from mpi_matmul.layout import Array
from mpi_matmul.work import Work


def tp_column(work: Work, a: Array, b_shard: Array, c_shard: Array) -> None:
    """Fill ``c_shard`` (m, n/p) with ``a`` (m, k) @ ``b_shard`` (k, n/p)."""
    work.multiply_into(a, b_shard, c_shard, False)
