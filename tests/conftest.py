"""What every test gets: this folder on the import path, and the rules for tests that run on MPI ranks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ("mpi_session", "worlds")
