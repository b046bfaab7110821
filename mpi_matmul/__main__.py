"""python -m mpi_matmul"""

import sys

from mpi_matmul.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
