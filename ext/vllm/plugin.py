"""The entry point `vllm.general_plugins`: vLLM calls it in each of its processes."""

import contextlib

__all__ = ["BACKENDS", "register"]

BACKENDS = {"gloo": "GlooEngine", "safetensors": "SafetensorsEngine"}
"""Engines of `polopt.ext.vllm.engines` by the name for `--weight-transfer-config`."""


def register() -> None:
    """Name our engines in vLLM's factory; they are imported when one is chosen."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for backend, engine in BACKENDS.items():
        with contextlib.suppress(ValueError):  # vLLM may call a plugin more than once
            WeightTransferEngineFactory.register_engine(backend, "polopt.ext.vllm.engines", engine)
