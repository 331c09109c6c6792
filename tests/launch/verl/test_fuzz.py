"""Damaged scripts never give a traceback, and random ones read as bash reads them."""

import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from polopt.launch.files import encode
from polopt.launch.verl.importer import import_script
from polopt.launch.verl.report import as_json, as_markdown
from polopt.launch.verl.shell_run import read_script

SCRIPTS = [p.read_text() for p in sorted((Path(__file__).parent / "scripts").iterdir())]
BITS = [
    *"$(){}[]\"'`\\\n \t;&|<>#=+~*?,.:-_0aA@!%^/",
    *("${", "$((", "))", "<<E\n", "if ", "fi ", "do ", "done ", "case ", "esac ", "\\\n", "$'"),
    *("${A[@]}", "=(", "9" * 30, "1e999", "nan", "\x00", "\ue000", "é"),
]
VALUES = [
    *("-1", "0", "1", "3", "7", "1e-3", "null", "[]", "{}", "[a,b]", "x", "True", "1e400", "nan"),
    *("99999999", "$X", "$(x)", '""', "'${data.seed}'", "0.5", "a,b", "{a:1}", "-inf", "~/x"),
]


def damaged(rng):
    script = rng.choice(SCRIPTS)
    for _ in range(rng.randrange(1, 5)):
        kind, at = rng.randrange(5), rng.randrange(len(script) + 1)
        end = min(len(script), at + rng.randrange(1, 40))
        if kind == 0:
            script = script[:at] + rng.choice(BITS) + script[at:]
        elif kind == 1:
            script = script[:at] + script[end:]
        elif kind == 2:
            script = script[:at] + 2 * script[at:end] + script[end:]
        elif kind == 3:
            other = rng.choice(SCRIPTS)
            start = rng.randrange(len(other))
            script = script[:at] + other[start : start + 60] + script[at:]
        elif found := list(re.finditer(r"=\S+", script)):
            where = rng.choice(found)
            script = script[: where.start()] + "=" + rng.choice(VALUES) + script[where.end() :]
    return script


@pytest.mark.parametrize("seed", range(200))
def test_damaged_scripts(seed):
    script = damaged(random.Random(seed))
    problem = ""
    try:
        imported = import_script(script, {"NNODES": "2"})
    except ValueError as error:
        problem = str(error)
    if problem:
        assert re.fullmatch(r"line \d+: [^\n]+", problem)
        return
    encode(as_json(imported))
    assert as_markdown(imported)
    items = [*imported.plan.launch.overrides, *imported.plan.launch.lost]
    assert set(map(id, items)) == set(imported.plan.rows)
    if imported.recipe:
        assert set(imported.texts()) == {"recipe.yaml", "accelerate.yaml", "vllm.txt"}


# --- against bash -------------------------------------------------------------

BASH = shutil.which("bash")
STAND_IN = "python3() { printf '%s\\0' \"$@\"; printf '\\1'; }\n"
START = "A=; B=a; C='x y/z.w'; N=3; V=v.w\nARR=(one 'two three')\nf() { :; }\n"
OPERATORS = ["", ":-d e", "-d", ":+alt", "##*/", "%.*", "%%.*", "#*.", "^^", ",,", ":1:2", "/a/Q"]
EXPANSIONS = [
    *("${ARR[@]}", "${ARR[0]}", "${#ARR[@]}", "${ARR[*]}", "${ARR[1]:-n}", "${ARR[@]:1}"),
    *("$1", "$#", "$@", "$*", "${2:-w}", "${#C}", "$((N * 3 - 2))", "$((N > 2 ? 4 : 5))"),
]
TESTS = [
    *('[ "$N" -gt 3 ]', "[[ $N -le 3 && -n $A ]]", "((N > 3))", '[[ ! $V =~ "v" ]]', "! [ 1 = 2 ]"),
    *('[ -z "$A" ]', '[ "$N" -eq 3 ] || [ "$B" = a ]', "[[ $C == x* ]]", "false", "true"),
]


def word(rng):
    def expansion():
        if rng.random() < 0.4:
            return rng.choice(EXPANSIONS)
        return f"${{{rng.choice('ABCV')}{rng.choice(OPERATORS)}}}"

    pieces = []
    for _ in range(rng.randrange(1, 4)):
        plain = rng.choice(["a", "x/y.z", "12", "k=v", "a#b", "[1,2]", "{p,q}r", "{1..3}", "\\ "])
        quoted = rng.choice(["'s q'", "'$A'", "''", f'"d {expansion()}"', f'"{expansion()}"'])
        pieces.append(rng.choice([plain, quoted, expansion()]))
    return "".join(pieces)


def statement(rng, depth=0):
    kind = rng.randrange(10 if depth < 2 else 5)
    inner = lambda: statement(rng, depth + 1)  # noqa: E731
    if kind == 0:
        return f"{rng.choice('ABC')}={word(rng)}"
    if kind == 1:
        return f"{rng.choice('ABC')}+={word(rng)}"
    if kind == 2:
        return f"ARR=({word(rng)} {word(rng)})"
    if kind == 3:
        return f"ARR+=({word(rng)})"
    if kind == 4:
        return f"python3 {word(rng)} {word(rng)}"
    if kind == 5:
        return f"if {rng.choice(TESTS)}; then\n{inner()}\nelse\n{inner()}\nfi"
    if kind == 6:
        return f"for A in {word(rng)} {word(rng)}; do\n{inner()}\ndone"
    if kind == 7:
        return f"case {word(rng)} in\n a*|[1-3]*) {inner()};;\n *) {inner()} ;;\nesac"
    if kind == 8:
        return f"{rng.choice(TESTS)} && {inner()}"
    return f"f() {{ {inner()}; }}\nf {word(rng)}"


@pytest.mark.skipif(BASH is None, reason="no bash here")
@pytest.mark.parametrize("seed", range(150))
def test_random_scripts_read_as_in_bash(seed, tmp_path):
    rng = random.Random(seed)
    body = "\n".join(statement(rng) for _ in range(4))
    script = f"{START}{body}\npython3 {word(rng)} {word(rng)}\n"
    run = subprocess.run(
        [BASH, "-f", "-c", STAND_IN + script, "script", "p1", "p 2"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
        timeout=20,
    )
    calls = [call.split("\0")[:-1] for call in run.stdout.split("\1")[:-1]]
    found = read_script(script, {"1": "p1", "2": "p 2"})
    words = [
        [w.text for w in i.words[1:]] for i in found.invocations if i.words[0].text == "python3"
    ]
    assert not run.stderr, script
    assert words == calls, script
