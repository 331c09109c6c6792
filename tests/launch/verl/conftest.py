"""These tests need the extra `verl`."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("hydra") else ["test_*.py"]
