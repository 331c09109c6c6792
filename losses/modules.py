"""The TensorDict module over the functions of `polopt.losses`."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from polopt.losses.algorithm import Algorithm, ValueTerm
from polopt.losses.objective import Objective, policy_loss
from polopt.losses.schedules import number
from polopt.losses.values import value_loss

__all__ = ["PolicyLoss"]


class PolicyLoss(TensorDictModuleBase):
    """The loss of an algorithm, read from a TensorDict.

    Keeps to TorchRL's conventions: outputs named `loss_*` are summed and differentiated by
    the trainer, the others are logged, `set_keys` renames inputs, and the default names are
    TorchRL's. A trailing dimension of one, which TorchRL keeps on rewards and values, is
    accepted.

    With an actor (and a critic, if the algorithm has a value term) they are evaluated on the
    observations; without one `log_prob` (and `value`, `entropy`) are read, as a trainer of
    language models provides them.

    Args:
        algorithm: An `Algorithm`, or an `Objective` alone.
        actor: Has `get_dist(tensordict)`, as TorchRL's `ProbabilisticActor` does.
        critic: Writes `keys.value` (`state_value` by default).
        value: How the critic is trained; overrides that of the algorithm.

    Attributes:
        objective: May be replaced between updates (schedules); see `resolve` for compiled loops.
    """

    @dataclass
    class Keys:
        """Names of the entries that are read."""

        action: NestedKey = "action"
        log_prob: NestedKey = "log_prob"
        old_log_prob: NestedKey = "action_log_prob"
        behavior_log_prob: NestedKey = "behavior_log_prob"
        ref_log_prob: NestedKey = "ref_log_prob"
        entropy: NestedKey = "entropy"
        advantage: NestedKey = "advantage"
        value: NestedKey = "state_value"
        old_value: NestedKey = "state_value"
        value_target: NestedKey = "value_target"
        mask: NestedKey = "mask"
        selection: NestedKey = "selection"
        group_tokens: NestedKey = "group_tokens"
        kl: NestedKey = "kl"
        denominator: NestedKey = "denominator"

    def __init__(
        self,
        algorithm: Algorithm | Objective,
        actor: Any | None = None,  # noqa: ANN401
        critic: TensorDictModuleBase | None = None,
        *,
        value: ValueTerm | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(algorithm, Algorithm | Objective):
            raise ValueError(
                f"algorithm must be an Algorithm such as ppo(), or an Objective, got {algorithm!r}"
            )
        if actor is not None and not (hasattr(actor, "get_dist") and hasattr(actor, "in_keys")):
            raise ValueError(
                "actor must have in_keys and get_dist(tensordict), as a ProbabilisticActor has, "
                f"got a {type(actor).__name__}"
            )
        if critic is not None and not hasattr(critic, "in_keys"):
            raise ValueError(
                "critic must be a module for TensorDicts, as a ValueOperator is, "
                f"got a {type(critic).__name__}"
            )
        if isinstance(algorithm, Algorithm):
            self.objective = algorithm.objective
            self.value_term = value or algorithm.value
        else:
            self.objective, self.value_term = algorithm, value
        if critic is not None and self.value_term is None:
            raise ValueError("a critic was given, but the algorithm has no value term")
        if actor is not None and self.value_term is not None and critic is None:
            raise ValueError(
                "the algorithm trains a critic: give one, or an algorithm with value=None"
            )
        self.actor, self.critic = actor, critic
        self.keys = self.Keys()
        if actor is None:
            # Without a critic to evaluate, new and collected values need two names.
            self.keys.value = "value"
        self._name_entries()

    def set_keys(self, **keys: NestedKey) -> None:
        """Rename entries that are read.

        Raises:
            ValueError: If a name is not one of `PolicyLoss.Keys`.
        """
        known = {f.name for f in fields(self.Keys)}
        for name, key in keys.items():
            if name not in known:
                raise ValueError(f"unknown key {name!r}, expected one of {sorted(known)}")
            setattr(self.keys, name, key)
        self._name_entries()

    def _name_entries(self) -> None:
        k, o = self.keys, self.objective
        read = [k.log_prob] if self.actor is None else [*self.actor.in_keys, k.action]
        if self.actor is None and o.uses_entropy:
            read.append(k.entropy)
        written = ["loss_objective", "clip_fraction"]
        if o.ratio != "none":
            read.append(k.old_log_prob)
            written += ["kl_approx", "ratio_mean"]
        read.append(k.advantage)
        if o.aggregation == "group_token_mean":
            read.append(k.group_tokens)
        if o.corrections:
            read.append(k.behavior_log_prob)
            written.append("correction_mean")
        if self.actor is not None or o.uses_entropy:
            written.append("entropy")
        if o.uses_entropy:
            written.append("loss_entropy")
        if o.uses_reference and o.kl_in == "loss":
            read.append(k.kl if o.kl == "full" else k.ref_log_prob)
            written += ["loss_kl", "kl"]
        if self.value_term is not None:
            read.append(k.value_target)
            if self.critic is None:
                read.append(k.value)
            if self.value_term.clip is not None:
                read.append(k.old_value)
                written.append("value_clip_fraction")
            written.append("loss_critic")
        # tensordict annotates both as list[str | tuple[str]], which no nested key fits.
        self.in_keys = list(dict.fromkeys(read))  # pyright: ignore[reportAttributeAccessIssue]
        self.out_keys = written  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the terms of the loss and the metrics, scalars without batch size.

        Raises:
            ValueError: If an entry that the algorithm needs is missing, or shapes differ.
        """
        k, o = self.keys, self.objective
        entropy: Tensor | None
        if self.actor is None:
            log_prob: Tensor = _required(tensordict, k.log_prob)
            entropy = tensordict.get(k.entropy, None)
        else:
            dist = self.actor.get_dist(tensordict)
            log_prob = dist.log_prob(_required(tensordict, k.action))
            entropy = _entropy(dist)

        def steps(key: NestedKey, *, needed: bool) -> Tensor | None:
            entry = _required(tensordict, key) if needed else tensordict.get(key, None)
            if entry is not None and entry.ndim > log_prob.ndim and entry.shape[-1] == 1:
                return entry.squeeze(-1)
            return entry

        mask = steps(k.mask, needed=False)
        denominator = tensordict.get(k.denominator, None)
        group_tokens = None
        if o.aggregation == "group_token_mean":
            group_tokens = _required(tensordict, k.group_tokens)
        divergence = o.uses_reference and o.kl_in == "loss"
        advantage = steps(k.advantage, needed=True)
        out = policy_loss(
            log_prob,
            steps(k.old_log_prob, needed=o.ratio != "none"),
            advantage,  # type: ignore[arg-type]
            mask,
            objective=o,
            denominator=denominator,
            behavior_log_prob=steps(k.behavior_log_prob, needed=bool(o.corrections)),
            ref_log_prob=steps(k.ref_log_prob, needed=divergence and o.kl != "full"),
            kl=steps(k.kl, needed=True) if divergence and o.kl == "full" else None,
            entropy=entropy,
            selection=steps(k.selection, needed=False) if o.selects else None,
            group_tokens=group_tokens,
        )
        if self.value_term is not None:
            term = self.value_term
            old_value = steps(k.old_value, needed=term.clip is not None)
            if self.critic is None:
                value = steps(k.value, needed=True)
            else:
                inputs = tensordict.select(*self.critic.in_keys)
                value = self.critic(inputs)[k.value].squeeze(-1)
            critic = value_loss(
                value,  # type: ignore[arg-type]
                old_value,
                steps(k.value_target, needed=True),  # type: ignore[arg-type]
                mask,
                clip=None if term.clip is None else number(term.clip, "value_clip"),
                loss=term.loss,
                coef=number(term.coef, "value_coef"),
                # One denominator is shared, and so the weights must be.
                aggregation=o.aggregation,
                horizon=o.horizon,
                group_tokens=group_tokens,
                denominator=denominator,
            )
            out.update(critic)
        return TensorDict(out)  # pyright: ignore[reportArgumentType]


def _required(tensordict: TensorDictBase, key: NestedKey) -> Tensor:
    entry = tensordict.get(key, None)
    if entry is None:
        names = sorted(map(str, tensordict.keys(include_nested=True)))
        raise ValueError(f"the loss needs the entry {key!r}, which is not among {names}")
    return entry


def _entropy(dist: torch.distributions.Distribution) -> Tensor:
    try:
        return dist.entropy()
    except NotImplementedError:
        # No closed form (a squashed Gaussian): one fresh sample, with its gradient.
        return -dist.log_prob(dist.rsample())
