"""What is said about the keys that no arithmetic is needed for: a table of patterns."""

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

from polopt.launch.verl import schema
from polopt.launch.verl.overrides import Override
from polopt.launch.verl.plan import Plan, Row, Verdict

__all__ = ["Rule", "apply_rules", "rule_for"]

_PPO_ONLY = (
    "the critic's settings belong to a section that polopt's trainer does not have yet: "
    "a value function on the policy's backbone is trained with the policy's optimizer"
)


@dataclass(frozen=True)
class Rule:
    """One row of `data/rules.tsv`.

    Attributes:
        pattern: Of key names.
        verdict: What happens to the key.
        neutral: The value at which it has no effect, as JSON; `default`: verl's default.
        text: Why, or what it costs.
    """

    pattern: str
    verdict: Verdict
    neutral: str
    text: str

    def harmless(self, item: Override) -> bool:
        """Whether the override has the value that changes nothing."""
        if not self.neutral:
            return False
        found = schema.find(item.name)
        neutral = (
            (found.default if found else None)
            if self.neutral == "default"
            else json.loads(self.neutral)
        )
        if neutral in (None, [], {}, ""):
            return item.value in (None, [], {}, "")
        if isinstance(neutral, bool) or isinstance(item.value, bool):
            return item.value is neutral
        return bool(item.value == neutral)


@cache
def _rules() -> list[Rule]:
    text = (files("polopt.launch.verl") / "data" / "rules.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    return [Rule(p, v, n, t) for p, v, n, t in rows]  # type: ignore[arg-type]


def rule_for(name: str) -> Rule | None:
    """The first rule that fits a key."""
    return next((r for r in _rules() if fnmatchcase(name, r.pattern)), None)


def apply_rules(plan: Plan) -> None:
    """Give a row to every override that has none."""
    critic = plan.text("algorithm.adv_estimator") == "gae"
    for item in plan.launch.overrides:
        if id(item) in plan.rows:
            continue
        if item.prefix == "~":
            plan.rows[id(item)] = Row(item, *_deleted(item))
        elif item.name.startswith("critic.") and rule_for(item.name) is None:
            plan.rows[id(item)] = (
                Row(item, "unsupported", "", _PPO_ONLY)
                if critic
                else Row(item, "no effect", "", "no critic with this advantage estimator")
            )
        else:
            plan.rows[id(item)] = _row(plan, item, rule_for(item.name))
    for item in plan.launch.lost:
        plan.rows[id(item)] = Row(
            item, "inert", "", "never reaches verl: the command ended above this line"
        )


def _deleted(item: Override) -> tuple[Verdict, str, str]:
    return "unsupported", "", f"verl runs without {item.key}; the recipe keeps its default"


def _row(plan: Plan, item: Override, rule: Rule | None) -> Row:
    known: Any = schema.find(item.name)
    if "@" in item.key or (known is None and "." not in item.key and "/" not in item.key):
        text = "chooses a group of defaults that the import does not have"
        if rule is not None and rule.harmless(item):
            return Row(item, "no effect", "", "verl's default")
        plan.refusals.append(f"line {item.line}: {item.key}={item.text} {text}")
        return Row(item, "refused", "", text)
    if rule is not None and rule.harmless(item):
        return Row(item, "no effect", "", f"the value that changes nothing: {rule.text}")
    if known is None and (rule is None or item.prefix == ""):
        close = schema.nearest(item.name)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        text = f"verl {schema.VERSION} has no such key{hint}"
        plan.refusals.append(f"line {item.line}: {item.key}: {text}")
        return Row(item, "refused", "", text)
    if rule is None:
        text = "no rule covers this key"
        plan.refusals.append(f"line {item.line}: {item.key}: {text}")
        return Row(item, "refused", "", text)
    if rule.verdict == "refused":
        plan.refusals.append(f"line {item.line}: {item.key}={item.text}: {rule.text}")
    return Row(item, rule.verdict, "", rule.text)
