"""Settings of every test: reproducible, and without the network."""

import os

# Before anything imports a Hugging Face library: the tests make their own models and data.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

from hypothesis import settings

# The same examples in every run: a red check is one that a developer sees as well.
settings.register_profile("polopt", deadline=None, derandomize=True)
settings.load_profile("polopt")
