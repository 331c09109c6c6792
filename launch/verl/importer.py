"""From the text of a launch script to a recipe and a report."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polopt.launch.recipe import dump
from polopt.launch.verl.batch import convert_batch
from polopt.launch.verl.convert_data import convert_data
from polopt.launch.verl.convert_loss import convert_loss
from polopt.launch.verl.convert_placement import convert_model, convert_placement
from polopt.launch.verl.convert_rollout import convert_rollout, server_version
from polopt.launch.verl.convert_steps import convert_steps
from polopt.launch.verl.convert_train import convert_optimizer, convert_trackers
from polopt.launch.verl.launches import read_launch
from polopt.launch.verl.plan import ImportFault, Plan
from polopt.launch.verl.rules import apply_rules
from polopt.launch.verl.schema import find
from polopt.launch.verl.shell_state import set_option
from polopt.launch.verl.traps import add_traps

__all__ = ["Imported", "import_script"]

ROWS = "data.rows"
"""What `--set` calls the number of training rows."""

_KINDS = {
    "sft": "supervised fine-tuning: TRL's SFTTrainer does that, polopt does not",
    "generation": "generation without training",
    "evaluation": "evaluation without training",
}
_ORDER = (
    "name",
    "project",
    "task",
    "model",
    "algorithm",
    "trainer",
    "evaluation",
    "launch",
    "seed",
)


@dataclass(frozen=True)
class Imported:
    """The result of an import.

    Attributes:
        plan: Rows, facts, traps and refusals.
        recipe: The tree of recipe.yaml; empty if the script trains nothing that can be.
        open_names: What is still to be filled in, by `--set` or in the recipe: (key, names).
    """

    plan: Plan
    recipe: dict[str, Any]
    open_names: list[tuple[str, tuple[str, ...]]]

    def texts(self) -> dict[str, str]:
        """The files of the import, by name."""
        head = f"# Imported from verl: {self.plan.launch.module or 'a list of overrides'}\n"
        return {
            "recipe.yaml": head + dump(self.recipe),
            "accelerate.yaml": head + dump(self.plan.accelerate),
            "vllm.txt": _server_text(self.plan, str(self.recipe["model"]["path"])),
        }


def import_script(source: str, given: Mapping[str, str] | None = None) -> Imported:
    """Read a script of verl, and map it.

    Args:
        source: A shell script or a list of overrides.
        given: Values for what only running it would tell; see `read_launch`. `data.rows` is
            the number of training rows.

    Raises:
        ValueError: If it cannot be read or a value does not fit; the message has the line.
        ModuleNotFoundError: If Hydra is not installed.
    """
    given = dict(given or {})
    rows = given.pop(ROWS, None)
    if rows is not None and not (rows.isdecimal() and 0 < len(rows) < 13):
        raise ImportFault(f"--set {ROWS}={rows} must be a whole number")
    launch = read_launch(source, given)
    plan = Plan(launch)
    if launch.kind in _KINDS:
        plan.refusals.append(f"line {launch.line}: {launch.module} is {_KINDS[launch.kind]}")
        apply_rules(plan)
        return Imported(plan, {}, [])
    _ask_for_numbers(plan)
    batch = convert_batch(plan)
    convert_placement(plan, batch)
    convert_loss(plan)
    convert_optimizer(plan, batch)
    convert_steps(plan, batch, int(rows) if rows else None)
    convert_trackers(plan)
    convert_rollout(plan, batch)
    convert_model(plan)
    convert_data(plan)
    apply_rules(plan)
    add_traps(plan)
    sections = {**plan.sections, "trainer": plan.trainer}
    recipe = {key: sections[key] for key in _ORDER if key in sections}
    return Imported(plan, recipe, _open(plan))


def _ask_for_numbers(plan: Plan) -> None:
    """Ask for all numbers at once that the script alone does not give."""
    missing = []
    for name in plan.names():
        item, key = plan.override(name), find(name)
        if item is None or not item.asks or key is None:
            continue
        if isinstance(key.default, bool | int | float) or re.search(
            r"\b(int|float|bool)\b", key.type
        ):
            missing.append((item.line, item.key, item.asks[0]))
    if missing:
        wanted = dict.fromkeys(ask for _, _, ask in missing)
        first = missing[0]
        sets = " ".join(map(set_option, wanted))
        others = f" (and {len(missing) - 1} more keys)" if len(missing) > 1 else ""
        raise ImportFault(
            f"line {first[0]}: {first[1]}{others} needs what only running the script would give: "
            f"supply {sets}"
        )


def _open(plan: Plan) -> list[tuple[str, tuple[str, ...]]]:
    harmless = ("trainer.experiment_name", "trainer.project_name", "trainer.default_local_dir")
    found = []
    for name in plan.names():
        item = plan.override(name)
        row = plan.rows.get(id(item))
        if (
            item
            and item.asks
            and name not in harmless
            and row
            and row.verdict not in ("inert", "no effect")
        ):
            found.append((item.key, item.asks))
    return found


def _server_text(plan: Plan, model: str) -> str:
    flags = []
    for name, value in plan.vllm.items():
        text = "" if value is None else value if isinstance(value, str) else json.dumps(value)
        flags.append(name if value is None else f"{name} {shlex.quote(text)}")
    path = model if model.startswith("~/") and " " not in model else shlex.quote(model)
    command = " \\\n  ".join([f"vllm serve {path}", *flags])
    return (
        f"# Flags of vLLM {server_version()}. The recipe generates in the training processes\n"
        "# (trainer.vllm_mode: colocate). For a server on GPUs of its own, start this and set\n"
        "# trainer.vllm_mode: server.\n"
        f"VLLM_SERVER_DEV_MODE=1 {command}\n"
    )
