"""Who is compared with whom, on what: the data of `polopt bench control`.

A comparison is a task and an algorithm. To add one, give it a goal; to add a library, give it an
entry with the function that trains it. Imports no torch.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec

__all__ = ["ALGORITHMS", "ENTRIES", "GOALS", "LIBRARIES", "TASKS", "Entry", "Goal", "Trial"]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What every library is held to in one comparison.

    Attributes:
        bar: Greedy mean return of 100 episodes at which a run ends.
        frames: The most of one run.
        every: Frames between evaluations.
    """

    bar: float
    frames: int = 300_000
    every: int = 2048


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run: what `Entry.function` is given.

    Attributes:
        task: A name in `bench.meter.TASKS`.
        algorithm: As in `GOALS`.
        seed: Of everything random.
        goal: Where it ends.
        cpu_seconds: It also ends after so many of training, None: never.
    """

    task: str
    algorithm: str
    seed: int
    goal: Goal
    cpu_seconds: float | None = None

    @classmethod
    def make(
        cls, task: str, algorithm: str, seed: int, *, frames: int | None, cpu: float | None
    ) -> "Trial":
        """Return the trial of a comparison, with its goal; `frames` replaces the goal's."""
        goal = GOALS[task, algorithm]
        if frames is not None:
            goal = replace(goal, frames=frames)
        return cls(task=task, algorithm=algorithm, seed=seed, goal=goal, cpu_seconds=cpu)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One library with one algorithm.

    Attributes:
        library: Its name in tables and in `--libraries`.
        algorithm: What it trains.
        tasks: Where it takes part.
        function: `module:name` of the function from a `Trial` to what came out of it, as
            `bench.meter.Meter.result` returns it. It runs in a process of its own.
        package: What it imports that polopt does not bring.
    """

    library: str
    algorithm: str
    tasks: tuple[str, ...]
    function: str
    package: str | None = None

    @property
    def installed(self) -> bool:
        """Whether its package is there."""
        return self.package is None or find_spec(self.package) is not None


GOALS = {
    ("cartpole", "ppo"): Goal(bar=475.0),
    ("acrobot", "ppo"): Goal(bar=-100.0),
    ("pendulum", "ppo"): Goal(bar=-300.0),
    ("mountaincar", "ppo"): Goal(bar=-110.0, frames=1_000_000),
    ("mountaincar-continuous", "ppo"): Goal(bar=90.0),
    ("lunarlander", "ppo"): Goal(bar=200.0, frames=1_000_000, every=16_384),
    ("cartpole", "dqn"): Goal(bar=475.0, frames=100_000),
    ("acrobot", "dqn"): Goal(bar=-100.0, frames=100_000),
    ("lunarlander", "dqn"): Goal(bar=200.0, frames=400_000, every=16_384),
    ("pendulum", "sac"): Goal(bar=-200.0, frames=40_000),
    ("pendulum", "td3"): Goal(bar=-200.0, frames=40_000),
    ("pendulum", "ddpg"): Goal(bar=-200.0, frames=40_000),
    ("mountaincar-continuous", "sac"): Goal(bar=90.0, frames=40_000),
    ("mountaincar-continuous", "td3"): Goal(bar=90.0, frames=40_000),
    ("mountaincar-continuous", "ddpg"): Goal(bar=90.0, frames=40_000),
}
"""By task and algorithm, in the order of the tables."""

_CLASSIC = ("cartpole", "acrobot", "pendulum")
_ALL = (*_CLASSIC, "mountaincar", "mountaincar-continuous", "lunarlander")

_REPLAYING = {
    "dqn": ("cartpole", "acrobot", "lunarlander"),
    "sac": ("pendulum", "mountaincar-continuous"),
    "td3": ("pendulum", "mountaincar-continuous"),
    "ddpg": ("pendulum", "mountaincar-continuous"),
}

ENTRIES = (
    Entry(library="polopt", algorithm="ppo", tasks=_ALL, function="polopt.launch.bench.ours:ours"),
    Entry(
        library="polopt-zoo",
        algorithm="ppo",
        tasks=("cartpole",),
        function="polopt.launch.bench.ours:zoo",
    ),
    Entry(
        library="sb3",
        algorithm="ppo",
        tasks=_ALL,
        function="polopt.launch.bench.sb3:ppo",
        package="stable_baselines3",
    ),
    Entry(
        library="cleanrl",
        algorithm="ppo",
        tasks=_CLASSIC,
        function="polopt.launch.bench.cleanrl:ppo",
    ),
    Entry(
        library="torchrl",
        algorithm="ppo",
        tasks=_CLASSIC,
        function="polopt.launch.bench.torchrl:ppo",
    ),
    Entry(
        library="torchrl-zoo",
        algorithm="ppo",
        tasks=("cartpole",),
        function="polopt.launch.bench.torchrl:zoo",
    ),
    *(
        Entry(library=library, algorithm=algorithm, tasks=tasks, function=function, package=package)
        for algorithm, tasks in _REPLAYING.items()
        for library, function, package in (
            ("polopt", "polopt.launch.bench.ours:ours", None),
            ("sb3", "polopt.launch.bench.off_policy:sb3", "stable_baselines3"),
        )
    ),
)
"""In the order in which they run. Ours train the recipe `<task>-<algorithm>`."""

TASKS = tuple(dict.fromkeys(task for task, _ in GOALS))
ALGORITHMS = tuple(dict.fromkeys(algorithm for _, algorithm in GOALS))
LIBRARIES = tuple(dict.fromkeys(entry.library for entry in ENTRIES))
