"""Lets accelerate shard on CPUs: it turns FSDP on for GPUs only, and this is for tests only.

A recipe with `task: {use: fsdp_cpu:arithmetic, …}` imports it on every rank.
"""

import os
from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from polopt.envs.text import arithmetic

__all__ = ["arithmetic"]

_made = AcceleratorState.__init__


def _init(self, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
    _made(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    asked = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if asked and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin


AcceleratorState.__init__ = _init
