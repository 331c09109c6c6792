"""Loss settings: from verl's keys to the section `algorithm` of a recipe."""

from math import isfinite
from typing import Any

from polopt.launch.verl.convert_surrogate import convert_aggregation, convert_surrogate
from polopt.launch.verl.plan import Plan

__all__ = ["convert_loss"]

_ACTOR = "actor_rollout_ref.actor."
_CORRECTION = "algorithm.rollout_correction."
_ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "grpo_passk": "pass_at_k",
    "gdpo": "gdpo",
    "gpg": "gpg",
    "opo": "opo",
    "remax": "remax",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
}
_WHITENED = "whitened over the answers of a batch, in verl over their tokens"
_DIFFERS = {
    "reinforce_pp_baseline": _WHITENED,
    "gdpo": _WHITENED,
    "gpg": "scaled by the groups with signal, in verl by the rewards that are not zero",
}
_KL = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
    "kl+": "k1+",
    "k1+": "k1+",
    "abs+": "abs+",
    "mse+": "k2",
    "k2+": "k2",
    "low_var_kl+": "k3+",
    "k3+": "k3+",
}


def convert_loss(plan: Plan) -> None:
    """Write the section `algorithm`; in a refused case it holds the nearest thing."""
    estimator = plan.text("algorithm.adv_estimator")
    plan.default("algorithm.adv_estimator", "algorithm.base", f"verl: {estimator}")
    base = _ESTIMATORS.get(estimator)
    if base is None:
        plan.say(
            "algorithm.adv_estimator",
            "refused",
            "",
            f"polopt has no estimator {estimator!r}; with --allow it becomes grpo",
        )
        base = "grpo"
    else:
        differs = _DIFFERS.get(base, "")
        plan.say(
            "algorithm.adv_estimator",
            "approximate" if differs else "exact",
            "algorithm.base",
            f"{base} of polopt.losses" + (f"; {differs}" if differs else ""),
        )
    section: dict[str, Any] = {"use": "adjusted", "base": {"use": base}}
    if base == "ppo":
        section["base"] |= _critic(plan)
    else:
        for name in ("gamma", "lam"):
            plan.say(f"algorithm.{name}", "no effect", "", f"{estimator} does not read it")
    if base == "reinforce_pp":
        gamma = plan.number("algorithm.gamma")
        section["base"]["gamma"] = gamma
        plan.say("algorithm.gamma", "exact", "algorithm.base.gamma", "")
    section["surrogate"], ratio = convert_surrogate(plan)
    objective: dict[str, Any] = {"ratio": ratio, **convert_aggregation(plan), **_kl(plan)}
    section["objective"] = objective
    _entropy(plan, objective)
    section["corrections"] = _corrections(plan)
    settings = _advantage(plan, base)
    if settings:
        section["advantage"] = settings
    section["sampling"] = _sampling(plan)
    plan.sections["algorithm"] = section


def _critic(plan: Plan) -> dict[str, Any]:
    names = {"gamma": "algorithm.gamma", "lam": "algorithm.lam"}
    found: dict[str, Any] = {k: plan.number(v) for k, v in names.items()}
    for argument, name in names.items():
        plan.say(name, "exact", f"algorithm.base.{argument}", "")
        plan.default(name, f"algorithm.base.{argument}", f"verl: {found[argument]:g}")
    found["value_clip"] = plan.number("critic.cliprange_value")
    found["whiten"] = True
    plan.say("critic.cliprange_value", "exact", "algorithm.base.value_clip", "")
    plan.default("critic.cliprange_value", "algorithm.base.value_clip", "verl clips values at 0.5")
    return found


def _kl(plan: Plan) -> dict[str, Any]:
    in_loss, in_reward = plan.flag(_ACTOR + "use_kl_loss"), plan.flag("algorithm.use_kl_in_reward")
    kind_name = _ACTOR + "kl_loss_type" if in_loss or not in_reward else "algorithm.kl_penalty"
    kind = plan.text(kind_name)
    kl = _KL.get(kind)
    target = "algorithm.objective.kl_coef"
    if (in_loss or in_reward) and kl is None:
        plan.say(
            kind_name, "refused", "", f"polopt has no estimator {kind!r} here; with --allow k3"
        )
    coef = 0.0
    if in_loss:
        coef = plan.number(_ACTOR + "kl_loss_coef")
        plan.say(_ACTOR + "use_kl_loss", "converted", target, f"kl_coef = kl_loss_coef = {coef:g}")
        plan.say(_ACTOR + "kl_loss_coef", "exact", target, "")
        plan.default(_ACTOR + "kl_loss_coef", target, f"verl: {coef:g}")
        if kl is not None:
            plan.say(
                _ACTOR + "kl_loss_type",
                "exact",
                "algorithm.objective.kl",
                f"{kl}; verl cuts its gradient where π_ref / π > 13.7, polopt does not"
                if kl == "k3"
                else kl,
            )
    else:
        off = "use_kl_loss is off: no divergence in the loss"
        plan.say(_ACTOR + "use_kl_loss", "exact", target, "0, no reference model for the loss")
        plan.say(_ACTOR + "kl_loss_coef", "no effect", "", off)
        plan.say(_ACTOR + "kl_loss_type", "no effect", "", off)
    _reward_kl(plan, in_loss=in_loss, in_reward=in_reward, kl=kl)
    if in_reward and not in_loss:
        coef = plan.number("algorithm.kl_ctrl.kl_coef")
        return {"kl_coef": coef, "kl": kl or "k3", "kl_in": "reward", "kl_reweighted": False}
    if in_loss:
        plan.defaults.append(
            (
                "(no such key)",
                "algorithm.objective.kl_reweighted",
                "false: verl does not multiply the divergence by the ratio, "
                "TRL does (use_bias_correction_kl)",
            )
        )
    return {"kl_coef": coef, "kl": kl or "k3", "kl_in": "loss", "kl_reweighted": False}


def _reward_kl(plan: Plan, *, in_loss: bool, in_reward: bool, kl: str | None) -> None:
    names = (
        "kl_penalty",
        "kl_ctrl.kl_coef",
        "kl_ctrl.type",
        "kl_ctrl.horizon",
        "kl_ctrl.target_kl",
    )
    if not in_reward:
        plan.say("algorithm.use_kl_in_reward", "no effect", "", "off, as in the recipe")
        for name in names:
            plan.say(f"algorithm.{name}", "no effect", "", "only read with use_kl_in_reward=True")
        return
    if in_loss:
        plan.say(
            "algorithm.use_kl_in_reward",
            "refused",
            "",
            "use_kl_loss is on as well: polopt has the divergence in the loss or in the "
            "reward; with --allow it stays in the loss",
        )
        for name in names:
            plan.say(f"algorithm.{name}", "no effect", "", "see use_kl_in_reward")
        return
    plan.say(
        "algorithm.use_kl_in_reward",
        "ours",
        "algorithm.objective.kl_in",
        "reward: subtracted from the reward before advantages, which TRL cannot",
    )
    if kl is not None:
        plan.say("algorithm.kl_penalty", "exact", "algorithm.objective.kl", kl)
    plan.say("algorithm.kl_ctrl.kl_coef", "exact", "algorithm.objective.kl_coef", "")
    if plan.text("algorithm.kl_ctrl.type") == "adaptive":
        plan.say(
            "algorithm.kl_ctrl.type",
            "refused",
            "",
            "the adaptive coefficient is not imported; with --allow it stays constant",
        )
    else:
        plan.say("algorithm.kl_ctrl.type", "exact", "algorithm.objective.kl_coef", "constant")
    for name in ("kl_ctrl.horizon", "kl_ctrl.target_kl"):
        plan.say(f"algorithm.{name}", "no effect", "", "only read by the adaptive coefficient")


def _entropy(plan: Plan, objective: dict[str, Any]) -> None:
    name = _ACTOR + "entropy_coeff"
    objective["entropy_coef"] = coef = plan.number(name)
    plan.say(
        name,
        "exact",
        "algorithm.objective.entropy_coef",
        "0: no entropy bonus" if coef == 0 else "",
    )


def _corrections(plan: Plan) -> list[dict[str, Any]]:
    weight, reject = plan.value(_CORRECTION + "rollout_is"), plan.value(_CORRECTION + "rollout_rs")
    target = "algorithm.corrections"
    found: list[dict[str, Any]] = []
    threshold = plan.value(_CORRECTION + "rollout_is_threshold")
    if weight in ("token", "sequence"):
        bounds = _bounds(threshold)
        if bounds is None:
            raise plan.fail(_CORRECTION + "rollout_is_threshold", "a number or low_high")
        low, high = bounds
        kind = {"use": "Reweight" if low is None else "Reject", "level": weight, "high": high}
        found.append(kind if low is None else {**kind, "low": low})
        plan.say(_CORRECTION + "rollout_is", "ours", target, f"{kind['use']} per {weight}")
        plan.say(_CORRECTION + "rollout_is_threshold", "exact", f"{target}.high", "")
        plan.default(_CORRECTION + "rollout_is_threshold", f"{target}.high", f"verl: {threshold}")
    elif weight is None:
        plan.say(_CORRECTION + "rollout_is", "exact", target, "none")
        plan.say(_CORRECTION + "rollout_is_threshold", "no effect", "", "rollout_is is off")
        plan.default(
            _CORRECTION + "rollout_is",
            target,
            "none: verl has no importance correction by default, TRL has one",
        )
    else:
        plan.say(
            _CORRECTION + "rollout_is",
            "refused",
            "",
            f"polopt has no level {weight!r}; with --allow no correction",
        )
    rejection = _rejection(plan, reject, target)
    return [*found, *([rejection] if rejection else [])]


def _rejection(plan: Plan, rule: Any, target: str) -> dict[str, Any] | None:  # noqa: ANN401
    name, limit_name = _CORRECTION + "rollout_rs", _CORRECTION + "rollout_rs_threshold"
    if rule is None:
        plan.say(name, "exact", target, "none")
        plan.say(limit_name, "no effect", "", "rollout_rs is off")
        return None
    bounds = _bounds(plan.value(limit_name))
    pool, _, kind = str(rule).removeprefix("seq_").rpartition("_")
    levels = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
    found: dict[str, Any] | None = None
    how = ""
    if rule in levels and bounds and bounds[0] != 0:
        low, high = 1 / bounds[1], bounds[1] if bounds[0] is None else 1 / bounds[0]
        found = {"use": "Reject", "level": levels[rule], "low": low, "high": high, "weigh": False}
        how = f"verl's bounds hold for 1/ratio: kept in [{low:g}, {high:g}]"
    elif kind in ("k2", "k3") and pool in ("token", "sum", "mean", "max") and bounds:
        found = {"use": "RejectDivergent", "limit": bounds[1], "kl": kind, "pool": pool}
        how = f"kept where {kind} per {pool} is at most {bounds[1]:g}"
    if found is None:
        threshold = plan.value(limit_name)
        plan.say(
            name,
            "refused",
            "",
            f"no rejection {rule!r} with threshold {threshold!r} here; with --allow none",
        )
        plan.say(limit_name, "no effect", "", "see rollout_rs")
        return None
    count = "what is dropped leaves the mean in verl, here it counts as zero"
    plan.say(name, "approximate", target, f"{found['use']}, {how}; {count}")
    plan.say(limit_name, "converted", target, how)
    return found


def _bounds(value: Any) -> tuple[float | None, float] | None:  # noqa: ANN401
    """`2.0`, or `0.5_5.0` as Hydra and verl read it."""
    try:
        parts = [float(p) for p in str(value).split("_")]
    except ValueError:
        return None
    if not all(isfinite(p) for p in parts):
        return None
    if len(parts) == 1 and parts[0] > 0:
        return None, parts[0]
    return (parts[0], parts[1]) if len(parts) == 2 and 0 <= parts[0] < parts[1] else None


def _advantage(plan: Plan, base: str) -> dict[str, Any]:
    name = "algorithm.norm_adv_by_std_in_grpo"
    scale = plan.flag(name)
    if base == "grpo":
        plan.say(name, "converted", "algorithm.advantage.scale", "group" if scale else "none")
        return {"scale": "group" if scale else "none"}
    if base == "pass_at_k":
        plan.say(name, "converted", "algorithm.advantage.scale", str(scale).lower())
        return {"scale": scale}
    plan.say(name, "no effect", "", f"{base} does not read it")
    return {}


def _sampling(plan: Plan) -> dict[str, Any]:
    prefix, target = "algorithm.filter_groups.", "algorithm.sampling"
    section: dict[str, Any] = {"refill": None}
    if not plan.flag(prefix + "enable"):
        plan.say(prefix + "enable", "no effect", "", "off, as in the recipe")
        for name in ("metric", "max_num_gen_batches", "max_inflight_gen_batches"):
            plan.say(prefix + name, "no effect", "", "only read with filter_groups.enable=True")
        generated = plan.value("data.gen_batch_size", None)
        if generated is not None:
            plan.say(
                "data.gen_batch_size",
                "no effect",
                "",
                "without filter_groups it must equal train_batch_size",
            )
        return section
    metric = plan.text(prefix + "metric")
    section["refill"] = "correct" if metric == "acc" else "reward"
    plan.say(
        prefix + "enable",
        "ours",
        target,
        "groups without signal are replaced until the batch is full; TRL has no such thing",
    )
    plan.say(
        prefix + "metric",
        "ours"
        if metric in ("acc", "reward", "score", "seq_reward", "seq_final_reward")
        else "approximate",
        f"{target}.refill",
        f"{metric} -> {section['refill']}",
    )
    rounds = plan.integer(prefix + "max_num_gen_batches", low=-1)
    if rounds > 0:
        section["max_rounds"] = rounds
    plan.say(
        prefix + "max_num_gen_batches",
        "inert",
        f"{target}.max_rounds",
        "verl 0.9.1 ignores it; polopt bounds the rounds by it"
        if rounds > 0
        else "verl 0.9.1 ignores it; polopt's own bound of 8 rounds stands",
    )
    plan.say(prefix + "max_inflight_gen_batches", "inert", "", "scheduling of verl's trainer")
    plan.say(
        "data.gen_batch_size",
        "approximate",
        target,
        "polopt asks for as many further prompts as are missing, not for a fixed number",
    )
    return section
