"""How a case of `plant.py` is run: by our jobs, by TRL, by stable-baselines3.

Each runner leaves in a folder what a user would have there, but for what a log does not need.
"""

import io
import json
import shutil
import time
import traceback
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["RUNNERS", "Case"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run.

    Attributes:
        world: Who trains.
        table: Of faults.yaml, where the run has a fault.
        base: Task and algorithm.
        settings: What differs from the healthy run.
        fault: What is wrong with it; empty for a healthy run.
        strength: Which column of the table.
    """

    world: str
    base: str
    seed: int
    table: str = ""
    settings: dict[str, Any]
    fault: str = ""
    strength: str = ""

    @property
    def name(self) -> str:
        words = [self.world, self.base, self.fault or "healthy", self.strength, str(self.seed)]
        return "-".join(w for w in words if w)


_ON_POLICY = {
    "cartpole": ("cartpole-ppo", {"collector.total_frames": 40_960}),
    "clip_higher": ("cartpole-ppo-clip-higher", {"collector.total_frames": 40_960}),
    "entropy_decay": ("cartpole-ppo-entropy-decay", {"collector.total_frames": 40_960}),
    "target_kl": ("cartpole-ppo-target-kl", {"collector.total_frames": 40_960}),
    "adaptive_kl": ("cartpole-ppo-adaptive-kl", {"collector.total_frames": 40_960}),
    "pendulum": ("pendulum-ppo", {
        "collector.num_envs": 8, "collector.frames_per_batch": 1600, "update.minibatch_size": 400,
        "collector.total_frames": 32_000,
    }),
    "acrobot": ("acrobot-ppo", {"collector.total_frames": 102_400}),
    "a2c": ("cartpole-a2c", {
        "algorithm.gamma": 0.98, "algorithm.lam": 0.9, "algorithm.whiten": True,
        "collector.num_envs": 32, "collector.frames_per_batch": 512, "update.minibatch_size": 512,
        "collector.total_frames": 51_200, "optimizer.lr": 2e-3,
    }),
    "reinforce": ("cartpole-reinforce", {"collector.total_frames": 102_400}),
    "dual_clip": ("cartpole-ppo-dual-clip", {"collector.total_frames": 40_960}),
    "entropy_target": ("cartpole-ppo-entropy-target", {"collector.total_frames": 40_960}),
    "flow": ("pendulum-flow-ppo", {"collector.total_frames": 40_960}),
    "mountaincar_continuous": ("mountaincar-continuous-ppo", {"collector.total_frames": 81_920}),
}  # fmt: skip
_GROUPS = {
    "grpo": ("cartpole-grpo", {"collector.total_frames": 60_000}),
    "dapo": ("cartpole-dapo", {"collector.total_frames": 60_000}),
    "pendulum_grpo": ("pendulum-grpo", {"collector.total_frames": 160_000}),
    "pendulum_dapo": ("pendulum-dapo", {"collector.total_frames": 160_000}),
}
_REPLAY = {
    name: (recipe, {"collector.total_frames": frames, "update.steps_per_batch": steps})
    for name, recipe, frames, steps in (
        ("dqn", "cartpole-dqn", 12_288, 16),
        ("double_dqn", "cartpole-double-dqn", 12_288, 16),
        ("acrobot_dqn", "acrobot-dqn", 12_288, 12),
        ("sac", "pendulum-sac", 6_144, 6),
        ("td3", "pendulum-td3", 6_144, 6),
        ("ddpg", "pendulum-ddpg", 6_144, 6),
        ("ddpg_ou", "pendulum-ddpg-ou", 6_144, 6),
        ("discrete_sac", "cartpole-discrete-sac", 8_192, 16),
        ("mountaincar_td3", "mountaincar-continuous-td3", 16_384, 6),
    )
}


def polopt(case: Case, folder: Path) -> None:
    """Train a control task; a fault of the environment is an argument of `planted.task`."""
    from polopt.launch.recipe import load
    from polopt.launch.train import find_recipe

    recipe, changes = (_ON_POLICY | _GROUPS | _REPLAY)[case.base]
    tree = load(find_recipe(recipe))
    tree["task"] = {"use": "planted:task", "of": tree["task"]["use"]}
    tree |= {"evaluation": {"episodes": 2, "every": 10**7, "stop_at": None}, "seed": case.seed}
    tree["checkpoints"] = {"every": 10**7}
    settings = changes | case.settings
    if case.fault and case.base == "acrobot":  # faults show early
        settings = {"collector.total_frames": 40_960} | settings
    for key, value in settings.items():
        _put(tree, key, value)
    c = tree["collector"]
    if case.base in _ON_POLICY:
        _fit(tree, case)
    frames = c.get("frames_per_batch") or c["num_envs"] * tree["groups"]["segment"]
    if case.base in _REPLAY and tree["task"].get("slower"):
        c["total_frames"] = 6_144
    elif case.base not in _REPLAY:
        for fault, count in (("sleep", 12), ("slower", 24)):
            if tree["task"].get(fault):  # the same seconds in a batch of every task
                tree["task"][fault] *= 32 / (frames / c["num_envs"])
                c["total_frames"] = frames * count
    if drag := tree["task"].get("drag"):
        if case.base not in _REPLAY:
            c["total_frames"] = frames * (12 if tree["task"].get("sleep") else 24)
        tree["task"]["drag"] = [*drag, c["total_frames"]]
    tree["task"]["batch"] = c["num_envs"]
    tree["checkpoints"]["every"] = c["total_frames"]
    _execute(tree, case, folder)


def _fit(tree: dict[str, Any], case: Case) -> None:
    """Give a run with an odd batch as many updates as are needed to see it, and no more."""
    c, u = tree["collector"], tree["update"]
    c["use"] = "BatchedCollector"
    if case.settings.get("collector.num_envs") == 1:
        c |= {"frames_per_batch": 512, "total_frames": 512 * 24}
        u["minibatch_size"] = 128
    if u["minibatch_size"] is None:
        u["minibatch_size"] = c["frames_per_batch"]
    if c["frames_per_batch"] < 100:
        c["frames_per_batch"] = max(c["frames_per_batch"], c["num_envs"])
        c["total_frames"] = c["frames_per_batch"] * 100
    if u["epochs"] > 60:
        c["total_frames"] = c["frames_per_batch"] * 12


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


_ALGORITHMS: dict[str, dict[str, Any]] = {"dapo": {"refill": None}, "dr_grpo": {"horizon": 4}}


def polopt_llm(case: Case, folder: Path) -> None:
    settings = dict(case.settings)
    algorithm = {"use": case.base, **_ALGORITHMS.get(case.base, {})}
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
    from planted import Drag
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.logger import configure

    settings = dict(case.settings)
    given = {
        k: settings.pop(k)
        for k in ("scale", "nan_after", "flip_after", "flip", "slower", "drag")
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
            if dragging:
                dragging(1)
            return observation, reward, terminated, truncated, info

    task, count, kind, total, values = {
        "cartpole": ("CartPole-v1", 4, library.PPO, 5_120, {
            "n_steps": 64, "batch_size": 64, "n_epochs": 10, "learning_rate": 1e-3,
            "gae_lambda": 0.9, "gamma": 0.98,
        }),
        "acrobot": ("Acrobot-v1", 4, library.PPO, 20_480, {
            "n_steps": 256, "batch_size": 256, "n_epochs": 8, "learning_rate": 1e-3,
            "gae_lambda": 0.94,
        }),
        "pendulum": ("Pendulum-v1", 4, library.PPO, 12_000, {
            "n_steps": 200, "batch_size": 200, "n_epochs": 8, "learning_rate": 1e-3, "gamma": 0.9,
        }),
        "a2c": ("CartPole-v1", 4, library.A2C, 6_000, {"n_steps": 8, "learning_rate": 1e-3}),
        "dqn": ("CartPole-v1", 1, library.DQN, 8_000, {
            "learning_rate": 2.3e-3, "buffer_size": 20_000, "learning_starts": 1000,
            "train_freq": 256, "gradient_steps": 64, "exploration_fraction": 0.2,
            "exploration_final_eps": 0.04, "target_update_interval": 10,
        }),
        "lunarlander": ("LunarLander-v3", 4, library.PPO, 24_576, {
            "n_steps": 256, "batch_size": 128, "n_epochs": 6, "learning_rate": 1e-3,
            "gamma": 0.995,
        }),
        "ddpg": ("Pendulum-v1", 1, library.DDPG, 1_600, {
            "learning_rate": 1e-3, "learning_starts": 500,
            "policy_kwargs": {"net_arch": [64, 64]},
        }),
        "sac": ("Pendulum-v1", 1, library.SAC, 1_600, {
            "learning_rate": 1e-3, "learning_starts": 500,
            "policy_kwargs": {"net_arch": [64, 64]},
        }),
        "td3": ("Pendulum-v1", 1, library.TD3, 1_600, {
            "learning_rate": 1e-3, "learning_starts": 500,
            "policy_kwargs": {"net_arch": [64, 64]},
        }),
    }[case.base]  # fmt: skip
    dragging = Drag(*given["drag"], total) if "drag" in given else None
    # The wrapper goes inside the monitor: what is logged is what the agent gets.
    env = make_vec_env(lambda: Wrapped(gym.make(task)), n_envs=count, seed=case.seed)
    model = kind("MlpPolicy", env, seed=case.seed, device="cpu", **{**values, **settings})
    model.set_logger(configure(str(folder), ["csv"]))
    try:
        model.learn(total, log_interval=4 if case.base == "dqn" else 1)
    except Exception:
        (folder / "train.log").write_text(traceback.format_exc()[-2000:])
    _save(model, folder / "model.zip")


def _save(model: Any, path: Path) -> None:
    """Save a model as SB3 does, without weights and what it pickles into strings."""
    whole = io.BytesIO()
    model.save(whole)
    with zipfile.ZipFile(whole) as archive:
        data = json.loads(archive.read("data"))
    plain = {k: v for k, v in data.items() if not isinstance(v, dict)}
    with zipfile.ZipFile(path, "w") as archive:  # the date of the first zip, on every day
        archive.writestr(zipfile.ZipInfo("data"), json.dumps(plain))


RUNNERS = {"polopt": polopt, "polopt_llm": polopt_llm, "trl": trl, "sb3": sb3}
