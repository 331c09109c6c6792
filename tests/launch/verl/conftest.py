import pytest


@pytest.fixture(autouse=True)
def _hydra():
    """Values of verl's scripts are read by Hydra's parser: extra `verl`."""
    pytest.importorskip("hydra")
