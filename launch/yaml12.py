"""YAML as recipes use it: the scalars of YAML 1.2, no duplicate keys, nothing constructed."""

import re
from collections.abc import Mapping
from typing import Any

import yaml

__all__ = ["dump", "parse", "plain"]


class _Loader(yaml.SafeLoader):
    """Scalars of YAML 1.2, and no duplicate keys.

    PyYAML follows YAML 1.1, where `1e-4` is a string, `no` and `on` are booleans, `010` is
    eight and `1:30` is ninety.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [r for r in resolvers if r[0].rpartition(":")[2] in ("null", "merge")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        """Construct a mapping with unique text keys."""
        self.flatten_mapping(node)
        result: dict[str, Any] = {}
        written: set[str] = set()
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            where = f"line {key_node.start_mark.line + 1}"
            if not isinstance(key, str):
                raise ValueError(f"{where}: the key {key!r} is not text, put it in quotes")
            # Keys that `<<: *base` merged lie elsewhere in the file, and may be overridden.
            if node.start_mark.index <= key_node.start_mark.index < node.end_mark.index:
                if key in written:
                    raise ValueError(f"{where}: the key {key!r} is there twice, remove one")
                written.add(key)
            result[key] = self.construct_object(value_node, deep=True)
        return result

    def integer(self, node: yaml.ScalarNode) -> int:
        """Construct an integer: decimal (underscores allowed), 0o or 0x."""
        text = node.value.replace("_", "")
        return int(text, 0 if "o" in text or "x" in text else 10)

    def number(self, node: yaml.ScalarNode) -> float:
        """Construct a float, also .inf and .nan."""
        text = node.value.replace("_", "").lower()
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader`, or a reader of YAML 1.1, would not read as text."""


def _sequence(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    nested = any(isinstance(i, list | dict) for i in items)
    return dumper.represent_sequence(_TAG + "seq", items, flow_style=not nested)


_TAG = "tag:yaml.org,2002:"
_MOST = 1_000_000  # entries of a recipe: a short text with anchors can stand for any number
for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^(?:[-+]?\d[\d_]*|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789"),
    (
        "float",
        r"^(?:[-+]?(?:\.\d[\d_]*|\d[\d_]*(?:\.[\d_]*)?)(?:[eE][-+]?\d+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+.0123456789",
    ),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _tag, re.compile(_pattern), list(_first))
_Dumper.add_representer(list, _sequence)
_Loader.add_constructor(_TAG + "map", _Loader.mapping)
_Loader.add_constructor(_TAG + "int", _Loader.integer)
_Loader.add_constructor(_TAG + "float", _Loader.number)


def parse(text: str) -> Any:  # noqa: ANN401
    """Read YAML text; entries shared through anchors become copies.

    Raises:
        ValueError: If it is not YAML, or a key is not text or stands twice in a mapping; the
            message has the line.
    """
    try:
        tree = yaml.load(text, _Loader)
        if _entries(tree, {}) > _MOST:
            raise ValueError(f"anchors repeat each other into more than {_MOST} entries")
        return plain(tree)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ValueError(f"{where}not valid YAML: {problem}") from error
    except RecursionError as error:
        raise ValueError("not valid YAML: nested too deep") from error


def dump(tree: Mapping[str, Any]) -> str:
    """Return a tree as text that `parse` reads back."""
    return yaml.dump(plain(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _entries(node: Any, known: dict[int, int]) -> int:  # noqa: ANN401
    """Count entries; parts shared through anchors as often as they stand there."""
    if not isinstance(node, dict | list):
        return 1
    if id(node) not in known:
        items = node.values() if isinstance(node, dict) else node
        known[id(node)] = 1 + sum(_entries(i, known) for i in items)
    return known[id(node)]


def plain(node: Any) -> Any:  # noqa: ANN401
    """Copy a tree; tuples become lists."""
    if isinstance(node, Mapping):
        return {k: plain(v) for k, v in node.items()}
    if isinstance(node, list | tuple):
        return [plain(v) for v in node]
    return node
