"""The surrogate and its clip, and the aggregation: `policy_loss`, `clip_ratio`, `loss_agg_mode`."""

from typing import Any

from polopt.launch.verl.plan import Plan

__all__ = ["convert_aggregation", "convert_surrogate"]

_ACTOR = "actor_rollout_ref.actor."
_POLICY = _ACTOR + "policy_loss."
_AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}


def _clip(plan: Plan) -> tuple[float, float]:
    both = _ACTOR + "clip_ratio"
    names = (_ACTOR + "clip_ratio_low", _ACTOR + "clip_ratio_high")
    low, high = (plan.number(n if plan.value(n) is not None else both) for n in names)
    item = plan.override(both)
    if any(plan.value(name) is None for name in names):
        plan.say(both, "exact", "algorithm.surrogate", "stands in for a bound that is null")
    elif item is not None:
        plan.say(
            _ACTOR + "clip_ratio",
            "inert",
            "",
            f"verl 0.9.1 reads clip_ratio_low={low:g} and clip_ratio_high={high:g} instead",
        )
        if plan.number(both) != low or low != high:
            plan.traps.append(
                f"line {item.line}: clip_ratio={item.text} does nothing in verl 0.9.1, which clips "
                f"at clip_ratio_low={low:g}, clip_ratio_high={high:g}; the recipe does the same"
            )
    return low, high


def convert_surrogate(plan: Plan) -> tuple[dict[str, Any], str]:
    """Return what a step contributes, as a call for the recipe, and the level of the ratio."""
    low, high = _clip(plan)
    mode = plan.text(_POLICY + "loss_mode") or "vanilla"
    dual = plan.number(_ACTOR + "clip_ratio_c")
    ratio, target = "token", "algorithm.surrogate"
    used = {"low", "high"}
    section: dict[str, Any]
    if mode in ("vanilla", "gspo"):
        section = {"use": "Clip", "low": low, "high": high}
        if mode == "vanilla":
            section["dual"] = dual
            used.add("dual")
        else:
            ratio = "sequence"
    elif mode == "cispo":
        section = {"use": "Cispo", "low": low, "high": high}
    elif mode == "geo_mean":
        section = {"use": "GeometricClip", "low": low, "high": high}
    elif mode == "sapo":
        section = {
            "use": "SoftGate",
            "tau_positive": plan.number(_ACTOR + "tau_pos", default=1.0),
            "tau_negative": plan.number(_ACTOR + "tau_neg", default=1.05),
        }
        used = {"tau"}
    elif mode == "clip_cov":
        section = {
            "use": "ClipCov",
            "low": low,
            "high": high,
            "share": plan.number(_POLICY + "clip_cov_ratio"),
            "cov_low": plan.number(_POLICY + "clip_cov_lb"),
            "cov_high": plan.number(_POLICY + "clip_cov_ub"),
        }
        used.add("clip_cov")
    elif mode == "kl_cov":
        section = {
            "use": "KlCov",
            "coef": plan.number(_POLICY + "ppo_kl_coef"),
            "share": plan.number(_POLICY + "kl_cov_ratio"),
        }
        used = {"kl_cov"}
    elif mode == "gpg":
        section, ratio, used = {"use": "Plain"}, "none", set()
    else:
        section = {"use": "Clip", "low": low, "high": high, "dual": dual}
        used.add("dual")
        plan.say(
            _POLICY + "loss_mode",
            "refused",
            "",
            f"polopt has no surrogate {mode!r}; with --allow it becomes PPO's clip",
        )
    ours = {"geo_mean", "clip_cov", "kl_cov", "gpg"}
    if mode != "vanilla" and not plan.refuses(_POLICY + "loss_mode"):
        plan.say(
            _POLICY + "loss_mode",
            "ours" if mode in ours else "converted",
            target,
            f"{section['use']}, ratio per {ratio}",
        )
    elif mode == "vanilla":
        plan.say(_POLICY + "loss_mode", "exact", target, "PPO's clip on token ratios")
    _clip_rows(plan, mode, used, target)
    return section, ratio


def _clip_rows(plan: Plan, mode: str, used: set[str], target: str) -> None:
    groups = {
        "low": ("clip_ratio_low", "low"),
        "high": ("clip_ratio_high", "high"),
        "dual": ("clip_ratio_c", "dual"),
    }
    for group, (key, argument) in groups.items():
        if group in used:
            plan.say(_ACTOR + key, "exact", f"{target}.{argument}", "")
        else:
            plan.say(_ACTOR + key, "no effect", "", f"loss_mode={mode} does not read it")
    if {"low", "high"} <= used:
        plan.default(_ACTOR + "clip_ratio_low", f"{target}.low", "verl: 0.2")
        plan.default(_ACTOR + "clip_ratio_high", f"{target}.high", "verl: 0.2")
    if "dual" in used:
        plan.default(
            _ACTOR + "clip_ratio_c",
            f"{target}.dual",
            "verl's dual clip is on at 3.0, TRL's delta is off",
        )
    for key in ("tau_pos", "tau_neg"):
        if "tau" in used:
            plan.say(_ACTOR + key, "exact", f"{target}.tau", "")
        else:
            plan.say(_ACTOR + key, "no effect", "", f"loss_mode={mode} does not read it")
    for key, group in (
        ("clip_cov_ratio", "clip_cov"),
        ("clip_cov_lb", "clip_cov"),
        ("clip_cov_ub", "clip_cov"),
        ("ppo_kl_coef", "kl_cov"),
        ("kl_cov_ratio", "kl_cov"),
        ("dro_beta", "dro"),
    ):
        if group in used:
            plan.say(_POLICY + key, "ours", target, "")
        else:
            plan.say(_POLICY + key, "no effect", "", f"loss_mode={mode} does not read it")


def convert_aggregation(plan: Plan) -> dict[str, Any]:
    """Return how steps are summed up, as fields of the objective."""
    name = _ACTOR + "loss_agg_mode"
    mode, loss = plan.text(name), plan.text(_POLICY + "loss_mode")
    forced = loss in ("sapo", "geo_mean")
    aggregation = "sequence_mean" if forced else _AGGREGATIONS.get(mode)
    target, found = "algorithm.objective.aggregation", {}
    if aggregation is None:
        plan.say(
            name, "refused", "", f"polopt has no aggregation {mode!r}; with --allow token_mean"
        )
        aggregation = "token_mean"
    elif forced:
        plan.say(name, "no effect", "", f"loss_mode={loss} always takes the mean per sequence")
    else:
        plan.say(name, "exact", target, aggregation)
    if aggregation == "constant":
        scale = plan.value(_ACTOR + "loss_scale_factor")
        horizon = (
            plan.integer("data.max_response_length")
            if scale is None
            else plan.integer(_ACTOR + "loss_scale_factor", low=1)
        )
        found["horizon"] = horizon
        plan.say(_ACTOR + "loss_scale_factor", "exact", "algorithm.objective.horizon", "")
        if scale is None:
            plan.default(
                _ACTOR + "loss_scale_factor",
                "algorithm.objective.horizon",
                f"verl divides by the padded width; here max_response_length = {horizon}",
            )
    else:
        plan.say(
            _ACTOR + "loss_scale_factor",
            "no effect",
            "",
            "only read with loss_agg_mode=seq-mean-token-sum-norm",
        )
    plan.default(name, target, "verl: token-mean, over the tokens of one mini-batch")
    if loss == "gspo" and aggregation != "sequence_mean":
        plan.traps.append(
            f"loss_mode=gspo with loss_agg_mode={mode} is not the objective of GSPO's paper, "
            "which takes seq-mean-token-mean; imported as written"
        )
    return {"aggregation": aggregation, **found}
