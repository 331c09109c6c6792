"""Trains short runs, healthy ones and ones with a fault, and keeps their logs.

    python tests/launch/doctor/plant.py --out FOLDER [--half set report] [--only WORD …]
    python tests/launch/doctor/plant.py --out FOLDER --pack

The runs of the half `set` were used to choose the thresholds of the rules; those of the half
`report`, with other seeds, other algorithms and other tasks, were not. `score.py` counts.
`--pack` packs them into logs/, one archive for each half.
"""

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

SEEDS = {"set": (0, 1), "report": (11, 12)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run.

    Attributes:
        name: Of its folder: world, task, fault, strength, seed.
        fault: What is wrong with it; empty for a healthy run.
        strength: `weak` or `strong`.
        settings: What differs from the healthy run.
    """

    world: str
    half: str
    base: str
    seed: int
    settings: dict[str, Any]
    fault: str = ""
    strength: str = ""

    @property
    def name(self) -> str:
        words = [self.world, self.base, self.fault or "healthy", self.strength, str(self.seed)]
        return "-".join(w for w in words if w)


FAULTS = yaml.safe_load((HERE / "faults.yaml").read_text())


# Where runs take long, a half has one strength of each fault.
_STRENGTHS = {
    ("set", "sb3"): ("strong",),
    ("report", "sb3"): ("weak",),
    ("report", "polopt"): ("weak",),
    ("report", "polopt_llm"): ("weak",),
    ("report", "trl"): ("strong",),
}


def cases(half: str) -> Iterator[Case]:
    """Yield the runs of a half."""
    seeds = SEEDS[half]
    for table, world, on in (
        ("polopt", "polopt", {"set": "cartpole", "report": "pendulum"}[half]),
        ("sb3", "sb3", "cartpole"),
        ("llm", "polopt_llm", {"set": "dapo", "report": "gspo"}[half]),
        ("llm", "trl", {"set": "grpo", "report": "dr_grpo"}[half]),
    ):
        for row in FAULTS[table]:
            for strength in _STRENGTHS.get((half, world), ("weak", "strong")):
                yield Case(
                    world=world, half=half, base=on, seed=seeds[0], settings=row[strength],
                    fault=row["fault"], strength=strength,
                )  # fmt: skip
    for world, bases in (
        ("polopt", ("cartpole", "pendulum", "acrobot", "a2c", "reinforce")),
        ("sb3", ("cartpole", "a2c", "dqn", "sac", "pendulum")),
        ("polopt_llm", ("dapo", "grpo", "gspo", "cispo", "rloo")),
        ("trl", ("grpo", "dr_grpo", "dapo")),
    ):
        for on in bases:
            for seed in seeds[:1] if world == "sb3" else seeds:
                yield Case(world=world, half=half, base=on, seed=seed, settings={})


# --- how each is run -----------------------------------------------------------------------------

_CONTROL = {
    "cartpole": ("cartpole-ppo", {"task.of": "cartpole", "collector.total_frames": 40_960}),
    "pendulum": ("pendulum-ppo", {
        "task.of": "pendulum", "collector.num_envs": 8, "collector.frames_per_batch": 1600,
        "update.minibatch_size": 400, "collector.total_frames": 32_000, "task.batch": 8,
    }),
    "acrobot": ("acrobot-ppo", {"task.of": "acrobot", "collector.total_frames": 102_400}),
    "a2c": ("cartpole-a2c", {"task.of": "cartpole", "collector.total_frames": 51_200}),
    "reinforce": ("cartpole-reinforce", {"task.of": "cartpole", "collector.total_frames": 102_400}),
}  # fmt: skip


def polopt(case: Case, folder: Path) -> None:
    from polopt.launch.recipe import load
    from polopt.launch.train import find_recipe

    recipe, changes = _CONTROL[case.base]
    tree = load(find_recipe(recipe))
    tree["task"] = {"use": "planted:task"}
    tree["collector"]["use"] = "BatchedCollector"
    tree |= {"evaluation": {"episodes": 2, "every": 10**7, "stop_at": None}, "seed": case.seed}
    if case.base == "a2c":  # the recipe's is too high to go on after the bar is reached
        tree["optimizer"]["lr"] = 2e-3
    tree["checkpoints"] = {"every": 10**7 if case.fault else tree["collector"]["total_frames"]}
    settings = changes | case.settings
    for key, value in settings.items():
        _put(tree, key, value)
    c, u = tree["collector"], tree["update"]
    if case.settings.get("collector.num_envs") == 1:
        tree["task"]["batch"] = 1
        c |= {"frames_per_batch": 512, "total_frames": 512 * 24}
        u["minibatch_size"] = 128
    if u["minibatch_size"] is None:
        u["minibatch_size"] = c["frames_per_batch"]
    if c["frames_per_batch"] < 100:  # as many updates would take long
        c["frames_per_batch"] = max(c["frames_per_batch"], c["num_envs"])
        c["total_frames"] = c["frames_per_batch"] * 100
    if u["epochs"] > 60:
        c["total_frames"] = c["frames_per_batch"] * 12
    steps = c["frames_per_batch"] / c["num_envs"]
    for fault, count in (("sleep", 12), ("slower", 24)):
        if tree["task"].get(fault):
            tree["task"][fault] *= 32 / steps  # the same seconds in a batch of every task
            c["total_frames"] = c["frames_per_batch"] * count
    tree["checkpoints"]["every"] = min(tree["checkpoints"]["every"], c["total_frames"])
    _execute(tree, case, folder)


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for name in path:
        tree = tree[name]
    tree[last] = value


def _execute(tree: dict[str, Any], case: Case, folder: Path) -> None:
    from polopt.launch.job import prepare
    from polopt.launch.run import Run

    job = prepare(tree, name=case.name.replace(".", "_"))
    run = Run(folder, job.tree)
    try:
        summary = job.train(run)
    except (Exception, SystemExit) as error:
        summary = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    run.finish(summary)
    for path in folder.iterdir():
        if path.name not in ("metrics.jsonl", "config.yaml", "summary.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


_CACHE = {"task": {"use": "planted:text"}, "model": {
    "use": "tiny_qwen3", "hidden_size": 32, "warmup_steps": 250, "label_accuracy": 0.6,
}}  # fmt: skip
_TRAINER = {
    "per_device_train_batch_size": 64, "num_generations": 8, "max_completion_length": 4,
    "learning_rate": 1e-3, "lr_scheduler_type": "constant", "max_steps": 24, "logging_steps": 1,
    "save_strategy": "no",
}  # fmt: skip


def polopt_llm(case: Case, folder: Path) -> None:
    settings = dict(case.settings)
    algorithm: dict[str, Any] = {"use": case.base}
    if case.base == "dapo":
        algorithm["refill"] = None
    kl = settings.pop("kl", None)
    if kl is not None:
        algorithm = {"use": "grpo", "kl_coef": kl}
    reward = settings.pop("reward", "")
    tree = {
        "task": {**_CACHE["task"], "reward": reward},
        "model": dict(_CACHE["model"]),
        "algorithm": algorithm,
        "trainer": {**_TRAINER, **settings},
        "evaluation": {"problems": 4},
        "seed": case.seed,
    }
    _execute(tree, case, folder)


def trl(case: Case, folder: Path) -> None:
    from datasets import Dataset
    from planted import scorer, text
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from polopt.ext.trl.models import TinyQwen3

    settings = dict(case.settings)
    found = text()
    maker = TinyQwen3(**{k: v for k, v in _CACHE["model"].items() if k != "use"})
    source = maker.make(found)
    kl = settings.pop("kl", 0.0)
    reward = scorer(settings.pop("reward", ""), found.rewards[0])
    args = GRPOConfig(
        str(folder), seed=case.seed, beta=kl, loss_type=case.base, use_cpu=True, bf16=False,
        report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
        **{**_TRAINER, **settings},
    )  # fmt: skip
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(source),
        [reward],
        args,
        train_dataset=Dataset.from_list([dict(row) for row in found.train]),
        processing_class=AutoTokenizer.from_pretrained(source, padding_side="left"),
    )
    try:
        trainer.train()
    except Exception:
        (folder / "train.log").write_text(traceback.format_exc()[-2000:])
    trainer.state.save_to_json(str(folder / "trainer_state.json"))


def sb3(case: Case, folder: Path) -> None:
    import gymnasium as gym
    import stable_baselines3 as library
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.logger import configure

    settings = dict(case.settings)
    given = {
        k: settings.pop(k)
        for k in ("scale", "nan_after", "flip_after", "flip", "slower")
        if k in settings
    }

    class Wrapped(gym.Wrapper):
        steps = 0

        def step(self, action):
            observation, reward, terminated, truncated, info = self.env.step(action)
            self.steps += 4
            reward *= given.get("scale", 1.0)
            if self.steps > given.get("nan_after", 10**9):
                reward = float("nan")
            if self.steps > given.get("flip_after", 10**9):
                reward *= given.get("flip", -1.0)
            if "slower" in given:
                time.sleep(given["slower"] * self.steps)
            return observation, reward, terminated, truncated, info

    continuous = case.base in ("sac", "pendulum")
    name = "Pendulum-v1" if continuous else "CartPole-v1"
    count = 1 if case.base in ("dqn", "sac") else 4
    # The wrapper goes inside the monitor: what is logged is what the agent gets.
    env = make_vec_env(lambda: Wrapped(gym.make(name)), n_envs=count, seed=case.seed)
    kind, total, values = {
        "cartpole": (library.PPO, 5_120, {
            "n_steps": 64, "batch_size": 64, "n_epochs": 10, "learning_rate": 1e-3,
            "gae_lambda": 0.9, "gamma": 0.98,
        }),
        "pendulum": (library.PPO, 12_000, {
            "n_steps": 200, "batch_size": 200, "n_epochs": 8, "learning_rate": 1e-3, "gamma": 0.9,
        }),
        "a2c": (library.A2C, 6_000, {"n_steps": 8, "learning_rate": 1e-3}),
        "dqn": (library.DQN, 8_000, {
            "learning_rate": 2.3e-3, "buffer_size": 20_000, "learning_starts": 1000,
            "train_freq": 256, "gradient_steps": 64, "exploration_fraction": 0.2,
            "exploration_final_eps": 0.04, "target_update_interval": 10,
        }),
        "sac": (library.SAC, 1_600, {
            "learning_rate": 1e-3, "learning_starts": 500,
            "policy_kwargs": {"net_arch": [64, 64]},
        }),
    }[case.base]  # fmt: skip
    model = kind("MlpPolicy", env, seed=case.seed, device="cpu", **{**values, **settings})
    model.set_logger(configure(str(folder), ["csv"]))
    try:
        model.learn(total, log_interval=20 if case.base == "dqn" else 1)
    except Exception:
        (folder / "train.log").write_text(traceback.format_exc()[-2000:])


RUNNERS = {"polopt": polopt, "polopt_llm": polopt_llm, "trl": trl, "sb3": sb3}


def pack(folder: Path, target: Path) -> None:
    """Pack the runs of a half; the same runs give the same bytes."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mtime = info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(target, "w:xz", preset=9) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.add(path, str(path.relative_to(folder)), filter=plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--half", nargs="+", default=["set", "report"])
    parser.add_argument("--only", nargs="*", default=[], help="words that the name must contain")
    parser.add_argument("--pack", action="store_true", help="pack what is there, train nothing")
    args = parser.parse_args()
    if args.pack:
        for half in args.half:
            pack(args.out / half, HERE / "logs" / f"{half}.tar.xz")
        return
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.setdefault("POLOPT_CACHE", str(args.out.resolve() / "cache"))
    for half in args.half:
        for case in cases(half):
            folder = args.out / half / case.name
            if folder.exists() or not all(word in case.name for word in args.only):
                continue
            began = time.process_time()
            with tempfile.TemporaryDirectory(dir=args.out) as scratch:
                place = Path(scratch) / "run"
                place.mkdir()
                with (
                    contextlib.redirect_stderr(io.StringIO()),
                    contextlib.redirect_stdout(io.StringIO()),
                ):
                    RUNNERS[case.world](case, place)
                spent = time.process_time() - began
                meta = {"fault": case.fault, "strength": case.strength,
                        "world": case.world, "cpu_seconds": round(spent, 1)}  # fmt: skip
                (place / "case.json").write_text(json.dumps(meta))
                folder.parent.mkdir(parents=True, exist_ok=True)
                place.rename(folder)
            print(f"{case.name}: {spent:.1f} s", flush=True)


if __name__ == "__main__":
    main()
