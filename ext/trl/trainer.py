"""TRL's GRPO trainer with the loss, the advantages and the sampling of an `Algorithm`.

TRL keeps generation, vLLM, rewards, data, checkpoints and launching. What is replaced hangs on
methods that have been the same since TRL 1.9; `tests/ext/test_trl_contract.py` watches them.
"""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from polopt.ext.trl.config import (
    check_algorithm,
    check_config,
    check_data,
    check_windows,
    with_reference,
)
from polopt.ext.trl.metrics import Window, step_metrics
from polopt.ext.trl.padding import Padding
from polopt.ext.trl.sampling import PromptStream, Rollout
from polopt.losses import Algorithm, informative, kl_estimate, resolve, whiten
from polopt.losses.modules import PolicyLoss

__all__ = ["PolicyTrainer"]

_STATE = "polopt.json"
_IDS, _COMPLETIONS, _EXTRA, _IMAGES = 1, 3, 5, 6  # positions in what `_generate` returns

logger = logging.get_logger(__name__)


class PolicyTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` with everything about the loss taken from an `Algorithm`.

    The loss of an optimizer step is divided by that step's own count, summed over its
    micro-batches and all ranks. Samples without a reward (None or NaN) are left out of the
    statistics of their group and of the count. TRL's fields for its own loss are refused.

    Args:
        model: As for `GRPOTrainer`. A model object whose algorithm has a divergence must have
            been loaded from a folder or hub name, from which TRL loads the reference.
        reward_funcs: As for `GRPOTrainer`. The first one tells correctness.
        args: TRL's config.
        algorithm: The loss, the advantages and the sampling rule.
        correct_at: An answer is correct when the first reward gives at least this much.
        trim_padding: Deal the rows of an optimizer step to micro-batches in order of length and
            cut their padding, as far as the model allows (see `Padding.of`). The gradient is
            the same.
        **kwargs: As for `GRPOTrainer`.

    Attributes:
        generated: Answers that this rank has generated to train on, refilling included.
        refilled: Counts over the run of dynamic sampling: rounds, and groups dropped by cause.

    Raises:
        ValueError: If the config sets TRL's loss, or the algorithm needs what is not there.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401
        reward_funcs: Any = None,  # noqa: ANN401
        args: GRPOConfig | None = None,
        *,
        algorithm: Algorithm,
        correct_at: float = 1.0,
        trim_padding: bool = True,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        check_algorithm(algorithm)
        args = GRPOConfig("polopt-output") if args is None else args
        check_config(args)
        check_data(args, algorithm, kwargs.get("train_dataset"), args.world_size)
        refill = algorithm.sampling.refill is not None
        for name in ("rollout_func", "environment_factory"):
            if refill and kwargs.get(name) is not None:
                raise ValueError(f"sampling.refill does not work with {name} yet: set it to none")
        self.algorithm, self.correct_at = algorithm, correct_at
        self.policy_loss = PolicyLoss(resolve(algorithm.objective, 0))
        self._rewards: Tensor | None = None
        self._kept: Tensor | None = None
        self._window = Window()
        self.generated = 0
        self.refilled: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self._before: list[Tensor] = []  # rewards of everything generated for one batch
        super().__init__(model, reward_funcs, with_reference(args, algorithm), **kwargs)
        if getattr(self, "aux_loss_enabled", False):
            raise ValueError(
                "the model is a mixture of experts with an auxiliary loss, which PolicyTrainer "
                "does not support: set router_aux_loss_coef of its config to 0"
            )
        check_windows(self.args, deepspeed=self.is_deepspeed_enabled)
        self.padding = Padding(prompts=False, completions=False)
        if trim_padding:
            unwrapped = self.accelerator.unwrap_model(self.model)
            self.padding = Padding.of(unwrapped, self.pad_to_multiple_of)
        self._stream = PromptStream(len(self.train_dataset), self.args.seed) if refill else None

    # --- generation, rewards and advantages ---------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._rows = list(inputs)  # refilling replaces rows, and the loader keeps its own
        self._rewards = self._kept = None
        output = super()._generate_and_score_completions(self._rows)
        rewards, local = self._rewards, self._local(len(inputs))
        mode = "train" if self.model.training else "eval"
        size = self.num_generations if mode == "train" else self.num_generations_eval
        reward = _weighted(rewards, self.reward_weights)
        reward = reward - self._divergence(output)
        if self._kept is not None:
            reward = torch.where(self._kept, reward, torch.nan)
        present = ~reward.isnan()
        group = torch.arange(len(reward), device=reward.device) // size
        given = {"reward": reward, "group": group, "rewards": rewards}
        rule = resolve(self.algorithm.advantage, self.state.global_step)
        advantage = rule(*(given[name] for name in rule.needs))
        if rule.whiten:
            advantage = whiten(advantage, present)
        output["advantages"] = advantage[local].to(torch.float32)
        mask = output["completion_mask"].bool() & present[local, None]
        output["loss_mask"] = mask & output["tool_mask"].bool() if "tool_mask" in output else mask
        table = self._logs["advantages"]  # TRL has just put its own there
        for _ in range(min(len(reward), len(table))):
            table.pop()
        table.extend(advantage.tolist())
        return output

    def _divergence(self, output: dict[str, Any]) -> Tensor | float:
        """Return what is subtracted from the reward, float [N] over all ranks, or 0."""
        objective = resolve(self.algorithm.objective, self.state.global_step)
        if not (objective.uses_reference and objective.kl_in == "reward"):
            return 0.0
        old = output.get("old_per_token_logps")
        if old is None:  # TRL skips it where the policy has not moved since
            with torch.no_grad():
                old, *_ = self._score(self.model, output, batch_size=self._train_batch_size)
        kl = kl_estimate(old, output["ref_per_token_logps"], objective.kl)
        kl = torch.where(output["completion_mask"].bool(), kl, 0.0).sum(-1)
        kl = self.accelerator.gather(kl)
        self._metrics["train" if self.model.training else "eval"]["kl"].append(kl.mean().item())
        return objective.kl_coef * kl

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        if self._rewards is None:  # else `_generate` had to know them already
            self._rewards = super()._calculate_rewards(*args, **kwargs)
        return self._rewards

    def _local(self, size: int) -> slice:
        rank = self.accelerator.process_index
        return slice(rank * size, (rank + 1) * size)

    # --- dynamic sampling ----------------------------------------------------

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """Generate, and replace groups without signal (DAPO eq. 11).

        Here, on lists and before TRL pads and scores log-probabilities, a replaced group costs
        its generation and its reward only. All ranks decide from the rewards of all of them,
        and so do the same number of rounds with the same sizes.
        """
        if self._stream is None or not self.model.training:
            self.generated += len(prompts) if self.model.training else 0
            return super()._generate(prompts)
        size, ranks = self.num_generations, self.accelerator.num_processes
        batch, output = self._rollout(self._rows, prompts)
        groups = len(prompts) // size
        useful = self._useful(batch).view(ranks, groups)
        seen = found = rounds = 0
        fresh = useful
        while True:
            seen, found = seen + fresh.numel(), found + int(fresh.sum())
            missing = int((~useful).sum(1).max())
            if not missing or rounds == self.algorithm.sampling.max_rounds:
                break
            rounds += 1
            # Over-sampled by the share of groups that carry signal, so that one round may do.
            count = min(groups, math.ceil(missing * seen / found)) if found else groups
            rows = self._draw(count)
            extra, _ = self._rollout(rows, [row["prompt"] for row in rows])
            fresh = self._useful(extra).view(ranks, count)
            bad = [(~flags).nonzero().flatten().tolist() for flags in useful]
            good = [flags.nonzero().flatten().tolist() for flags in fresh]
            batch.replace(bad, extra, good, rank=self.accelerator.process_index, size=size)
            useful = self._useful(batch, count=False).view(ranks, groups)
        self._report(rounds, int((~useful).sum()), useful.numel())
        # What rewards have logged per sample is kept for the samples that stay.
        logged = {k[1]: v for k, v in batch.columns.items() if isinstance(k, tuple)}
        self._pending_extra_logs.update(logged)
        self._rows[:] = batch.columns["rows"]
        prompts[:] = batch.columns["prompts"]
        self._rewards = batch.rewards
        self._kept = useful.flatten().repeat_interleave(size)
        return tuple(batch.columns.get(i, value) for i, value in enumerate(output))

    def _rollout(self, rows: list[dict], prompts: list[Any]) -> tuple[Rollout, tuple[Any, ...]]:
        self.generated += len(prompts)
        output = super()._generate(prompts)
        if output[_IMAGES] or output[_EXTRA]:
            raise ValueError("sampling.refill does not work with images or rollout functions yet")
        rewards = super()._calculate_rewards(rows, prompts, output[_COMPLETIONS], output[_IDS])
        lists = {i: v for i, v in enumerate(output) if isinstance(v, list) and len(v) == len(rows)}
        logged = {("logged", name): list(v) for name, v in self._pending_extra_logs.items()}
        self._pending_extra_logs.clear()
        columns = {"rows": list(rows), "prompts": list(prompts), **lists, **logged}
        return Rollout(columns, rewards), output

    def _draw(self, groups: int) -> list[dict[str, Any]]:
        """Return the rows of fresh groups of this rank; all ranks advance the same stream."""
        drawn = self._stream.take(groups * self.accelerator.num_processes)
        mine = drawn[self._local(groups)]
        return [self.train_dataset[i] for i in mine for _ in range(self.num_generations)]

    def _useful(self, batch: Rollout, *, count: bool = True) -> Tensor:
        """Return which groups of all ranks carry signal, bool [W·n / G], and count the others."""
        size, first = self.num_generations, batch.rewards[:, 0]
        correct = torch.where(first.isnan(), torch.nan, (first >= self.correct_at).float())
        reward = _weighted(batch.rewards, self.reward_weights)
        group = torch.arange(len(reward), device=reward.device) // size
        rule = self.algorithm.sampling.refill
        useful = informative(correct if rule == "correct" else reward, group)
        if count:
            share = correct.view(-1, size)[~useful].nanmean(1)
            solved, failed = int((share == 1).sum()), int((share == 0).sum())
            self.refilled["groups"] += len(useful)
            self.refilled["all_correct"] += solved
            self.refilled["all_wrong"] += failed
            self.refilled["same_reward"] += len(share) - solved - failed
            self._before.append(reward)
        return useful

    def _report(self, rounds: int, short: int, groups: int) -> None:
        before = self._reported
        for name in ("groups", "all_correct", "all_wrong", "same_reward"):
            key = "sampling/groups_generated" if name == "groups" else f"sampling/dropped_{name}"
            self._metrics["train"][key].append(self.refilled[name] - before[name])
        mean = torch.cat(self._before).nanmean().item()
        self._before.clear()
        self._metrics["train"]["sampling/reward_before_refill"].append(mean)
        self._metrics["train"]["sampling/rounds"].append(rounds)
        self._metrics["train"]["sampling/groups_short"].append(short)
        self.refilled["rounds"] += rounds
        self.refilled["short"] += short
        self._reported = Counter(self.refilled)
        if short == groups:
            logger.warning(
                "No group carried a signal after %d further rounds: all answers to each prompt "
                "were equally good. Training stops here.", rounds,
            )  # fmt: skip
            self.control.should_training_stop = True

    # --- the loss ------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:  # noqa: ANN401
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            self._window = Window()
            self._window.add(self._count([inputs]))
            return inputs
        cycle = self.args.steps_per_generation * self.num_iterations
        into = self._step % cycle
        if self._buffered_inputs is not before:
            # Optimizer steps begin and end at multiples of this, in every pass.
            steps = self.args.steps_per_generation
            window = math.gcd(self.args.gradient_accumulation_steps, steps)
            self._buffered_inputs = self.padding.order(self._buffered_inputs, window)
            inputs = self._buffered_inputs[self._step % steps]
        if self._window.done == 0 or into == 0:
            # The micro-batches of this optimizer step whose completions exist.
            known = min(self.current_gradient_accumulation_steps - self._window.done, cycle - into)
            buffered = self._buffered_inputs
            self._window.add(
                self._count([buffered[(into + i) % len(buffered)] for i in range(known)])
            )
        return inputs

    def _count(self, batches: list[dict[str, Any]]) -> Tensor:
        """Return the count over micro-batches and ranks, per rank: DDP averages over ranks."""
        count = self.policy_loss.objective.count
        local = torch.stack([count(batch["loss_mask"]) for batch in batches]).sum()
        return self.accelerator.reduce(local, "sum") / self.accelerator.num_processes

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        """See `transformers.Trainer`: ends an optimizer step's books at its last micro-batch."""
        loss = super().training_step(model, *args, **kwargs)
        window = self._window
        window.done += 1
        if not self.accelerator.sync_gradients:
            window.loss += loss
            return loss
        if window.parts > 1:
            # Completions were generated in the middle of this optimizer step, so its count was
            # not known when the first gradients were taken. Gradients are linear in it.
            scale = window.mend()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
            loss = (window.loss + loss) * scale - window.loss
        self._close("train")
        return loss

    def _score(self, model: nn.Module, inputs: dict[str, Any], **kwargs: Any) -> Any:  # noqa: ANN401
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
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
        if not self.padding.completions or torch.is_grad_enabled():
            return score(model, ids, mask, width, *args, **kwargs)
        size = kwargs.pop("batch_size", None) or len(ids)
        return self.padding.score(
            lambda *part: score(model, *part, *args, **kwargs), ids, mask, width, size
        )

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        if "pixel_values" in inputs:
            raise ValueError("PolicyTrainer does not support images yet")
        log_prob, entropy, *_ = self._score(model, inputs, compute_entropy=True)
        old = inputs.get("old_per_token_logps", log_prob.detach())
        steps = {
            "log_prob": log_prob,
            "action_log_prob": old,
            # Without vLLM the sampler is the old policy.
            "behavior_log_prob": inputs.get("sampling_per_token_logps", old),
            "advantage": inputs["advantages"].unsqueeze(-1),
            "mask": inputs["loss_mask"],
            "entropy": entropy,
        }
        if "ref_per_token_logps" in inputs:
            steps["ref_log_prob"] = inputs["ref_per_token_logps"]
        entries = TensorDict({**steps, "denominator": self._window.denominator})
        objective = resolve(self.algorithm.objective, self.state.global_step)
        self.policy_loss.objective = objective
        out = self.policy_loss(entries)
        self._window.record(out, step_metrics(objective, steps))
        if not self.model.training:
            self._close("eval")
        return torch.stack([v for k, v in out.items() if k.startswith("loss_")]).sum()

    def _close(self, mode: str) -> None:
        for name, value in self._window.means(self.accelerator).items():
            self._metrics[mode][name].append(value)
        self._window = Window()

    # --- checkpoints ---------------------------------------------------------

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        super()._save_checkpoint(*args, **kwargs)
        if self.args.should_save:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            cycle = self.args.steps_per_generation * self.num_iterations
            state = {
                "format": 1,
                "prompts_drawn": self._stream.position if self._stream else 0,
                "generated": self.generated,
                "refilled": dict(self.refilled),
                "exact": self._step % cycle == 0,
            }
            (folder / _STATE).write_text(json.dumps(state))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (Path(checkpoint) / _STATE).exists():
            self.restore(Path(checkpoint))

    def restore(self, checkpoint: Path) -> None:
        """Take over the counts and the position in the prompts from a checkpoint.

        `train(resume_from_checkpoint=…)` does it.
        """
        state = json.loads((checkpoint / _STATE).read_text())
        if self._stream is not None:
            self._stream.position = state["prompts_drawn"]
        self.generated = state["generated"]
        self.refilled = Counter(state["refilled"])
        self._reported = Counter(self.refilled)
        if not state["exact"]:
            logger.warning(
                "%s was written between two generations: the run goes on with fresh completions, "
                "and not exactly as it would have without the interruption.", checkpoint,
            )  # fmt: skip


def _weighted(rewards: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum over reward functions, float [N]; NaN where none gave a value."""
    total = (rewards * weights.to(rewards.device)).nansum(1)
    return torch.where(rewards.isnan().all(1), torch.nan, total)
