"""Which answers are trained on: groups without signal are replaced, long answers punished.

Groups are replaced before anything is computed on them.
"""

import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from polopt.ext.trl.scoring import ScoringTrainer
from polopt.losses import combine_rewards, drop_truncated, informative, soft_overlong

__all__ = ["PromptStream", "RefillingTrainer", "Rollout", "weighted", "without_empty"]

_IDS, _COMPLETIONS, _EXTRA, _IMAGES = 1, 3, 5, 6  # positions in what `_generate` returns

logger = logging.get_logger(__name__)


class PromptStream:
    """Endless shuffled passes over the rows of a dataset, restored by one number.

    Args:
        size: Number of rows.
        seed: Of the shuffles; the same on all ranks.

    Attributes:
        position: Rows drawn so far.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.position = 0
        self._size, self._seed = size, seed
        self._pass, self._order = -1, []

    def take(self, count: int) -> list[int]:
        """Return the indices of the next `count` rows."""
        return [self._next() for _ in range(count)]

    def _next(self) -> int:
        number, offset = divmod(self.position, self._size)
        if number != self._pass:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
            self._order = torch.randperm(self._size, generator=generator).tolist()
            self._pass = number
        self.position += 1
        return self._order[offset]


@dataclass
class Rollout:
    """Generated completions of this rank, and the rewards of all ranks.

    Attributes:
        columns: Lists with one entry per row of this rank: rows, prompts, and whatever
            generation returned.
        rewards: float [W·n, F], of all ranks in the order of ranks; F reward functions.
    """

    columns: dict[Any, list[Any]]
    rewards: Tensor

    def replace(
        self, bad: Sequence[Sequence[int]], other: "Rollout", good: Sequence[Sequence[int]],
        *, rank: int, size: int,
    ) -> None:  # fmt: skip
        """Replace groups by groups of another rollout, as far as both lists reach.

        Args:
            bad: For each rank the groups to replace, counted within the rank.
            other: Where the new groups come from.
            good: For each rank the groups of `other` to take.
            rank: This rank.
            size: Samples in a group.
        """
        ranks = len(bad)
        mine = self.rewards.view(ranks, -1, size, self.rewards.size(1))
        theirs = other.rewards.view(ranks, -1, size, self.rewards.size(1))
        for r in range(ranks):
            for b, g in zip(bad[r], good[r], strict=False):
                mine[r, b] = theirs[r, g]
                if r == rank:
                    to, of = slice(b * size, (b + 1) * size), slice(g * size, (g + 1) * size)
                    for key, column in self.columns.items():
                        fresh = other.columns.get(key)  # what a reward logs only sometimes
                        column[to] = fresh[of] if fresh else [None] * size


class _Generated(Exception):
    """Carries answers out of TRL's method that prepares them, and would go on with them."""

    def __init__(self, prompts: list[Any], output: tuple[Any, ...]) -> None:
        super().__init__()
        self.prompts, self.output = prompts, output


class RefillingTrainer(ScoringTrainer):
    """`trl.GRPOTrainer` with the rules of `Sampling`, and greedy answers; see `PolicyTrainer`."""

    correct_at: float
    generated: int
    refilled: Counter[str]
    ended: str | None = None
    _stream: PromptStream | None
    _aside: bool = False  # whether answers are asked for beside the batch
    _rows: list[dict[str, Any]]
    _rewards: Tensor | None
    _kept: Tensor | None
    _before: list[Tensor]
    _reported: Counter[str]
    _scorers: int

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        if self._rewards is None:  # else `_generate` had to know them already
            self._rewards = super()._calculate_rewards(*args, **kwargs)
        return self._rewards

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:  # noqa: ANN401
        ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        return self._without_empty(ids, logprobs)

    def _without_empty(self, ids: list, logprobs: list | None) -> tuple[list, list | None]:
        """Return answers without any token, which TRL fails on, as an end of the text alone.

        What the sampler thought of that is not known: NaN, which counts as what the policy thinks.
        """
        empty = [i for i, answer in enumerate(ids) if not len(answer)]
        if empty:
            ids, end = list(ids), self.eos_token_ids[0]
            logprobs = None if logprobs is None else list(logprobs)
            for i in empty:
                ids[i] = [end]
                if logprobs is not None:
                    logprobs[i] = [math.nan]
            mode = "train" if self.model.training else "eval"
            self._metrics[mode]["sampling/empty_answers"].append(len(empty))
        return ids, logprobs

    def _local(self, size: int) -> slice:
        rank = self.accelerator.process_index
        return slice(rank * size, (rank + 1) * size)

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """Generate, and replace groups without signal (DAPO eq. 11).

        Here, on lists and before TRL pads and scores log-probabilities, a replaced group costs
        its generation and its reward only. All ranks decide from the rewards of all of them,
        and so do the same number of rounds with the same sizes.
        """
        if self._aside:
            raise _Generated(prompts, super()._generate(prompts))
        if self._stream is None or not self.model.training:
            self.generated += len(prompts) if self.model.training else 0
            return super()._generate(prompts)
        size, ranks = self.num_generations, self.accelerator.num_processes
        output = super()._generate(prompts)
        batch = self._scored(self._rows, prompts, output)
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
            wanted = self.algorithm.sampling.oversample * missing
            count = min(groups, math.ceil(wanted * seen / found)) if found else groups
            rows = self._draw(count)
            extra = self._scored(rows, *self._answers_to(rows))
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
        rest = list(output)
        rest[_EXTRA] = {}  # the rows have them
        return tuple(batch.columns.get(i, value) for i, value in enumerate(rest))

    def _answers_to(self, rows: list[dict[str, Any]]) -> tuple[list[Any], tuple[Any, ...]]:
        """Return prompts and answers to rows beside the batch, as TRL prepares them for one.

        TRL makes environments ready and asks them for prompts in the method that also pads and
        scores log-probabilities, which a replaced group must not cost: it ends at the answers.
        """
        self._aside = True
        try:
            super()._generate_and_score_completions(rows)
        except _Generated as found:
            return found.prompts, found.output
        finally:
            self._aside = False
        raise RuntimeError("TRL has scored completions without generating them")

    def _scored(
        self, rows: list[dict[str, Any]], prompts: list[Any], output: tuple[Any, ...]
    ) -> Rollout:
        """Return answers with their rewards; what a `rollout_func` tells of them is in the rows."""
        self.generated += len(prompts)
        if output[_IMAGES]:
            raise ValueError("sampling.refill does not work with images yet")
        told = output[_EXTRA]
        rows = [
            {**row, **{k: v[i] if isinstance(v, list) else v for k, v in told.items()}}
            for i, row in enumerate(rows)
        ]
        rewards = super()._calculate_rewards(rows, prompts, output[_COMPLETIONS], output[_IDS])
        lists = {i: v for i, v in enumerate(output) if isinstance(v, list) and len(v) == len(rows)}
        logged = {("logged", name): list(v) for name, v in self._pending_extra_logs.items()}
        self._pending_extra_logs.clear()
        return Rollout({"rows": rows, "prompts": list(prompts), **lists, **logged}, rewards)

    def _draw(self, groups: int) -> list[dict[str, Any]]:
        """Return the rows of fresh groups of this rank; all ranks advance the same stream."""
        drawn = self._stream.take(groups * self.accelerator.num_processes)
        mine = drawn[self._local(groups)]
        return [self.train_dataset[i] for i in mine for _ in range(self.num_generations)]

    def _useful(self, batch: Rollout, *, count: bool = True) -> Tensor:
        """Return which groups of all ranks carry signal, bool [W·n / G], and count the others."""
        size, first = self.num_generations, batch.rewards[:, 0]
        correct = torch.where(first.isnan(), torch.nan, (first >= self.correct_at).float())
        reward = weighted(batch.rewards, self.reward_weights, self._scorers)
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
            self.ended = (
                f"No group carried a signal after {rounds} further rounds: all answers to each "
                "prompt were equally good. Training stops here."
            )
        elif short and self.algorithm.sampling.at_bound == "stop":
            self.ended = (
                f"{short} of {groups} groups carried no signal after {rounds} further rounds. "
                "Training stops here, as sampling.at_bound says."
            )
        if self.ended is not None:
            logger.warning(self.ended)
            self.control.should_training_stop = True

    def _greedy_rewards(self, rows: list[dict[str, Any]], size: int) -> Tensor:
        """Return the rewards of the greedy answers to the prompts of the groups, float [W·n].

        One answer for each group of `size` rows. What TRL logs is about sampled answers, so the
        greedy ones leave no trace there.
        """
        if len(rows) % size:
            raise ValueError(
                f"the greedy baseline needs whole groups of {size} within a process, got "
                f"{len(rows)} rows: set per_device_eval_batch_size to a multiple"
            )
        mode = "train" if self.model.training else "eval"
        logged = {name: list(values) for name, values in self._metrics[mode].items()}
        pending = [self._pending_extra_logs, self._pending_metrics]
        before = [dict(books) for books in pending]
        for books in pending:
            books.clear()
        sampled = self.generation_config
        self.generation_config = copy.deepcopy(sampled)
        self.generation_config.update(do_sample=False, temperature=1.0, top_k=50, top_p=1.0)
        try:
            rows = rows[::size]
            prompts, output = self._answers_to(rows)
            rewards = super()._calculate_rewards(rows, prompts, output[_COMPLETIONS], output[_IDS])
        finally:
            self.generation_config = sampled
        self._metrics[mode].clear()
        self._metrics[mode].update(logged)
        self._metrics[mode]["num_tokens"] = [self.state.num_input_tokens_seen]
        for books, entries in zip(pending, before, strict=True):
            books.clear()
            books.update(entries)
        self.generated += len(rows) if mode == "train" else 0
        reward = weighted(rewards, self.reward_weights, self._scorers)
        self._metrics[mode]["reward_greedy"].append(reward.nanmean().item())
        return reward.repeat_interleave(size)

    def _drop_truncated(self, mask: Tensor, output: dict[str, Any]) -> Tensor:
        if not self.algorithm.sampling.drop_truncated:
            return mask
        ids, kept = output["completion_ids"], output["completion_mask"].bool()
        last = ids.gather(1, kept.sum(1, keepdim=True).clamp(min=1) - 1)[:, 0]
        ends = torch.tensor([*self.eos_token_ids, self._tokenizer.pad_token_id], device=ids.device)
        truncated = kept.any(1) & ~torch.isin(last, ends)
        share = self.accelerator.gather(truncated.float()).mean().item()
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["sampling/dropped_truncated"].append(share)
        return drop_truncated(mask, truncated)

    def _add_soft_overlong(self, cache: int) -> None:
        """Add DAPO's soft punishment as a further reward, as TRL adds those of environments."""
        limit = self.max_completion_length

        def punish(completion_ids: list[list[int]], **_: Any) -> list[float]:  # noqa: ANN401
            length = torch.tensor([len(ids) for ids in completion_ids])
            return soft_overlong(length, limit=limit, cache=cache).tolist()

        self.reward_funcs.append(punish)
        self.reward_func_names.append("soft_overlong")
        self.reward_processing_classes.append(None)
        self.reward_weights = torch.cat([self.reward_weights, torch.ones(1)])


def without_empty(rollout: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a `rollout_func` whose answers all have a token; see `RefillingTrainer`."""

    @functools.wraps(rollout)
    def filled(prompts: list[Any], trainer: RefillingTrainer) -> dict[str, Any]:
        out = dict(rollout(prompts, trainer))
        if "completion_ids" in out and "logprobs" in out:  # else TRL names what is missing
            own = [list(mask) or [1] for mask in out.get("env_mask") or ()]
            out.update({"env_mask": own} if own else {})
            out["completion_ids"], out["logprobs"] = trainer._without_empty(
                out["completion_ids"], out["logprobs"]
            )
        return out

    return filled


def weighted(rewards: Tensor, weights: Tensor, scorers: int) -> Tensor:
    """Return the weighted sum over rewards, float [N]; NaN where no scorer gave a value.

    Args:
        rewards: float [N, F], NaN where missing.
        weights: float [F].
        scorers: The first so many tell whether there is a reward at all; the others add to it.
    """
    total = combine_rewards(rewards, weights.tolist())
    return torch.where(rewards[:, :scorers].isnan().all(1), torch.nan, total)
