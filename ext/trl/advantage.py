"""What an algorithm makes of a generation before its first update: advantages and masks."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from polopt.ext.trl.padding import Padding
from polopt.ext.trl.sampling import RefillingTrainer, weighted
from polopt.losses import check_finite, kl_estimate, last_step_reward, resolve, whiten
from polopt.losses.advantages import moments_of

__all__ = ["AdvantageTrainer", "whole_texts"]


class AdvantageTrainer(RefillingTrainer):
    """`trl.GRPOTrainer` with the advantages of an `Algorithm`; see `PolicyTrainer`."""

    padding: Padding
    _measured: dict[str, float]
    _entropies: list[Tensor] | None = None  # of the policy, while TRL scores a generation

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._rows = list(inputs)  # refilling replaces rows, and the loader keeps its own
        self._rewards = self._kept = None
        top = self.algorithm.sampling.top_entropy is not None
        self._entropies = [] if top else None
        output = super()._generate_and_score_completions(self._rows)
        rewards, local = self._rewards, self._local(len(inputs))
        mode = "train" if self.model.training else "eval"
        size = self.num_generations if mode == "train" else self.num_generations_eval
        reward = weighted(rewards, self.reward_weights, self._scorers)
        if self._kept is not None:
            reward = torch.where(self._kept, reward, torch.nan)
        written = output["completion_mask"].bool()
        if "tool_mask" in output:
            written = written & output["tool_mask"].bool()
        present = written & ~reward[local, None].isnan()
        output["loss_mask"] = mask = self._drop_truncated(present, output)
        advantage = self._advantage(reward, rewards, size, present, written, output)
        if self.algorithm.advantage.whiten:
            if advantage.ndim == 1:
                advantage = advantage[:, None].expand(mask.shape)
            local_moments = torch.stack(moments_of(advantage, mask))
            moments = self.accelerator.reduce(local_moments, "sum").unbind()
            advantage = whiten(advantage, mask, moments=moments)  # type: ignore[arg-type]
        output["advantages"] = advantage.to(torch.float32)
        check_finite(advantages=output["advantages"])
        if advantage.ndim == 2:  # logged as a mean over the answer
            advantage = (advantage * mask).sum(1) / mask.sum(1).clamp(min=1)
        if self.algorithm.objective.aggregation == "group_token_mean":
            tokens = self.accelerator.gather(mask.sum(1)).view(-1, size).sum(1)
            output["group_tokens"] = tokens.repeat_interleave(size)[local]
        self._add_old_policy(output)
        table = self._logs["advantages"]  # TRL has just put its own there
        for _ in range(min(len(reward), len(table))):
            table.pop()
        table.extend(self.accelerator.gather(advantage).tolist())
        return output

    def _advantage(
        self,
        reward: Tensor,
        rewards: Tensor,
        size: int,
        present: Tensor,
        written: Tensor,
        output: dict[str, Any],
    ) -> Tensor:
        """Return advantages of this rank, float [n], or [n, T] if the rule gives one per token.

        Rules over answers see all N of all ranks, rules over tokens the n of this one.
        """
        local = self._local(len(written))
        rule = resolve(self.algorithm.advantage, self.state.global_step)
        divergence = self._divergence(output, written)
        given = {
            "group": torch.arange(len(reward), device=reward.device) // size,
            "rewards": rewards,
            "mask": present,
        }
        if "token_reward" in rule.needs:
            given["token_reward"] = last_step_reward(reward[local], present) - divergence
        else:
            given["reward"] = reward - self._sum(divergence)
        if "length" in rule.needs:
            given["length"] = self.accelerator.gather(written.sum(1))
        if "greedy_reward" in rule.needs:
            given["greedy_reward"] = self._greedy_rewards(self._rows, size)
        advantage = rule(*(given[name] for name in rule.needs))
        return advantage if advantage.ndim == 2 else advantage[local]

    def _divergence(self, output: dict[str, Any], written: Tensor) -> Tensor | float:
        """Return what is subtracted from the rewards, float [n, T] of this rank, or 0."""
        objective = resolve(self.algorithm.objective, self.state.global_step)
        if not (objective.uses_reference and objective.kl_in == "reward"):
            return 0.0
        kl = kl_estimate(self._old(output), output["ref_per_token_logps"], objective.kl)
        kl = torch.where(written, kl, 0.0)
        mode = "train" if self.model.training else "eval"
        mean = self._sum(kl).mean().item()
        self._metrics[mode]["kl"].append(mean)
        if mode == "train":
            self._measured = {"kl": mean}
        return objective.kl_coef * kl

    @torch.no_grad()
    def _old(self, output: dict[str, Any]) -> Tensor:
        old = output.get("old_per_token_logps")
        if old is None:  # TRL skips it where the policy has not moved since
            old, *_ = self._score(self.model, output, batch_size=self._train_batch_size)
        return old

    def _add_old_policy(self, output: dict[str, Any]) -> None:
        """Add what selections over an optimizer step look at, and TRL does not keep."""
        entropies, self._entropies = self._entropies, None
        known = "old_per_token_logps" in output
        if self.algorithm.objective.selects and not known:
            output["select_from"] = self._old(output)
        if entropies is None:
            return
        if not known:
            entropies = []  # those of another pass
            with torch.no_grad():
                size = self._train_batch_size
                scores = self._score(self.model, output, batch_size=size, compute_entropy=True)
                entropies.append(scores[1])
        output["policy_entropy"] = entropies[0]

    def _sum(self, steps: Tensor | float) -> Any:  # noqa: ANN401
        """Return sums over the tokens of the answers of all ranks, float [N]; 0 for 0."""
        return self.accelerator.gather(steps.sum(1)) if isinstance(steps, Tensor) else steps

    def completions(self) -> Iterator[dict[str, Any]]:
        """Yield the latest answers of all ranks, as TRL keeps them: the same on every rank.

        Yields:
            `prompt` and `completion`, `rewards` by name (None where one gave none), and
            `advantage` (its mean over the answer where every token has its own).
        """
        table = self._logs
        names = list(table["rewards"])
        columns = table["prompt"], table["completion"], table["advantages"]
        for values in zip(*columns, *(table["rewards"][name] for name in names), strict=False):
            prompt, completion, advantage, *rewards = values
            yield {
                "prompt": prompt,
                "completion": completion,
                "rewards": {k: None if v != v else v for k, v in zip(names, rewards, strict=True)},
                "advantage": advantage,
            }

    # --- passes over completions ---------------------------------------------

    def _score(self, model: nn.Module, inputs: dict[str, Any], **kwargs: Any) -> Any:  # noqa: ANN401
        ids, mask = whole_texts(inputs)
        width = inputs["completion_ids"].size(1)
        return self._get_per_token_logps_and_entropies(model, ids, mask, width, **kwargs)

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        ids: Tensor,
        mask: Tensor,
        width: int,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        score = super()._get_per_token_logps_and_entropies
        # TRL's pass over the old policy, which it makes before that over the reference.
        listening = self._entropies is not None and model is self.model
        if listening:
            kwargs["compute_entropy"] = True
        if not self.padding.completions or torch.is_grad_enabled():
            found = score(model, ids, mask, width, *args, **kwargs)
        else:
            size = kwargs.pop("batch_size", None) or len(ids)
            found = self.padding.score(
                lambda *part: score(model, *part, *args, **kwargs), ids, mask, width, size
            )
        if listening:
            self._entropies.append(found[1])  # type: ignore[union-attr]
        return found


def whole_texts(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return tokens and mask of prompts and completions together, [B, P + T] each."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    return ids, torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
