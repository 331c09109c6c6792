"""The installed package is whole, typed, light to import and points where it should."""

import subprocess
import sys
import tomllib
from importlib.metadata import metadata, version
from importlib.resources import files
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import polopt

ROOT = Path(__file__).parents[1]
FOLDERS = ("losses", "envs", "ext", "launch")


def test_version_has_one_source():
    assert version("polopt") == polopt.__version__
    written = [
        path.name
        for path in [
            ROOT / "pyproject.toml",
            *(f for d in FOLDERS for f in (ROOT / d).rglob("*.py")),
        ]
        if f'"{polopt.__version__}"' in path.read_text()
    ]
    assert written == ["__init__.py"]


def test_changelog_knows_the_version():
    assert f"## {polopt.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_metadata():
    data = metadata("polopt")
    assert data["License-Expression"] == "Apache-2.0"
    assert data["Requires-Python"] == ">=3.11"
    assert {
        "torchrl",
        "trl",
        "control",
        "verl",
        "vllm",
        "all",
    } <= set(data.get_all("Provides-Extra"))
    assert not [r for r in data.get_all("Requires-Dist") if 'extra == "all"' in r and "vllm" in r]


def requirements():
    """Return what pyproject.toml asks for, without polopt's own extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    needs = [Requirement(line) for line in lines]
    return [need for need in needs if need.name != "polopt"]


def pins(name):
    lines = (ROOT / "tests" / "constraints" / f"{name}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_lower_bounds_are_what_low_tests():
    low = pins("low")
    for need in requirements():
        if not need.specifier:  # a small library whose interface of old does
            continue
        (bound,) = (s.version for s in need.specifier if s.operator == ">=")
        assert need.name in low, f"{need} has no pin in low.txt"
        assert Version(low[need.name]) == Version(bound), f"{need}, low.txt {low[need.name]}"


def test_latest_is_within_the_bounds():
    latest = pins("latest")
    names = set()
    for need in requirements():
        if need.name in latest:
            names.add(need.name)
            assert latest[need.name] in need.specifier, f"{need}, latest.txt {latest[need.name]}"
    assert names == latest.keys()


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_source_file_is_installed(folder):
    """Fails when a sub-package, or data of one, is missing from pyproject.toml."""
    here = ROOT / folder
    sources = {
        path.relative_to(here).as_posix()
        for path in here.rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and not path.is_relative_to(ROOT / "launch" / "_root")
        and path.parent / path.suffix != ROOT / "launch" / ".sh"  # for a checkout only
    }
    installed = files(f"polopt.{folder}")
    assert sources
    assert [s for s in sorted(sources) if not installed.joinpath(s).is_file()] == []


def test_typed():
    assert files("polopt").joinpath("py.typed").is_file()


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("polopt", {"torch", "tensordict"}),
        ("polopt.launch.cli", {"torch", "tensordict"}),
        ("polopt.losses", {"tensordict", "torchrl", "transformers", "trl", "accelerate"}),
        ("polopt.losses.modules", {"torchrl", "transformers", "trl", "accelerate"}),
        ("polopt.envs", {"torchrl", "transformers", "trl", "accelerate", "gymnasium"}),
        ("polopt.ext", {"torchrl", "transformers", "trl", "accelerate"}),
    ],
)
def test_imports_stay_light(module, banned):
    code = f"import sys, {module}; print(*{{m.split('.')[0] for m in sys.modules}})"
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd="/"
    )
    assert set(out.stdout.split()) & banned == set()


@pytest.mark.parametrize("command", [["-m", "polopt"], ["polopt"]], ids=["module", "script"])
def test_both_entry_points_tell_the_version(command):
    if command == ["polopt"]:
        command = [Path(sys.executable).with_name("polopt")]
    else:
        command = [sys.executable, *command]
    line = subprocess.check_output([*command, "--version"], text=True, cwd="/")
    assert line.split() == ["polopt", polopt.__version__]
