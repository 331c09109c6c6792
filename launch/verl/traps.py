"""What does not do in verl what the author of a script may think."""

from polopt.launch.verl import schema
from polopt.launch.verl.plan import Plan

__all__ = ["add_traps"]


_CONFIG = ("--config-name", "--config-path", "--config-dir", "-cn", "-cp", "-cd")


def add_traps(plan: Plan) -> None:
    """Add the traps of single overrides and of the command to the plan."""
    launch = plan.launch
    own = launch.kind == "other" or any(o in launch.options for o in _CONFIG)
    if launch.kind == "other":
        plan.traps.append(
            f"line {launch.line}: {launch.module} is not verl.trainer.main_ppo: defaults are taken "
            "from main_ppo, those of its own configuration may differ"
        )
    for name, value in launch.options.items():
        if name in _CONFIG:
            plan.traps.append(
                f"line {launch.line}: {name}={value} brings defaults of its own, which are not read"
            )
    for item in launch.overrides:
        where = f"line {item.line}: " if item.line else ""
        plan.traps.extend(f"{where}{item.key}: {text}" for text in item.traps)
        if not own:
            _plus(plan, item.key, item.prefix, where)
    moved = [f"{o.key} is {o.name}" for o in launch.overrides if o.name != o.key]
    if moved:
        plan.launch.remarks.append(
            f"keys that have moved are read at their place in verl {schema.VERSION}: "
            + "; ".join(moved)
        )
    plan.traps.extend(
        f"line {item.line}: {item.key} never reaches verl: bash ends the command above this line "
        "(a comment, a blank line, or a blank behind the backslash)"
        for item in launch.lost
    )
    used = plan.number("actor_rollout_ref.rollout.gpu_memory_utilization")
    if used > 0.6 and plan.trainer.get("vllm_enable_sleep_mode"):
        plan.traps.append(
            f"gpu_memory_utilization={used:g} is copied; verl can move the trainer's states "
            "off the GPU while it generates, TRL cannot: check with polopt plan, start at 0.5"
        )
    reference = plan.sections["algorithm"]["objective"]["kl_coef"]
    if reference and plan.trainer.get("accelerator_config"):
        plan.traps.append(
            "a reference model is needed: under FSDP2 TRL gathers it whole on every GPU while it "
            "runs, 2 bytes per parameter; where that does not fit, drop the divergence or use "
            "DeepSpeed ZeRO-3"
        )
    estimator = plan.text("algorithm.adv_estimator")
    if estimator == "gae":
        plan.traps.append(
            "PPO's critic: settings under critic. (learning rate, batch, warm-up, its own model) "
            "have no section in the recipe"
        )


def _plus(plan: Plan, key: str, prefix: str, where: str) -> None:
    found = schema.keys().get(key) or schema.find(key)
    if found is None:
        return
    if found.home == "plus" and prefix == "" and key not in _LEGACY:
        plan.traps.append(
            f"{where}{key} is not in verl's schema: Hydra accepts it only as +{key}, without the "
            "+ verl stops"
        )
    elif found.home == "ppo" and prefix == "+" and found.default not in (None, {}, []):
        plan.traps.append(
            f"{where}+{key}: the key is in verl's schema already, Hydra stops at the +"
        )


_LEGACY = frozenset(("hydra.searchpath",))
