"""Clusters of containers for the tests of this folder."""

import pytest
from docker_engine import need_docker, program_image


@pytest.fixture(scope="session")
def image():
    """The image of the program as it is now."""
    need_docker()
    return program_image()
