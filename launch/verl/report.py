"""The report of an import, as Markdown and as one JSON object."""

from collections import Counter
from typing import Any, get_args

from polopt.launch.verl import schema
from polopt.launch.verl.importer import Imported
from polopt.launch.verl.plan import Row, Verdict
from polopt.launch.verl.shell_state import set_option

__all__ = ["as_json", "as_markdown"]


def _rows(imported: Imported) -> list[Row]:
    items = [*imported.plan.launch.overrides, *imported.plan.launch.lost]
    return [imported.plan.rows[id(item)] for item in items]


def as_json(imported: Imported) -> dict[str, Any]:
    """Return everything that is known about an import."""
    plan = imported.plan
    keys = []
    for row in _rows(imported):
        found = schema.find(row.override.name)
        keys.append(
            {
                "line": row.override.line,
                "key": row.override.key,
                "name": row.override.name,
                "prefix": row.override.prefix,
                "value": row.override.value,
                "verdict": row.verdict,
                "target": row.target,
                "how": row.how,
                "meaning": found.meaning if found else "",
                "asks": list(row.override.asks),
            }
        )
    return {
        "module": plan.launch.module,
        "line": plan.launch.line,
        "verl": schema.VERSION,
        "recipe": imported.recipe,
        "accelerate": plan.accelerate,
        "vllm": plan.vllm,
        "arithmetic": {name: value for name, value, _ in plan.facts},
        "keys": keys,
        "counts": dict(Counter(row["verdict"] for row in keys)),
        "defaults": [{"key": k, "target": t, "reason": r} for k, t, r in plan.defaults],
        "traps": plan.traps,
        "remarks": plan.launch.remarks,
        "open": [{"key": k, "names": list(names)} for k, names in imported.open_names],
        "refusals": plan.refusals,
    }


def as_markdown(imported: Imported) -> str:
    """Return the report for people; tables for issues and chats."""
    plan = imported.plan
    rows = _rows(imported)
    counts = Counter(row.verdict for row in rows)
    shown = ", ".join(f"{counts[v]} {v}" for v in get_args(Verdict) if counts[v])
    lines = [
        f"# Import of {plan.launch.module or 'a list of overrides'}",
        "",
        f"{len(rows)} keys of verl {schema.VERSION}: {shown}.",
    ]
    lines += _list("Refused: nothing is written without --allow", plan.refusals)
    lines += _list(
        "To fill in",
        [
            f"{key}: {' or '.join(f'`{set_option(n)}`' for n in names)}"
            for key, names in imported.open_names
        ],
    )
    lines += _list("Traps in the script", plan.traps)
    lines += _list("How the script was read", plan.launch.remarks)
    if plan.facts:
        lines += ["", "## Arithmetic", "", "| quantity | value | from |", "|---|---|---|"]
        lines += [_cells(name, value, how) for name, value, how in plan.facts]
    lines += [
        "",
        "## Keys",
        "",
        "| line | key | value | verdict | becomes | how, or what it costs | what it does in verl |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        item, found = row.override, schema.find(row.override.name)
        lines.append(
            _cells(
                item.line or "--set",
                item.prefix + item.key,
                _short(item.text),
                row.verdict,
                row.target,
                row.how,
                found.meaning if found else "",
            )
        )
    if plan.defaults:
        lines += [
            "",
            "## Defaults of verl that are written out",
            "",
            "| key | becomes | why |",
            "|---|---|---|",
        ]
        lines += [_cells(*row) for row in plan.defaults]
    return "\n".join(lines) + "\n"


def _list(title: str, items: list[str]) -> list[str]:
    if not items:
        return []
    return ["", f"## {title}", "", *(f"- {_escape(item)}" for item in items)]


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "…"


def _cells(*cells: Any) -> str:  # noqa: ANN401
    return "| " + " | ".join(_escape(str(c)).replace("|", "\\|") for c in cells) + " |"


def _escape(text: str) -> str:
    return " ".join(text.split())
