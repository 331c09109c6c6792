import dataclasses
import math
from typing import Literal

import pytest
import yaml

from polopt.launch.recipe import (
    RecipeError,
    build,
    call,
    check_keys,
    complete,
    dump,
    load,
    nearest,
    shipped,
)


def read(tmp_path, text, *overrides):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return load(path, overrides)


@dataclasses.dataclass(frozen=True)
class Gate:
    low: float = 0.1

    def __post_init__(self):
        if self.low > 1:
            raise ValueError(f"low must be at most 1, got {self.low}")


def make(
    *,
    high: float,
    mode: Literal["a", "b"] = "a",
    count: int = 3,
    flag: bool = False,
    gate: Gate | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    maybe: bool | None = None,
):
    return high, mode, count, flag, gate, betas, maybe


def loose(**settings):
    return settings


NAMES = {"make": make, "gate": Gate, "loose": loose}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E+3", 1000.0),
        ("-2.5e-3", -2.5e-3),
        (".5", 0.5),
        ("5.", 5.0),
        ("1_000_000", 1000000),
        ("10", 10),
        ("010", 10),
        ("0x10", 16),
        ("0o17", 15),
        ("-7", -7),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
        ("1:30", "1:30"),
        ("2026-01-31", "2026-01-31"),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
        ("'1e-4'", "1e-4"),
        ("-", "-"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(tmp_path, text, value):
    found = read(tmp_path, f"a: {text}\n" if text != "-" else 'a: "-"\n')["a"]
    assert found == value
    assert type(found) is type(value)


def test_nan(tmp_path):
    assert math.isnan(read(tmp_path, "a: .nan")["a"])


@pytest.mark.parametrize(
    "value",
    [1e-4, 1e22, 5e-324, 0.1, 123456789.0, math.inf, -1, 10**20, "no", "1e-4", "010", "", None,
     True, "true", "a: b", "ünï", [1, [2]], {"a": {}}, "2026-01-31", "1:30", "0o7", "=", "<<", "~"],
)  # fmt: skip
def test_dump_is_read_back(tmp_path, value):
    assert read(tmp_path, dump({"a": value})) == {"a": value}


def test_overrides_reach_inside(tmp_path):
    tree = read(
        tmp_path,
        "a: {b: 1}\nl: [{x: 1}, 2]\n",
        "a.b=3e-1",
        "a.c.d=text",
        "l.0.x=5",
        "l.1=[7]",
        "n={use: grpo, k: 1}",
        "e=",
        "u=a=b",
    )
    assert tree == {
        "a": {"b": 0.3, "c": {"d": "text"}},
        "l": [{"x": 5}, [7]],
        "n": {"use": "grpo", "k": 1},
        "e": None,
        "u": "a=b",
    }


def test_anchors_are_copies(tmp_path):
    tree = read(tmp_path, "a: &x {v: 1}\nb: *x\nc: {<<: *x, w: 2}\nd: {<<: *x, v: 9}\n", "b.v=2")
    assert tree == {"a": {"v": 1}, "b": {"v": 2}, "c": {"v": 1, "w": 2}, "d": {"v": 9}}


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("a: 1\na: 2\n", (), "line 2: the key 'a' is there twice"),
        ("a: {b: 1, b: 2}\n", (), "line 1: the key 'b' is there twice"),
        ("1: 2\n", (), "line 1: the key 1 is not text"),
        ("a: [1\n", (), "line 2: not valid YAML"),
        ("a: \t1\x07\n", (), "not valid YAML"),
        ("[" * 5000, (), "nested too deep"),
        ("a: !!python/object/apply:os.system ['true']\n", (), "could not determine a constructor"),
        ("", (), "a recipe is a mapping"),
        ("- 1\n", (), "a recipe is a mapping"),
        ("text", (), "a recipe is a mapping"),
        ("a: &x [*x]\n", (), "recursive node"),
        ("format: 2\na: 1\n", (), "format is 2, this polopt reads 1"),
        ("a: 1\n", ("a",), "override 'a' is not of the form key=value"),
        ("a: 1\n", ("=1",), "override '=1' is not of the form"),
        ("a: 1\n", ("a..b=1",), "override 'a..b=1' is not of the form"),
        ("a: 1\n", ("a.b=1",), "override 'a.b=1': a is 1, which has no entries"),
        ("a: [1]\n", ("a.1=1",), "a has 1 items, '1' is no index of it"),
        ("a: [1]\n", ("a.x=1",), "a has 1 items, 'x' is no index of it"),
        ("a: 1\n", ("a=[1",), r"override 'a=\[1': .*not valid YAML"),
        ("a: 1\n", ("a={b: 1, b: 2}",), "the key 'b' is there twice"),
    ],
)
def test_wrong_files_and_overrides(tmp_path, text, overrides, message):
    with pytest.raises(RecipeError, match=message):
        read(tmp_path, text, *overrides)


def test_anchors_do_not_multiply_without_end(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    with pytest.raises(RecipeError, match="anchors repeat each other into more than 1000000"):
        read(tmp_path, "\n".join(lines))


def test_unreadable_files(tmp_path):
    with pytest.raises(RecipeError, match=r"cannot read the recipe .*No such file"):
        load(tmp_path / "none.yaml")
    with pytest.raises(RecipeError, match=r"cannot read the recipe .*directory"):
        load(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="not a text file"):
        load(tmp_path / "b.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\x00\x00")
    with pytest.raises(RecipeError, match="not valid YAML: unacceptable character") as caught:
        load(tmp_path / "b.yaml")
    assert "\n" not in str(caught.value)


def test_calls_nest_and_convert():
    tree = {"use": "make", "high": 1, "gate": {"use": "gate", "low": 0.5}, "betas": [0.8, 1]}
    assert build(tree, NAMES) == (1.0, "a", 3, False, Gate(0.5), (0.8, 1.0), None)
    assert build({"use": "loose", "x": [tree]}, NAMES)["x"][0][4] == Gate(0.5)
    assert build({"use": "collections:OrderedDict", "a": 1}, {}) == {"a": 1}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"use": "make"}, "'x.high' is missing, make needs it"),
        ({"use": "make", "hihg": 1}, "unknown key 'x.hihg', did you mean 'high'"),
        ({"use": "make", "high": "much"}, "'x.high': input should be a valid number.*got 'much'"),
        ({"use": "make", "high": True}, "'x.high' must be a number, got True"),
        ({"use": "make", "high": 1, "count": 1.5}, "'x.count': .*valid integer.*got 1.5"),
        ({"use": "make", "high": 1, "count": True}, "'x.count' must be a whole number, got True"),
        ({"use": "make", "high": 1, "mode": "c"}, "'x.mode': input should be 'a' or 'b', got 'c'"),
        ({"use": "make", "high": 1, "gate": {"use": "gate", "low": 2}}, "x.gate: low must be at"),
        ({"use": "make", "high": 1, "gate": {"use": "gate", "lo": 2}}, "unknown key 'x.gate.lo'"),
        ({"use": "make", "high": 1, "betas": [1]}, "'x.betas': too few items, got \\[1\\]"),
        ({"use": "make", "high": 1, "betas": [1, "q"]}, "'x.betas.1': .*valid number.*got 'q'"),
        ({"use": "mkae", "high": 1}, "'x.use': unknown name 'mkae', did you mean 'make'"),
        ({"use": "zzz"}, "'x.use': unknown name 'zzz', expected one of gate, loose, make"),
        ({"use": 3}, "'x.use' must be a name, got 3"),
        ({"use": None}, "'x.use' must be a name, got None"),
        ({"use": "no.such:thing"}, "'x.use': cannot import 'no.such:thing': No module named"),
        ({"use": "math:nothing"}, "'x.use': cannot import 'math:nothing'"),
        ({"use": "math:pi"}, "'x.use': 'math:pi' is not a function or class, got 3.14"),
        ({"use": ":x"}, "'x.use': cannot import ':x'"),
        ({"use": ".a:x"}, "'x.use': '.a:x' is relative, write the whole name"),
        ([{"use": "make"}], "'x.0.high' is missing"),
    ],
)
def test_errors_say_where_what_and_the_mend(tree, message):
    with pytest.raises(RecipeError, match=message) as caught:
        build(tree, NAMES, "x")
    assert "\n" not in str(caught.value)


def test_a_flag_takes_a_flag():
    assert call(make, {"high": 1, "flag": True, "maybe": False})[3::3] == (True, False)


def test_a_value_that_raises_an_import_error_is_a_sentence():
    def needs(*, a: int = 1):
        raise ImportError("install it with pip")

    with pytest.raises(RecipeError, match=r"^x: install it with pip$"):
        build({"use": "needs"}, {"needs": needs}, "x")


def test_annotations_that_cannot_be_checked_are_left_to_the_call():
    def odd(*, a: "Missing" = 1, b: "list[Missing]" = ()):  # noqa: F821
        return a, b

    assert call(odd, {"a": "x"}) == ("x", ())


def test_an_adapter_does_not_copy_objects():
    gate = Gate()
    assert call(make, {"high": 1, "gate": gate})[4] is gate


def test_unknown_keys():
    check_keys({"a": 1}, ("a", "b"))
    with pytest.raises(RecipeError, match="unknown section 'tsk', did you mean 'task'"):
        check_keys({"tsk": 1}, ("task", "seed"))
    with pytest.raises(RecipeError, match=r"unknown key 'update.epoch', did you mean 'epochs'"):
        check_keys({"epoch": 1}, ("epochs",), "update")
    with pytest.raises(RecipeError, match="update must be a mapping of settings, got 3"):
        check_keys(3, ("epochs",), "update")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
    ],
)
def test_a_module_that_fails_when_imported(tmp_path, monkeypatch, text, message):
    (tmp_path / "fails_at_import.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RecipeError, match=f"cannot import 'fails_at_import:f': {message}"):
        build({"use": "fails_at_import:f"}, {}, "x")


def test_a_call_that_ends_the_process_or_says_nothing():
    def ends():
        raise SystemExit(3)

    def silent():
        raise ValueError

    with pytest.raises(RecipeError, match=r"^x: ends called sys.exit\(3\)$"):
        build({"use": "ends"}, {"ends": ends}, "x")
    with pytest.raises(RecipeError, match=r"^x: ValueError$"):
        build({"use": "silent"}, {"silent": silent}, "x")


def test_of_many_names_the_nearest_are_listed():
    names = [f"name{i}" for i in range(50)]
    assert nearest("q49", names).startswith("expected one of 50 names, the nearest are name49, ")
    assert len(nearest("q49", names)) < 80


def test_nearest_ignores_dashes_and_case():
    assert nearest("CartPole_PPO", ["cartpole-ppo", "x"]) == "did you mean 'cartpole-ppo'?"


def test_defaults_are_filled_in_and_mean_the_same():
    tree = {"use": "make", "high": 1, "gate": {"use": "gate"}}
    whole = complete(tree, NAMES)
    assert whole == {
        "use": "make",
        "high": 1,
        "gate": {"use": "gate", "low": 0.1},
        "mode": "a",
        "count": 3,
        "flag": False,
        "betas": [0.9, 0.999],
        "maybe": None,
    }
    assert build(whole, NAMES) == build(tree, NAMES)
    assert yaml.safe_load(dump(whole)) == whole
    assert tree == {"use": "make", "high": 1, "gate": {"use": "gate"}}


BASE = """
task: {use: cartpole}
algorithm: {use: ppo, clip: 0.2, gamma: 0.98}
update: {epochs: 8, lr: {use: Linear, start: 1.0, end: 0.0}}
reward_scaling: {clamp: 10.0}
"""


def test_a_base_gives_what_the_recipe_does_not_state(tmp_path):
    (tmp_path / "base.yaml").write_text(BASE)
    text = """
    base: base.yaml
    algorithm: {clip: 0.1}
    update: {lr: {use: Cosine, start: 2.0}}
    reward_scaling: null
    seed: 3
    """
    assert read(tmp_path, text, "update.epochs=2") == {
        "task": {"use": "cartpole"},
        "algorithm": {"use": "ppo", "clip": 0.1, "gamma": 0.98},
        "update": {"epochs": 2, "lr": {"use": "Cosine", "start": 2.0}},
        "reward_scaling": None,
        "seed": 3,
    }


def test_another_use_takes_the_place_of_the_base(tmp_path):
    (tmp_path / "base.yaml").write_text(BASE)
    tree = read(tmp_path, "{base: ./base.yaml, algorithm: {use: a2c}}")
    assert tree["algorithm"] == {"use": "a2c"}
    assert tree["update"]["epochs"] == 8


def test_a_recipe_that_ships_can_be_a_base(tmp_path):
    assert read(tmp_path, "{base: cartpole-ppo, seed: 5}") == {
        **load(shipped()["cartpole-ppo"]),
        "seed": 5,
    }


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("cartpole-pp", "no recipe 'cartpole-pp' to be its base, did you mean 'cartpole-ppo'"),
        ("missing.yaml", "cannot read the recipe .*missing.yaml"),
        ("2", "'base' must be the name of a recipe or a file, got 2"),
        ("r.yaml", "has a base itself: name 'r.yaml' as the base"),
    ],
)
def test_bases_that_do_not_fit(tmp_path, base, message):
    with pytest.raises(RecipeError, match=message):
        read(tmp_path, f"{{base: {base}, seed: 1}}")


def test_a_name_that_leaves_out_a_part_gets_the_one_that_has_it():
    known = ("cartpole-ppo", "cartpole-dqn", "cartpole-discrete-sac", "pendulum-sac")
    assert nearest("cartpole-sac", known) == "did you mean 'cartpole-discrete-sac'?"
    assert nearest("cartpol-ppo", known) == "did you mean 'cartpole-ppo'?"
