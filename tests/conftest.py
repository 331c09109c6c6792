"""Settings of every test: reproducible, and without the network."""

import os
from unittest import mock

# Before anything imports a Hugging Face library: the tests make their own models and data.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
from hypothesis import settings

# The same examples in every run: a red check is one that a developer sees as well.
settings.register_profile("polopt", deadline=None, derandomize=True)
settings.load_profile("polopt")


@pytest.fixture(autouse=True, scope="module")
def _own_environment():
    """Libraries set variables, as of ranks, which programs that others start would take over."""
    with mock.patch.dict(os.environ):
        yield
