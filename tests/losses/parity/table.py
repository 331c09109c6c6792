"""All records, their verdicts, and the tables made from them."""

import csv
import io
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from golden import DATA, load

from parity import advantages, policy, rewards, rollout, torchrl, trl, values
from parity.core import LEDGER, Case, Verdict, judge
from parity.reasons import EXPLAINED, OUT_OF_SCOPE

DOCS = Path(__file__).parents[3] / "docs" / "parity.md"
SOURCES = {
    "policy losses, verl": policy.verl_cases,
    "policy losses, OpenRLHF": policy.openrlhf_cases,
    "losses, TRL": trl.loss_cases,
    "off-policy masks, TRL": trl.off_policy_mask_cases,
    "importance weights, TRL": trl.importance_cases,
    "losses for language models, TorchRL": torchrl.llm_cases,
    "PPO losses, TorchRL": torchrl.ppo_cases,
    "generalised advantages, TorchRL": torchrl.gae_cases,
    "advantages, verl, OpenRLHF, TorchRL": advantages.cases,
    "advantages, TRL": advantages.trl_cases,
    "divergence in the reward": rewards.kl_in_reward_cases,
    "adaptive coefficients": rewards.controller_cases,
    "overlong punishment": rewards.overlong_cases,
    "value losses": values.value_cases,
    "divergences": values.kl_cases,
    "aggregation": values.aggregation_cases,
    "entropies": values.entropy_cases,
    "corrections, verl": rollout.cases,
}


def verdicts(source: str) -> list[Verdict]:
    """Return what became of the records of one source."""
    return [judge(case) for case in SOURCES[source]()]


def record_names() -> set[str]:
    """Return the name of every record there is, by walking the files."""
    names = set()
    for path in sorted(DATA.glob("*.json.gz")):
        file = path.name.removesuffix(".json.gz")
        if file == "traps":
            continue
        for key, value in load(file).items():
            if file == "overlong":
                if key not in ("meta", "lengths"):
                    names.add(f"overlong:{key}[0]")
                continue
            name = file if key == "results" else f"{file}:{key}"
            if isinstance(value, dict) and "results" in value:
                value = value["results"]
            if isinstance(value, list):
                names |= {f"{name}[{i}]" for i in range(len(value))}
    return names


def name_of(case: Case | Verdict) -> str:
    """Return the name of a record, the first word of its id."""
    return case.id.split(" ")[0]


def ledger(rows: Iterable[Verdict]) -> str:
    """Return the records that differ as CSV: explained ones one by one, others counted."""
    rows = list(rows)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["record", "peer", "loss", "case", "reason", "quantity", "ours", "theirs"])
    for v in rows:
        if v.status == "explained":
            writer.writerow([v.id, v.peer, v.loss, v.case, v.reason, v.quantity, v.ours, v.theirs])
    left_out = Counter((v.peer, v.loss, v.reason) for v in rows if v.status == "out of scope")
    for (peer, loss, reason), n in left_out.items():
        writer.writerow([f"{n} records", peer, loss, "", reason, "out of scope", "", ""])
    return out.getvalue()


def document(counts: dict[str, Counter[str]], rows: list[dict[str, str]]) -> str:
    """Return docs/parity.md from counts per source and the rows of the ledger."""
    return "\n".join(_lines(counts, rows)) + "\n"


def _lines(counts: dict[str, Counter[str]], rows: list[dict[str, str]]) -> Iterator[str]:
    yield "# Where the numbers of others differ"
    yield ""
    yield (
        "Written by `python tests/losses/write_parity.py`; a test checks that it is current. Every "
        "record of the reference values (`tests/data/golden`: verl 0.9.1, TRL 1.16.0, TorchRL "
        "0.14.1, OpenRLHF 0.11.0) is computed by `polopt.losses` and compared in value, gradient "
        "and, where it means the same, metrics: to 1e-6 in float64, 1e-5 in float32, 2e-2 in "
        "bfloat16. Where a number differs, ours is changed in the way the explanation says and "
        "has to equal the peer's then: a difference cannot be explained away."
    )
    yield ""
    yield "| records | agree | explained | not offered | all |"
    yield "|---|--:|--:|--:|--:|"
    total: Counter[str] = Counter()
    for source, count in counts.items():
        total += count
        yield _count_line(source, count)
    yield _count_line("**all**", total)
    yield ""
    yield "## Explained"
    explained = [r for r in rows if r["quantity"] != "out of scope"]
    for reason, (what, verdict) in EXPLAINED.items():
        own = [r for r in explained if reason in r["reason"].split("+")]
        if not own:
            continue
        yield ""
        yield f"### {reason[0].upper()}{reason[1:]}"
        yield ""
        yield f"{what} {verdict}"
        yield ""
        yield "| peer | loss | cases | quantity | ours | theirs |"
        yield "|---|---|---|---|--:|--:|"
        key = lambda r: (r["peer"].split("@")[0], r["loss"])  # noqa: E731
        for (peer, loss), group in itertools.groupby(sorted(own, key=key), key):
            group = list(group)
            cases = Counter(r["case"] for r in group)
            listed = ", ".join(f"{c} ×{n}" if n > 1 else c for c, n in sorted(cases.items()))
            # The number that says most: of this reason alone, and a loss rather than a gradient.
            best = min(group, key=lambda r: (r["reason"] != reason, r["quantity"].startswith("g")))
            numbers = f"`{best['quantity']}` | {best['ours']} | {best['theirs']}"
            yield f"| {peer} | {_cell(loss)} | {_cell(listed)} | {numbers} |"
    yield ""
    yield "## Not offered"
    yield ""
    yield "| peer | loss | records | why |"
    yield "|---|---|--:|---|"
    for r in rows:
        if r["quantity"] == "out of scope":
            n, why = r["record"].split(" ")[0], OUT_OF_SCOPE[r["reason"]]
            yield f"| {r['peer'].split('@')[0]} | {_cell(r['loss'])} | {n} | {r['reason']}: {why} |"


def _count_line(name: str, count: Counter[str]) -> str:
    numbers = [count["agrees"], count["explained"], count["out of scope"], count.total()]
    return f"| {name} | " + " | ".join(map(str, numbers)) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def read_ledger() -> list[dict[str, str]]:
    """Return the committed rows."""
    with LEDGER.open(newline="") as file:
        return list(csv.DictReader(file))
