"""Checkpoints that are whole or not there, and a model card that says what was trained."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import transformers
import trl
from accelerate.utils import gather_object
from safetensors import SafetensorError
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from transformers.utils import logging

from polopt.envs.rows import first_line
from polopt.ext.trl.sharding import ShardingTrainer
from polopt.losses import Algorithm

__all__ = [
    "STATE",
    "CheckpointingTrainer",
    "recover_folder",
    "replace_folder",
    "sync",
    "warn_of_random_states",
]

logger = logging.get_logger(__name__)

STATE = "polopt.json"
"""What polopt adds to a checkpoint of TRL."""

# Beside the checkpoints, so that a rename is atomic; transformers never pushes names with "_".
_STAGING = "_saving"


class CheckpointingTrainer(ShardingTrainer):
    """`trl.GRPOTrainer` whose checkpoints appear when they are complete; see `PolicyTrainer`.

    All ranks write into a folder beside the checkpoints; it is brought to the disk, renamed, and
    only then older ones are removed. A kill or a full disk leaves the earlier ones as they were.
    """

    algorithm: Algorithm
    _staging: Path | None = None
    _met: bool = False  # whether all ranks have heard of the repository on the hub

    def _state_of_run(self) -> dict[str, Any]:
        """Return what `STATE` holds, as JSON."""
        raise NotImplementedError

    def _get_output_dir(self, trial: Any) -> str:  # noqa: ANN401
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging)

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """See `transformers.Trainer`; what goes wrong is a sentence on all ranks.

        Raises:
            ValueError: If the repository cannot be made.
        """
        if self._met:  # `push_to_hub` asks again on the ranks that have no repository, and alone
            return
        self._met, told = True, []
        try:
            super().init_hf_repo(*args, **kwargs)  # does something on the main rank alone
        except Exception as error:  # of the hub, of its client, of the network
            told = [first_line(error)]
        told = gather_object(told)
        if told:
            name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
            raise ValueError(
                f"cannot make the repository {name!r} on the hub: {told[0].rstrip('.')}; log in "
                "with `hf auth login` or HF_TOKEN, or leave push_to_hub out"
            )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staging is not None:  # it moves while it would be sent
            return
        try:
            super()._push_from_checkpoint(checkpoint_folder)
        except Exception as error:  # training does not depend on it
            logger.warning("cannot push %s: %s", checkpoint_folder, first_line(error))

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        for job in getattr(getattr(self, "push_in_progress", None), "jobs", ()):
            if (error := job.exception()) is not None:
                logger.warning("a push to the hub has failed: %s", first_line(error))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:  # noqa: ANN401
        root, writes = Path(super()._get_output_dir(trial)), self.args.should_save
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        staging = root / _STAGING
        if writes:
            shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed
        self.accelerator.wait_for_everyone()
        try:
            self._staging = staging
            super()._save_checkpoint(model, trial)  # every rank writes its random state
            self._staging = None
            self.accelerator.wait_for_everyone()
            self._name_best(root)  # each rank loads it by this name
            if writes:
                made = staging / name
                self.state.save_to_json(str(made / "trainer_state.json"))
                (made / STATE).write_text(json.dumps(self._state_of_run()))
                if not self.args.save_only_model:
                    warn_of_random_states(made, self.accelerator)
                replace_folder(made, root / name)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch has no error of its own
            raise OSError(
                f"cannot write the checkpoint {root / name}: {error}; earlier ones are as they were"
            ) from error
        finally:
            self._staging = None
            if writes:
                shutil.rmtree(staging, ignore_errors=True)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(root / name))
        if writes:
            rotate_checkpoints(
                output_dir=str(root),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        self.accelerator.wait_for_everyone()

    def _name_best(self, root: Path) -> None:
        """Let `metric_for_best_model` point at the best checkpoint's place, not at the staging."""
        step = self.state.best_global_step
        best = root / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        if step and (best.is_dir() or step == self.state.global_step):
            self.state.best_model_checkpoint = str(best)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        """Write README.md into the output folder: what was trained, from what, and with what.

        TRL's own card would say GRPO, and cite its paper, whatever the algorithm is.

        Args:
            model_name: Heads the card.
            dataset_name: On the hub.
            tags: Further tags.
        """
        if not self.is_world_process_zero():
            return
        base = getattr(self.model.config, "_name_or_path", "")
        base = "" if os.path.isdir(base) else base
        more = [tags] if isinstance(tags, str) else tags or []
        head = ["library_name: transformers", f"tags: [{', '.join(['polopt', 'trl', *more])}]"]
        head += [f"base_model: {base}"] if base else []
        head += [f"datasets: {dataset_name}"] if dataset_name else []
        versions = f"TRL {trl.__version__}, transformers {transformers.__version__}"
        rule, objective = self.algorithm.advantage, self.algorithm.objective
        lines = [
            *("---", *head, "---", "", f"# {model_name or 'Model'}", ""),
            f"Trained by reinforcement learning{f' from {base}' if base else ''} with polopt's "
            f"`PolicyTrainer` on {versions}.",
            "",
            f"- loss: `{objective}`",
            f"- advantage: `{getattr(rule.estimate, '__name__', rule.estimate)}` "
            f"{dict(rule.settings)}, {'whitened' if rule.whiten else 'not whitened'}",
            f"- sampling: `{self.algorithm.sampling}`",
            f"- rewards: {', '.join(self.reward_func_names)}",
            "",
        ]
        path = Path(self.args.output_dir) / "README.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines), encoding="utf-8")


def warn_of_random_states(checkpoint: Path, accelerator: Any) -> None:  # noqa: ANN401
    """Say that ranks have no random state in a checkpoint, on the main rank."""
    count = accelerator.num_processes
    names = [f"rng_state_{rank}.pth" for rank in range(count)] if count > 1 else ["rng_state.pth"]
    missing = [name for name in names if not (checkpoint / name).exists()]
    if missing and accelerator.is_main_process:
        logger.warning(
            "%s lacks %s, as where hosts do not share the file system, or another number of ranks "
            "wrote it: a run that goes on from it does so with other random numbers, and not "
            "exactly as it would have without the interruption.", checkpoint, ", ".join(missing),
        )  # fmt: skip


def replace_folder(made: Path, target: Path) -> None:
    """Bring a folder to the disk and give it its name; one of that name goes when this is there.

    A kill between the two renames leaves the old one under another name: see `recover_folder`.

    Args:
        made: The complete folder, on the same file system.
        target: Its name.
    """
    sync(made)
    old = _old(target)
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    made.rename(target)
    _sync_one(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover_folder(target: Path) -> None:
    """Give a folder its name back if it was killed in the middle of `replace_folder`."""
    if not target.exists() and _old(target).exists():
        _old(target).rename(target)


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def sync(folder: Path) -> None:
    """Bring a folder and all in it to the disk."""
    for path in [*folder.rglob("*"), folder]:
        _sync_one(path)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
