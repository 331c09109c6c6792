"""`polopt import-verl`: the command."""

import argparse
from pathlib import Path
from typing import Any

__all__ = ["EPILOG", "add_arguments", "import_verl", "split_set"]

EPILOG = """\
Nothing in the script is executed. What only running it would tell (variables of the
environment, $(…), the arguments $1 $2, files) is asked for by name:

  polopt import-verl run.sh --set NNODES=4 --set '$(hostname)=node-1' --set 1=arg
  polopt import-verl run.sh --set line12=true          how the test on line 12 turns out
  polopt import-verl run.sh --set data.rows=7473       training rows, for the number of steps
  polopt import-verl run.sh --set trainer.nnodes=1     one more override, as after "$@"

exit status: 0 fine, 1 something is left to do (see the report), 2 wrong input, 3 refused: it
would change what is trained (written all the same with --allow)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument("script", help="a launch script, or a file of overrides")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a value that the script alone does not give",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="folder of the files; the script's name by default"
    )
    parser.add_argument("--allow", action="store_true", help="write the files in spite of refusals")


def import_verl(script: str, sets: list[str], out: str | None, *, allow: bool) -> dict[str, Any]:
    """Import a script and write the files.

    Args:
        script: Path of the script.
        sets: `NAME=VALUE` each.
        out: Folder for recipe.yaml, accelerate.yaml, vllm.txt and report.md.
        allow: Write in spite of refusals.

    Returns:
        `content` for `--json`, `text` in Markdown, and the exit status `code`.

    Raises:
        RecipeError: If the input is wrong; one sentence.
    """
    from polopt.launch.recipe import RecipeError
    from polopt.launch.verl.check import check
    from polopt.launch.verl.importer import import_script
    from polopt.launch.verl.report import as_json, as_markdown

    path = Path(script)
    given = {}
    for item in sets:
        name, found, value = split_set(item)
        if not found or not name:
            raise RecipeError(f"--set {item!r} is not of the form NAME=VALUE")
        given[name] = value
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise RecipeError(f"cannot read the script {script}: {reason}") from error
    try:
        imported = import_script(source, given)
    except (ValueError, ModuleNotFoundError) as error:
        raise RecipeError(f"{script}: {error}") from error
    content, text = as_json(imported), as_markdown(imported)
    refused = bool(imported.plan.refusals)
    written = bool(imported.recipe) and (allow or not refused)
    folder = Path(out) if out else Path(path.stem or "imported")
    content["written"], problems = [], []
    if written:
        against, problems = check(imported.recipe, imported.plan.accelerate)
        content["checked"] = {"against": against, "problems": problems}
        text += "\n## Check\n\n" + "\n".join(f"- {line}" for line in [*against, *problems]) + "\n"
        files = {**imported.texts(), "report.md": text}
        taken = [name for name in files if (folder / name).exists()]
        if taken:
            raise RecipeError(f"{folder / taken[0]} exists: choose another folder with --out")
        folder.mkdir(parents=True, exist_ok=True)
        for name, body in files.items():
            (folder / name).write_text(body, encoding="utf-8")
        content["written"] = [str(folder / name) for name in files]
        text += _next(folder)
    code = 3 if refused and not written else 1 if imported.open_names or problems else 0
    return {"content": content, "text": text, "code": code}


def _next(folder: Path) -> str:
    return (
        f"\nWritten: {folder}/recipe.yaml, accelerate.yaml, vllm.txt, report.md. Next:\n\n"
        f"    polopt train {folder}/recipe.yaml --dry-run\n"
        f"    accelerate launch --config_file {folder}/accelerate.yaml -m polopt train "
        f"{folder}/recipe.yaml\n"
    )


def split_set(item: str) -> tuple[str, str, str]:
    """Split at the `=` behind the name, which may be a substitution: `$(a=b)=value`."""
    for opening, closing in (("$(", ")"), ("${", "}"), ("`", "`")):
        if item.startswith(opening):
            end = item.rfind(closing + "=")
            if end > 0:
                return item[: end + 1], "=", item[end + 2 :]
    name, found, value = item.partition("=")
    return name, found, value
