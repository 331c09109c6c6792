"""TRL's GRPO trainer with the loss, the advantages and the sampling of an `Algorithm`.

TRL keeps generation, vLLM, rewards, data, checkpoints and launching. What is replaced hangs on
methods that have been the same since TRL 1.9; `tests/ext/test_trl_contract.py` watches them.
"""

import copy
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers.utils import logging
from trl import GRPOConfig

from polopt.ext.trl.advantage import AdvantageTrainer, whole_texts
from polopt.ext.trl.checkpoints import STATE, warn_of_random_states
from polopt.ext.trl.config import (
    check_algorithm,
    check_config,
    check_data,
    check_rollouts,
    check_sampling,
    check_tokenizer,
    check_turns,
    check_whole,
    check_windows,
    needs_whole,
    selects,
    with_reference,
)
from polopt.ext.trl.full_kl import FullKl
from polopt.ext.trl.metrics import Window, step_metrics
from polopt.ext.trl.padding import Padding
from polopt.ext.trl.rewards import checked_rewards
from polopt.ext.trl.rows import check_same_data, fingerprint
from polopt.ext.trl.sampling import PromptStream, without_empty
from polopt.ext.trl.selection import select_tokens, select_window
from polopt.losses import Algorithm, resolve
from polopt.losses.controllers import load_states, observe_all, states_of
from polopt.losses.modules import PolicyLoss

__all__ = ["PolicyTrainer"]

logger = logging.get_logger(__name__)


class PolicyTrainer(AdvantageTrainer):
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
        accept_changed_data: Go on from a checkpoint of other training rows.
        **kwargs: As for `GRPOTrainer`.

    Attributes:
        generated: Answers that this rank has generated to train on, refilling included.
        refilled: Counts over the run of dynamic sampling: rounds, and groups dropped by cause.
        data: What the training rows are: their number and a hash of all of them.
        ended: Why training ended before its last step, or None.

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
        accept_changed_data: bool = False,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        check_algorithm(algorithm)
        args = GRPOConfig("polopt-output") if args is None else args
        check_config(args)
        check_data(args, kwargs.get("train_dataset"))
        own = kwargs.get("environment_factory") is not None
        check_sampling(
            args, algorithm, kwargs.get("train_dataset"), args.world_size, environment=own
        )
        named = isinstance(model, str) or getattr(model.config, "_name_or_path", "")
        if algorithm.objective.uses_reference and not named:
            raise ValueError(
                "the algorithm has a divergence from a reference model (kl_coef), which TRL loads "
                "by name: give the model as a folder or hub name, or set kl_coef to 0"
            )
        refill = algorithm.sampling.refill is not None
        check_rollouts(algorithm, kwargs)
        if (rollout := kwargs.get("rollout_func")) is not None:
            kwargs["rollout_func"] = without_empty(rollout)
        self.algorithm = copy.deepcopy(algorithm)  # its controllers change
        self.correct_at, self._accepts = correct_at, accept_changed_data
        self.policy_loss = PolicyLoss(resolve(algorithm.objective, 0))
        self._rewards: Tensor | None = None
        self._kept: Tensor | None = None
        self._window = Window()
        self._measured: dict[str, float] = {}  # metrics of the latest batch, for controllers
        self.generated = 0
        self.refilled: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self._before: list[Tensor] = []  # rewards of everything generated for one batch
        self.reward_faults = []
        rewards = checked_rewards(reward_funcs, self.reward_faults)
        super().__init__(model, rewards, with_reference(args, algorithm), **kwargs)
        check_tokenizer(self._tokenizer, self.train_dataset)
        self.data = fingerprint(self.train_dataset)
        check_same_data(self.data, self.accelerator)
        if getattr(self, "aux_loss_enabled", False):
            raise ValueError(
                "the model is a mixture of experts with an auxiliary loss, which PolicyTrainer "
                "does not support: set router_aux_loss_coef of its config to 0"
            )
        check_whole(algorithm, sharded=self.is_deepspeed_enabled or self.is_fsdp_enabled)
        plugin = self.accelerator.state.deepspeed_plugin if self.is_deepspeed_enabled else None
        gathered = self.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3)
        check_turns(self.args, kwargs, self.accelerator.num_processes, gathered=gathered)
        check_windows(self.args, deepspeed=self.is_deepspeed_enabled, selects=selects(algorithm))
        self.padding = Padding(prompts=False, completions=False)
        if trim_padding:
            unwrapped = self.accelerator.unwrap_model(self.model)
            self.padding = Padding.of(unwrapped, self.pad_to_multiple_of)
        self._full_kl = self._exact_divergence() if needs_whole(algorithm) else None
        self._scorers = len(self.reward_funcs)
        if algorithm.sampling.overlong_cache is not None:
            self._add_soft_overlong(algorithm.sampling.overlong_cache)
        self._stream = PromptStream(len(self.train_dataset), self.args.seed) if refill else None

    def _exact_divergence(self) -> FullKl:
        self.beta = 0.0  # or TRL would score the reference's tokens, which nothing reads
        reference = self.ref_model and self.accelerator.unwrap_model(self.ref_model)
        policy = self.accelerator.unwrap_model(self.model)
        return FullKl(policy, reference, self.temperature, self.accelerator.autocast)

    # --- the loss ------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:  # noqa: ANN401
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            self._window = Window()
            self._open([inputs])
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
            self._open([buffered[(into + i) % len(buffered)] for i in range(known)])
        return inputs

    def _open(self, batches: list[dict[str, Any]]) -> None:
        """Begin the books of these micro-batches, all of a step or as many as are known."""
        share, window = self.algorithm.sampling.top_entropy, self._window
        if share is not None:
            window.masks, window.threshold = select_tokens(batches, share, self.accelerator)
            masks = zip(batches, window.masks, strict=True)
            batches = [{**batch, "loss_mask": mask} for batch, mask in masks]
        window.add(self._count(batches))
        if self.algorithm.objective.selects:
            objective = resolve(self.algorithm.objective, self.state.global_step)
            seed = self.args.seed + self.state.global_step
            window.selections = select_window(batches, objective, self.accelerator, seed)

    def _count(self, batches: list[dict[str, Any]]) -> Tensor:
        """Return the count over micro-batches and ranks, per rank: DDP averages over ranks."""
        count = self.policy_loss.objective.count
        local = torch.stack(
            [count(b["loss_mask"], group_tokens=b.get("group_tokens")) for b in batches]
        ).sum()
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

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        if "pixel_values" in inputs:
            raise ValueError("PolicyTrainer does not support images yet")
        window, exact = self._window, {}
        mask = window.masks[window.done] if window.masks else inputs["loss_mask"]
        if self._full_kl is None:
            log_prob, entropy, *_ = self._score(model, inputs, compute_entropy=True)
        else:
            ids, attention = whole_texts(inputs)
            score = super()._get_per_token_logps_and_entropies  # rows stay in their order
            with self._full_kl.watch() as hidden:
                log_prob, entropy, *_ = score(
                    model, ids, attention, mask.size(1), compute_entropy=True
                )
            exact["kl"] = self._full_kl(hidden[0], ids, attention, mask)
        old = inputs.get("old_per_token_logps", log_prob.detach())
        advantage = inputs["advantages"]
        behavior = inputs.get("sampling_per_token_logps", old)  # without vLLM that of the policy
        if behavior is not old:  # NaN: vLLM did not tell
            behavior = torch.where(behavior.isnan(), old, behavior)
        steps = {
            "log_prob": log_prob,
            "action_log_prob": old,
            "behavior_log_prob": behavior,
            "advantage": advantage if advantage.ndim == 2 else advantage.unsqueeze(-1),
            "mask": mask,
            "entropy": entropy,
            **exact,
        }
        if window.selections:
            steps["selection"] = window.selections[window.done]
        if "group_tokens" in inputs:
            steps["group_tokens"] = inputs["group_tokens"]
        if "ref_per_token_logps" in inputs:
            steps["ref_log_prob"] = inputs["ref_per_token_logps"]
        entries = TensorDict({**steps, "denominator": window.denominator})
        objective = resolve(self.algorithm.objective, self.state.global_step)
        self.policy_loss.objective = objective
        out = self.policy_loss(entries)
        window.record(out, step_metrics(objective, steps))
        if not self.model.training:
            self._close("eval")
        return torch.stack([v for k, v in out.items() if k.startswith("loss_")]).sum()

    def _close(self, mode: str) -> None:
        means = self._window.means(self.accelerator)
        if self._window.masks and math.isfinite(threshold := self._window.threshold.item()):
            means["sampling/entropy_threshold"] = threshold  # infinite where nothing is trained on
        for name, value in means.items():
            self._metrics[mode][name].append(value)
        if mode == "train":
            answers = self._window.done * self._train_batch_size * self.accelerator.num_processes
            observe_all(self.algorithm, {**self._measured, **means}, answers)
        self._window = Window()

    # --- checkpoints ---------------------------------------------------------

    def _state_of_run(self) -> dict[str, Any]:
        cycle = self.args.steps_per_generation * self.num_iterations
        return {
            "format": 1,
            "prompts_drawn": self._stream.position if self._stream else 0,
            "generated": self.generated,
            "refilled": dict(self.refilled),
            "exact": self._step % cycle == 0,
            "controllers": states_of(self.algorithm),
            "data": self.data,
        }

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (Path(checkpoint) / STATE).exists():
            self.restore(Path(checkpoint))

    def check_checkpoint(self, checkpoint: Path) -> None:
        """Refuse a checkpoint of a run on other rows.

        Raises:
            ValueError: If the training rows were others, and that was not accepted.
        """
        then = json.loads((checkpoint / STATE).read_text()).get("data")
        if then != self.data and None not in (then, self.data) and not self._accepts:
            raise ValueError(
                f"the training data has changed since {checkpoint}: {then} then, {self.data} now; "
                "bring the rows of then back, or set accept_changed_data (in a recipe "
                "trainer.accept_changed_data=true) to go on with these"
            )

    def restore(self, checkpoint: Path) -> None:
        """Take over counts, controllers and the position in the prompts from a checkpoint.

        `train(resume_from_checkpoint=…)` does it.

        Raises:
            ValueError: As `check_checkpoint`.
        """
        self.check_checkpoint(checkpoint)
        state = json.loads((checkpoint / STATE).read_text())
        if self._stream is not None:
            self._stream.position = state["prompts_drawn"]
        self.generated = state["generated"]
        self.refilled = Counter(state["refilled"])
        self._reported = Counter(self.refilled)
        load_states(self.algorithm, state["controllers"])
        warn_of_random_states(checkpoint, self.accelerator)
        if not state["exact"]:
            logger.warning(
                "%s was written between two generations: the run goes on with fresh completions, "
                "and not exactly as it would have without the interruption.", checkpoint,
            )  # fmt: skip
