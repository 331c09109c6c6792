"""The job of a bandit: a rule of exploration plays many independent runs side by side."""

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from polopt.envs.bandit import BanditTask
from polopt.launch.curve import write_curves
from polopt.launch.job import COMMON, exploration_names, processes, seed, task_names
from polopt.launch.recipe import RecipeError, build, call, check_keys, complete
from polopt.launch.record import read_metrics

if TYPE_CHECKING:
    from polopt.ext.torchrl.exploration import Rule
    from polopt.launch.run import Run

__all__ = ["BanditJob", "Plays", "prepare"]

_POINTS = 8
"""Lines of metrics per decade of plays."""

_MOST_RUNS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Plays:
    """How much is played.

    Attributes:
        runs: Independent runs, over which regrets are averaged.
        plays: Pulls in each.
    """

    runs: int = 100
    plays: int = 10_000

    def __post_init__(self) -> None:
        for name in ("runs", "plays"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} must be at least 2, got {getattr(self, name)}")
        if self.runs > _MOST_RUNS:
            raise ValueError(
                f"runs {self.runs:,} is more than the {_MOST_RUNS:,} that are held at a time: "
                "play fewer"
            )


@dataclass(frozen=True, kw_only=True)
class BanditJob:
    """A checked recipe for a bandit; see `polopt.launch.job.Job`."""

    name: str
    tree: dict[str, Any]
    task: BanditTask
    exploration: "Rule"
    play: Plays = field(default_factory=Plays)
    processes: int = 1

    def arithmetic(self) -> dict[str, Any]:
        """See `Job`."""
        play = self.play
        return {"runs": play.runs, "plays": play.plays, "pulls": play.runs * play.plays}

    def train(self, run: "Run") -> dict[str, Any]:
        """Play all runs, and return their regret.

        The values that the rule sees are the mean rewards of the arms so far; an arm never
        pulled has that of all pulls. Its schedules count the plays of a run.
        """
        import torch

        from polopt.ext.torchrl.exploration import Explorer

        task, play = self.task, self.play
        arms = len(task.means)
        explorer = Explorer(self.exploration, seed=self.tree["seed"])
        rewards = torch.Generator().manual_seed(self.tree["seed"] + 1)
        sums, counts = (torch.zeros(play.runs, arms) for _ in range(2))
        done = 0
        if (found := run.latest()) is not None:
            done, tensors, _ = found
            sums, counts = tensors["sums"], tensors["counts"]
            rewards.set_state(tensors["rewards"])
            names = [name for name in tensors if name.startswith("explorer.")]
            explorer.load_state_dict({n.removeprefix("explorer."): tensors[n] for n in names})
        points = {round(10 ** (k / _POINTS)) for k in range(math.ceil(_POINTS * 12))}
        ones = torch.ones(play.runs, 1)
        while done < play.plays and not run.should_stop():
            overall = sums.sum(-1, keepdim=True) / max(done, 1)
            values = torch.where(counts > 0, sums / counts.clamp(min=1.0), overall)
            chosen = explorer(values, done).unsqueeze(-1)
            paid = task.pull(chosen.squeeze(-1), rewards).unsqueeze(-1)
            sums.scatter_add_(-1, chosen, paid)
            counts.scatter_add_(-1, chosen, ones)
            done += 1
            if done in points or done == play.plays:
                run.log(done, self._outcome(counts, done))
                run.progress(done, play.plays)
        state = {f"explorer.{name}": value for name, value in explorer.state_dict().items()}
        run.save(
            done, {"sums": sums, "counts": counts, "rewards": rewards.get_state(), **state}, {}
        )
        lines = read_metrics(run.path / "metrics.jsonl")
        curves = {
            name: [(math.log10(m["step"]), m[name]) for m in lines]
            for name in ("regret", "ucb1_bound")
            if lines and name in lines[-1]
        }
        write_curves(
            run.path / "regret.svg", curves, title=task.name, x="log10 of plays", y="regret"
        )
        return {"task": task.name, "runs": play.runs, "plays": done, **self._outcome(counts, done)}

    def _outcome(self, counts: Any, done: int) -> dict[str, float]:  # noqa: ANN401
        gaps = self.task.gaps
        regret = (counts.double() * gaps).sum(-1)
        out = {
            "regret": float(regret.mean()),
            "regret_standard_error": float(regret.std() / math.sqrt(len(regret))),
            "best_arm_share": float(counts[:, gaps == 0].sum() / counts.sum()),
        }
        if self.task.reward == "bernoulli":
            out["ucb1_bound"] = self.task.ucb1_bound(max(done, 1))
        return out


def prepare(tree: dict[str, Any], *, name: str) -> BanditJob:
    """Check the recipe of a bandit.

    Args:
        tree: As from `polopt.launch.recipe.load`; defaults are filled in.
        name: Names the run.

    Raises:
        RecipeError: If the recipe is wrong.
    """
    from polopt.ext.torchrl.exploration import Rule

    check_keys(tree, (*(key for key in COMMON if key != "algorithm"), "exploration", "play"))
    seed(tree)
    world = processes(tree)
    if world != 1:
        raise RecipeError(f"'launch.processes' must be 1 for a bandit, got {world}")
    task = build(tree["task"], task_names(), "task")
    if "exploration" not in tree:
        raise RecipeError(
            "the section 'exploration' is missing, for example exploration: {use: Ucb}"
        )
    names = exploration_names()
    tree["exploration"] = complete(tree["exploration"], names, "exploration")
    rule = build(tree["exploration"], names, "exploration")
    if not isinstance(rule, Rule) or not rule.discrete:
        raise RecipeError(
            f"'exploration' must be a rule for discrete actions, for example {{use: Ucb}}, got "
            f"{rule!r}"
        )
    play = call(Plays, tree.setdefault("play", {}), "play")
    tree["play"] = asdict(play)
    return BanditJob(name=name, tree=tree, task=task, exploration=rule, play=play)
