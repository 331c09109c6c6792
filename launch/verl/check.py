"""Checks an import against what is installed: TRL, accelerate, and polopt's own job."""

import copy
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from polopt.launch.recipe import RecipeError

__all__ = ["check"]


def check(recipe: dict[str, Any], accelerate: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Check a recipe as `polopt train --dry-run` does, and the keys of accelerate's file.

    Args:
        recipe: The tree of recipe.yaml.
        accelerate: The tree of accelerate.yaml.

    Returns:
        What was checked against, and the problems, one sentence each.
    """
    try:
        versions = [f"{name} {version(name)}" for name in ("trl", "accelerate", "transformers")]
    except PackageNotFoundError as error:
        return [f"not checked: {error.name} is not installed (pip install 'polopt[trl]')"], []
    return versions, [*_accelerate(accelerate), *_job(recipe)]


def _accelerate(tree: dict[str, Any]) -> list[str]:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    known = set(ClusterConfig.__dataclass_fields__)
    options = {action.dest for action in launch_command_parser()._actions}
    problems = [f"accelerate.yaml: unknown key {key!r}" for key in tree if key not in known]
    for section in ("fsdp_config", "parallelism_config"):
        problems += [
            f"accelerate.yaml: unknown key '{section}.{key}'"
            for key in tree.get(section, {})
            if key not in options
        ]
    return problems


def _job(recipe: dict[str, Any]) -> list[str]:
    from polopt.launch.job import prepare

    try:
        prepare(copy.deepcopy(recipe), name="imported").arithmetic()
    except RecipeError as error:
        return [f"polopt train --dry-run: {line}" for line in str(error).splitlines()[:1]]
    return []
