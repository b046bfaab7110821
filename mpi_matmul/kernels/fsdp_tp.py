"""FSDP across nodes, tensor parallel inside a node (fsdp_tp): shards of b go round the ring of the nodes.

| matrix | global | placement         | on one rank (mesh h x 1 x t) |
| ------ | ------ | ----------------- | ---------------------------- |
| a      | (m, k) | rows over nodes   | (m/h, k), a copy a rank      |
| b      | (k, n) | columns over both | (k, n/(t h))                 |
| c      | (m, n) | blocks            | (m/h, n/t)                   |

h nodes of t ranks each. Inside a node the columns of b are split over its ranks, which all have the node's
rows of a, as in tp_column. Each of these parts is sharded over the nodes and gathered along them, as in fsdp:
a rank's ring are the ranks with its place in the other nodes. Nothing is sent inside a node, and on
one node it is tp_column. Messages per rank: (h - 1) a block. Bytes: all ranks together
(h - 1) * k * n * itemsize. Memory per rank: A/h + B/p + C/p + a few blocks (see `mpi_matmul.blocks`).

So the function is that of fsdp, whose ring is the line along m of the mesh. Sources: Narayanan et al.,
Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, SC 2021, section 3 (tensor
parallel inside a server, other dimensions across servers); Zhao et al., PyTorch FSDP: Experiences on Scaling
Fully Sharded Data Parallel, PVLDB 16(12), 2023, pages 3848-3860.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from mpi_matmul.mesh import Mesh


def mesh_of_nodes(node_of: Sequence[object]) -> Mesh:
    """The mesh (nodes x 1 x ranks of a node) for ranks on these nodes, given in rank order.

    Where the nodes have different numbers of ranks, each is taken for several smaller ones, all alike.

    >>> mesh_of_nodes(["h1", "h1", "h2", "h2"])
    Mesh(m=2, k=1, n=2, ranks=None)
    >>> mesh_of_nodes(["h1", "h2", "h1", "h2"]).line("n", 0)
    [0, 2]
    """
    ranks_of_node = math.gcd(*Counter(node_of).values())
    first = {node: rank for rank, node in reversed(list(enumerate(node_of)))}
    ranks = sorted(range(len(node_of)), key=lambda rank: (first[node_of[rank]], rank))
    in_order = ranks == list(range(len(node_of)))
    return Mesh(len(node_of) // ranks_of_node, 1, ranks_of_node, None if in_order else tuple(ranks))
