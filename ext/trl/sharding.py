"""FSDP2 under TRL: a reference model in shards, and ranks that generate in step."""

import functools
from typing import Any
from unittest import mock

from accelerate import Accelerator
from accelerate.utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.fsdp import FSDPModule
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

__all__ = ["ShardingTrainer", "reshard"]


class ShardingTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` that shards what FSDP2 should, and does not hang; see `PolicyTrainer`.

    TRL makes one unit of the reference model, so each forward gathers all of it on every rank:
    here it is sharded layer by layer, as the policy is. And it lets transformers generate until
    the answers of a rank end: with shards every rank must take part in every forward, so ranks
    go on until those of all end.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        with mock.patch.object(grpo_trainer, "prepare_fsdp", _shard):
            super().__init__(*args, **kwargs)
        if self.is_fsdp_enabled:
            self.model.generate = functools.partial(self.model.generate, synced_gpus=True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """See `transformers.Trainer`, which writes no model where its checkpoints are shards."""
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and "SHARDED" in str(plugin.state_dict_type):
            whole = self.accelerator.get_state_dict(self.model)
            self._save(output_dir, state_dict=whole)
        super().save_model(output_dir, _internal_call)


def reshard(model: nn.Module) -> None:
    """Bring what FSDP2 has gathered back into shards, for those who read parameters by themselves.

    accelerate leaves the first and last layers gathered after a forward, until a backward: after
    an evaluation TRL would take them for shards when it sends weights to vLLM.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _shard(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    if not accelerator.is_fsdp2:
        raise ValueError("the reference model is sharded by FSDP2: set fsdp_version to 2")
    model.requires_grad_(False)
    return fsdp2_prepare_model(accelerator, model).eval()
