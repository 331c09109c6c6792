"""Every pattern of `patterns.py` gives the overrides that verl gets, and the words of bash."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from polopt.launch.verl.importer import import_script
from polopt.launch.verl.launches import read_launch
from polopt.launch.verl.shell_run import read_script

spec = importlib.util.spec_from_file_location("patterns", Path(__file__).with_name("patterns.py"))
patterns = importlib.util.module_from_spec(spec)
sys.modules["patterns"] = patterns  # dataclasses look their module up
spec.loader.exec_module(patterns)
M, PATTERNS = patterns.M, patterns.PATTERNS


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern(name):
    pattern = PATTERNS[name]
    launch = read_launch(pattern.script, pattern.given)
    assert [(o.key, o.value) for o in launch.overrides] == pattern.expected


@pytest.mark.parametrize("name", [n for n, p in PATTERNS.items() if p.remark])
def test_pattern_is_remarked(name):
    pattern = PATTERNS[name]
    imported = import_script(pattern.script, pattern.given)
    text = "\n".join(imported.plan.traps + imported.plan.launch.remarks)
    assert pattern.remark in text


BASH = shutil.which("bash")
# Prints the words that the command would get instead of starting it.
STAND_IN = """python3() { printf '%s\\0' "$@"; printf '\\1'; }
"""


@pytest.mark.skipif(BASH is None, reason="no bash here")
@pytest.mark.parametrize("name", [n for n, p in PATTERNS.items() if p.bash])
def test_words_are_those_of_bash(name, tmp_path):
    pattern = PATTERNS[name]
    arguments = [v for k, v in sorted(pattern.given.items()) if k.isdigit()]
    environment = {k: v for k, v in pattern.given.items() if k.isidentifier()}
    run = subprocess.run(
        [BASH, "-c", STAND_IN + pattern.script, "script", *arguments],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", **environment},
        cwd=tmp_path,
        timeout=20,
    )
    calls = [call.split("\0")[:-1] for call in run.stdout.split("\1")[:-1]]
    script = read_script(pattern.script, pattern.given)
    found = [
        [script.state.unknowns.show(w.text) for w in i.words[1:]]
        for i in script.invocations
        if i.words[0].text == "python3"
    ]
    assert found == calls
