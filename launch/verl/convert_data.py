"""Data and rewards: the section `task`."""

from typing import Any

from polopt.launch.verl.plan import Plan

__all__ = ["convert_data"]

_MODEL = "actor_rollout_ref.model."
_OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg."


def convert_data(plan: Plan) -> None:
    """Write the section `task`: verl's parquet rows and the rewards."""
    task: dict[str, Any] = {"use": "dataset"}
    task["train_files"] = plan.texts("data.train_files")
    task["eval_files"] = plan.texts("data.val_files")
    how = "read by polopt: prompt, data_source, reward_model.ground_truth, extra_info"
    plan.say("data.train_files", "ours", "task.train_files", how)
    plan.say("data.val_files", "ours", "task.eval_files", "one set; verl reports per data_source")
    if not task["eval_files"]:
        plan.traps.append("data.val_files is empty: the task holds out 1 % of the prompts")
    task["prompt_key"] = plan.text("data.prompt_key")
    plan.say("data.prompt_key", "ours", "task.prompt_key", "")
    task["max_prompt_length"] = plan.integer("data.max_prompt_length", low=1)
    task["tokenizer"] = plan.text(_MODEL + "path")
    _long_prompts(plan, task)
    plan.trainer["shuffle_dataset"] = plan.flag("data.shuffle")
    plan.say("data.shuffle", "exact", "trainer.shuffle_dataset", "other samplers, other orders")
    plan.default("data.shuffle", "trainer.shuffle_dataset", "verl: on")
    seed = plan.value("data.seed")
    plan.sections["seed"] = plan.integer("data.seed") if seed is not None else 0
    if plan.sections["seed"] >= 2**32:
        raise plan.fail("data.seed", "below 4294967296")
    plan.say(
        "data.seed",
        "approximate" if seed is not None else "no effect",
        "seed",
        "not the same numbers in another framework" if seed is not None else "null",
    )
    limits = {"train_max_samples": "train_limit", "val_max_samples": "eval_limit"}
    for name, argument in limits.items():
        limit = plan.integer(f"data.{name}", low=-1)
        if limit > 0:
            task[argument] = limit
        plan.say(
            f"data.{name}",
            "ours" if limit > 0 else "no effect",
            f"task.{argument}" if limit > 0 else "",
            "" if limit > 0 else "-1: all rows",
        )
    workers = plan.integer("data.dataloader_num_workers")
    plan.trainer["dataloader_num_workers"] = 0
    plan.say(
        "data.dataloader_num_workers",
        "approximate",
        "trainer.dataloader_num_workers",
        f"{workers} in verl; the rows are in memory here, no workers are needed",
    )
    template = plan.value("data.apply_chat_template_kwargs")
    template = dict(template) if isinstance(template, dict) else {}
    prefix = "data.apply_chat_template_kwargs."
    for name in [n for n in plan.names() if n.startswith(prefix)]:
        template[name[len(prefix) :]] = plan.value(name)
        plan.say(name, "exact", "trainer.chat_template_kwargs", "")
    plan.say(prefix.rstrip("."), "exact", "trainer.chat_template_kwargs", "")
    if template:
        plan.trainer["chat_template_kwargs"] = template
    _reward(plan, task)
    plan.sections["task"] = task


def _long_prompts(plan: Plan, task: dict[str, Any]) -> None:
    drop, cut = plan.flag("data.filter_overlong_prompts"), plan.text("data.truncation")
    what = "drop" if drop else "refuse" if cut == "error" else "cut"
    task["overlong_prompts"] = what
    plan.say(
        "data.filter_overlong_prompts",
        "ours",
        "task.overlong_prompts",
        "longer prompts are dropped and counted" if drop else f"off: data.truncation says {what}",
    )
    if drop:
        how = "no effect", "longer prompts are dropped first"
    elif cut == "error":
        how = "ours", "stops at a long prompt; before training, where verl meets it later"
    else:
        kept = "as left does" if cut == "left" else f"where verl cuts by {cut!r}"
        how = "approximate", f"the last message loses its beginning, {kept}; the template stays"
    plan.say("data.truncation", how[0], "task.overlong_prompts", how[1])


def _reward(plan: Plan, task: dict[str, Any]) -> None:
    rewards: list[dict[str, Any]] = [{"use": "BySource"}]
    path = plan.value("reward.custom_reward_function.path")
    name = plan.text("reward.custom_reward_function.name")
    if path is not None:
        rewards = [{"use": "FromFile", "path": str(path), "name": name}]
        how = "called per sample as verl does; a dictionary gives its 'score'"
        plan.say("reward.custom_reward_function.path", "ours", "task.rewards", how)
        plan.say("reward.custom_reward_function.name", "ours", "task.rewards", "")
    else:
        plan.say("reward.custom_reward_function.path", "no effect", "", "null: by data_source")
        if not all("gsm8k" in file.lower() for file in task["train_files"]):
            plan.traps.append(
                "verl chooses the reward by data_source; polopt knows GSM8K, MATH, NuminaMath and "
                "DAPO's, and compares by math-verify (pip install 'polopt[math]'): for other "
                "sources name task.rewards"
            )
        plan.say("reward.custom_reward_function.name", "no effect", "", "no path is set")
    manager = plan.text("reward.reward_manager.name") or "naive"
    if manager in ("naive", "prime", "batch", "dapo"):
        plan.say("reward.reward_manager.name", "ours", "task.rewards", f"{manager}: one score each")
    else:
        plan.say(
            "reward.reward_manager.name",
            "refused",
            "",
            f"the reward manager {manager!r} is not known; with --allow scores by data_source",
        )
    model = plan.flag("reward.reward_model.enable")
    plan.say(
        "reward.reward_model.enable",
        "refused" if model else "no effect",
        "",
        "a reward model is not imported: one that is a sequence classifier goes into task.rewards "
        "as {use: RewardModel, path: …}"
        if model
        else "off",
    )
    plan.say(
        "reward.reward_model.model_path",
        "refused" if model else "no effect",
        "",
        "see reward_model.enable" if model else "no reward model",
    )
    _unused(plan, model=model)
    task["rewards"] = rewards
    _overlong(plan, rewards)


def _overlong(plan: Plan, rewards: list[dict[str, Any]]) -> None:
    """Convert the punishment of long answers: `overlong_cache`, or a reward where that differs."""
    length = "reward.reward_kwargs.max_resp_len"
    if not plan.flag(_OVERLONG + "enable", default=False):
        for key in ("enable", "len", "penalty_factor", "log"):
            plan.say(_OVERLONG + key, "no effect", "", "overlong_buffer_cfg.enable is off")
        plan.say(length, "no effect", "", "no overlong buffer")
        return
    budget = plan.integer("data.max_response_length")
    longest = plan.integer(length, low=1, default=budget)
    if not plan.is_set(_OVERLONG + "len"):
        raise plan.fail(_OVERLONG + "enable", "false, or given overlong_buffer_cfg.len")
    width = plan.integer(_OVERLONG + "len", low=1)
    if width > longest:
        raise plan.fail(_OVERLONG + "len", f"at most max_resp_len = {longest}")
    factor = plan.number(_OVERLONG + "penalty_factor", default=1.0)
    plan.say(_OVERLONG + "log", "inert", "", "every reward is logged by itself")
    if factor == 1.0 and longest == budget:
        plan.sections["algorithm"]["sampling"]["overlong_cache"] = width
        target = "algorithm.sampling.overlong_cache"
        plan.say(_OVERLONG + "enable", "ours", target, "from 0 to -1, which TRL does not have")
        plan.say(_OVERLONG + "len", "exact", target, "")
        plan.say(_OVERLONG + "penalty_factor", "exact", target, "1")
        plan.say(length, "exact", "trainer.max_completion_length", "")
        return
    rewards.append({"use": "Length", "limit": longest, "cache": width})
    plan.trainer["reward_weights"] = [1.0, factor]
    why = "a second reward: overlong_cache has no factor, and ends at max_completion_length"
    plan.say(_OVERLONG + "enable", "ours", "task.rewards", why)
    plan.say(_OVERLONG + "len", "exact", "task.rewards.1.cache", "")
    plan.say(
        _OVERLONG + "penalty_factor", "converted", "trainer.reward_weights", f"[1, {factor:g}]"
    )
    plan.say(length, "exact", "task.rewards.1.limit", "")


def _unused(plan: Plan, *, model: bool) -> None:
    """Say of settings of things that are off that they have no effect."""
    off = {
        "reward.reward_model.": model,
        "reward_model.model.": model,
        "reward_model.micro_batch_size": model,
        "distillation.": plan.flag("distillation.enabled"),
        "actor_rollout_ref.rollout.multi_turn.": plan.flag(
            "actor_rollout_ref.rollout.multi_turn.enable"
        ),
        _MODEL + "mtp.": plan.flag(_MODEL + "mtp.enable"),
        "algorithm.pf_ppo.": plan.flag("algorithm.use_pf_ppo"),
    }
    for prefix, on in off.items():
        for name in plan.names():
            if not on and name.startswith(prefix):
                plan.say(name, "no effect", "", f"{prefix.rstrip('.')} is off")
