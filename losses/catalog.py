"""The table of algorithms, generated from the presets and what is known of the peers.

`python -m polopt.losses.catalog docs/algorithms.md` writes the table there anew.
"""

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from polopt.losses import off_policy, outcome_presets, presets
from polopt.losses.algorithm import Algorithm

__all__ = ["Entry", "axes", "catalog", "markdown", "off_policy_catalog", "replace_table"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One named algorithm.

    Attributes:
        name: Of the preset.
        preset: The function.
        title: First sentence of its docstring, without links.
        paper: Link to its source.
        formula: Loss of one step, and the advantage where that is the point.
        peers: Who else has it, and where they differ.
    """

    name: str
    preset: Callable[..., Any]
    title: str
    paper: str
    formula: str
    peers: str


_CLIP = "−min(r·A, clip(r, 1−low, 1+high)·A)"

# Formula; peers: verl 0.9.1, TRL 1.16, TorchRL 0.14, OpenRLHF 0.11.
_FACTS = {
    "ppo": (
        _CLIP + ", A from GAE",
        "TorchRL `ClipPPOLoss`: Huber value loss by default, no ½ in `l2`; verl: dual clip 3 "
        "always on; OpenRLHF; TRL has no critic",
    ),
    "kl_ppo": (
        "−r·A + coef·(r − 1 − log r), A from GAE",
        "TorchRL `KLPENPPOLoss` adapts the coefficient at every forward, the paper once per update",
    ),
    "a2c": ("−A·log π, A from GAE", "TorchRL `A2CLoss`"),
    "reinforce": ("−(R − V)·log π", "TorchRL `ReinforceLoss`"),
    "grpo": (
        _CLIP + " + β·k3, A = (R − mean) / std",
        "all four; eps of the std: verl 1e-6, TRL 1e-4, OpenRLHF 1e-9; TRL multiplies k3 by r and "
        "divides by empty answers too",
    ),
    "dr_grpo": (
        _CLIP + " / horizon, A = R − mean",
        "TRL `dr_grpo` keeps the std unless `scale_rewards='none'`; verl divides by the padded "
        "width unless told a constant; OpenRLHF has no constant",
    ),
    "dapo": (
        _CLIP + ", mean over all tokens, A = (R − mean) / std, groups without signal replaced",
        "verl (filter by `np.std == 0`, which rounding defeats); TRL: no refill, divides by the "
        "average of the generation batch; TorchRL `DAPO` is the two bounds only",
    ),
    "gspo": (
        _CLIP + ", r = exp(mean of log-ratios)",
        "verl `gspo` bounds the log-ratio at 10; TRL and OpenRLHF spread per-token advantages over "
        "the sequence",
    ),
    "rloo": (
        _CLIP + ", r of the whole answer, A = R − mean of the others",
        "TRL `RLOOTrainer`, verl, OpenRLHF; a group of one: reward or zero in verl, zero here",
    ),
    "cispo": (
        "−sg(min(r, 1+high))·A·log π",
        "verl: two-sided by default; TRL: `epsilon_high` is the bound itself; TorchRL's gives "
        "clipped tokens no gradient, which is what CISPO exists to avoid",
    ),
    "sapo": ("−σ(τ(r − 1))·4/τ·A", "verl and TRL, same numbers"),
    "gmpo": (
        "−exp(mean of clipped log-ratios)·A",
        "verl `geo_mean` averages over the rows of the micro-batch; TRL experimental: an empty row "
        "adds −A",
    ),
    "clip_cov": (
        _CLIP + ", zero for drawn tokens of high covariance",
        "verl, per micro-batch; here over whatever batch the loop selects on",
    ),
    "kl_cov": (
        "−r·A, + coef·|log r| for tokens of the highest covariance",
        "verl, per micro-batch, coefficient 1 (its yaml says 0.1)",
    ),
    "gpg": (
        "−A·log π, A = α·(R − mean)",
        "verl takes α from non-zero rewards instead of groups with signal",
    ),
    "reinforce_pp": (
        _CLIP + ", A = whitened return to go of R − β·k1",
        "verl, OpenRLHF (biased variance)",
    ),
    "reinforce_pp_baseline": (
        _CLIP + " + β·k2, A = whitened (R − mean)",
        "verl, OpenRLHF; weighted by tokens everywhere, so a group without signal can get A ≠ 0",
    ),
    "remax": ("−A·log π, A = R − R(greedy)", "verl"),
    "opo": ("−A·log π, A = R − Σ l·R / Σ l", "verl"),
    "pass_at_k": (_CLIP + ", A = R_max − R_second for the best, 0 for the rest", "verl"),
    "gdpo": (
        _CLIP + ", A = whitened Σ w·(R_k − mean) / std",
        "verl whitens by tokens, TRL `normalize_then_sum` by samples",
    ),
}


# y = r + γ·(1 − terminated)·…; δ = y − Q; H is Huber's loss, or δ² where asked for.
_REPLAYING = {
    "sac": (
        "Σ₁₂ δ² with … = min Q̄(s′, a′) − α·log π(a′|s′); policy α·log π − min Q; temperature "
        "−log α·(log π + H̄)",
        "TorchRL `SACLoss`: Huber by default; stable-baselines3 takes the policy's gradient after "
        "the critics' step",
    ),
    "discrete_sac": (
        "as sac, with expectations under π in place of samples",
        "TorchRL `DiscreteSACLoss`: Huber by default",
    ),
    "td3": (
        "Σ₁₂ δ² with … = min Q̄(s′, π̄(s′) + clipped noise); policy −Q₁(s, π(s)), delayed",
        "TorchRL `TD3Loss`: no delay, noise not scaled to the range of actions, Huber by default, "
        "priorities δ²; stable-baselines3",
    ),
    "ddpg": (
        "δ² with … = Q̄(s′, π̄(s′)); policy −Q(s, π(s))",
        "TorchRL `DDPGLoss`: no target of the policy by default, priorities δ²; "
        "stable-baselines3 builds it from TD3",
    ),
    "dqn": (
        "H(δ) with … = max Q̄(s′, ·)",
        "TorchRL `DQNLoss`: δ² by default, priorities δ²; stable-baselines3",
    ),
    "double_dqn": (
        "H(δ) with … = Q̄(s′, argmax Q(s′, ·))",
        "TorchRL `DQNLoss(double_dqn=True)`; stable-baselines3 has none",
    ),
}


def catalog() -> list[Entry]:
    """Return every preset, in the order of the table.

    A preset without a row has an empty formula; a test asks for the row.
    """
    return _entries((presets, outcome_presets), _FACTS)


def off_policy_catalog() -> list[Entry]:
    """Return every off-policy algorithm; a test asks for the row of each."""
    return _entries((off_policy,), _REPLAYING)


def _entries(modules: Sequence[ModuleType], facts: Mapping[str, tuple[str, str]]) -> list[Entry]:
    public = {n: getattr(m, n) for m in modules for n in m.__all__}
    found = {n: f for n, f in public.items() if inspect.isfunction(f)}
    entries = []
    for name in [*facts, *(n for n in found if n not in facts)]:
        formula, peers = facts.get(name, ("", ""))
        doc = inspect.getdoc(found[name]) or ""
        first = doc.split("\n\n")[0].replace("\n", " ")
        link = re.search(r"https?://\S+?(?=[\s:,)]|\.?(?:\s|$))", doc)
        paper = link.group() if link else ""
        entries.append(
            Entry(
                name=name,
                preset=found[name],
                title=first.replace(f", {paper}", "").rstrip("."),
                paper=paper,
                formula=formula,
                peers=peers,
            )
        )
    return entries


def axes(algorithm: Algorithm) -> str:
    """Return where an algorithm lies on the axes, in one line."""
    o, a = algorithm.objective, algorithm.advantage
    parts = [type(o.surrogate).__name__, f"ratio {o.ratio}", o.aggregation]
    if o.uses_reference:
        parts.append(f"{o.kl} in the {o.kl_in}")
    estimate = getattr(a.estimate, "__name__", str(a.estimate))
    parts.append(estimate + (", whitened" if a.whiten else ""))
    if algorithm.value is not None:
        parts.append("critic")
    if algorithm.sampling.refill is not None:
        parts.append(f"refill by {algorithm.sampling.refill}")
    if algorithm.sampling.top_entropy is not None:
        parts.append(f"top {algorithm.sampling.top_entropy:g} of the tokens by entropy")
    return " · ".join(parts)


def markdown() -> str:
    """Return the whole table in Markdown."""
    rows = [
        "| algorithm | axes | loss of a step | defaults | others |",
        "| --- | --- | --- | --- | --- |",
    ]
    for e in catalog():
        parameters = inspect.signature(e.preset).parameters.values()
        defaults = ", ".join(
            p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters
        )
        required = {p.name: 1024 for p in parameters if p.default is p.empty}
        cells = (
            f"[`{e.name}`]({e.paper})",
            axes(e.preset(**required)),
            e.formula.replace("|", "\\|"),
            f"`{defaults}`" if defaults else "",
            e.peers,
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def replace_table(text: str) -> str:
    """Return a Markdown text with the table between its markers made anew.

    Raises:
        ValueError: If the markers are missing.
    """
    begin, end = "<!-- table:begin -->\n", "<!-- table:end -->"
    if begin not in text or end not in text:
        raise ValueError(f"the text must hold the markers {begin.strip()} and {end}")
    head, tail = text.split(begin)[0], text.split(end)[1]
    return head + begin + markdown() + end + tail


def main() -> None:
    """Write the table into the file that is named."""
    path = Path(sys.argv[1])
    path.write_text(replace_table(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
