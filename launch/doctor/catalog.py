"""The table of rules in Markdown: `python -m polopt.launch.doctor.catalog docs/doctor.md`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polopt.launch.doctor.names import meaning
from polopt.launch.doctor.rules import Rule, rules

__all__ = ["markdown", "replace_tables"]


def markdown(settings: bool) -> str:
    """Return the rules of the metrics, or those of settings alone, as a table."""
    rows = [
        "| rule | what is wrong | seen in | what helps | source |",
        "| --- | --- | --- | --- | --- |",
    ]
    rows += [_row(rule) for rule in rules() if rule.settings == settings]
    return "\n".join(rows) + "\n"


def _row(rule: Rule) -> str:
    cells = (
        f"`{rule.id}`",
        rule.title + ("" if rule.kind == "any" else f" ({rule.kind})"),
        " *or* ".join(" and ".join(map(_test, case.when)) for case in rule.cases),
        _words(rule.remedy),
        rule.source,
    )
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def _test(test: Mapping[str, Any]) -> str:
    rest = {
        k: v for k, v in test.items() if k not in ("metric", "setting", "is", "mention", "absent")
    }
    words = " ".join(f"{k} {v}" for k, v in rest.items())
    name = test.get("metric", test.get("setting"))
    if name is not None:
        return f"`{name}` {str(test['is']).replace('_', ' ')} {words}".rstrip()
    if "absent" in test:
        return f"`{test['absent']}` unknown"
    return f"a line about {test['mention']} {words}".rstrip()


def _words(remedy: str) -> str:
    parts = remedy.split("{")
    out = parts[0]
    for part in parts[1:]:
        name, _, rest = part.partition("}")
        out += meaning(name).removeprefix("the ") + rest
    return out


def replace_tables(text: str) -> str:
    """Return a Markdown text with the tables between its markers made anew.

    Raises:
        ValueError: If a marker is missing.
    """
    for name, settings in (("rules", False), ("checklist", True)):
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if begin not in text or end not in text:
            raise ValueError(f"the text must hold the markers {begin.strip()} and {end}")
        head, tail = text.split(begin)[0], text.split(end)[1]
        text = head + begin + markdown(settings) + end + tail
    return text


def main() -> None:
    """Write the tables into the file that is named."""
    path = Path(sys.argv[1])
    path.write_text(replace_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
