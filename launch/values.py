"""Values of a recipe, converted to the types that a signature names."""

import types
from collections.abc import Mapping
from dataclasses import is_dataclass
from types import GenericAlias
from typing import Any, Literal, Union, get_args, get_origin

import pydantic

__all__ = ["convert", "flatten"]

_ANY_TYPE = pydantic.ConfigDict(arbitrary_types_allowed=True)
_KINDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text",
    list: "a list", tuple: "a list", type(None): "null",
}  # fmt: skip


def convert(value: Any, annotation: Any, path: str) -> Any:  # noqa: ANN401
    """Return a value as its annotated type.

    Args:
        value: As the recipe has it, or built from it.
        annotation: A type; what pydantic cannot check is left to the call itself.
        path: Where it stands in the recipe, for messages.

    Raises:
        ValueError: If it is of another type.
    """
    if isinstance(value, bool) and not _takes_bool(annotation):  # pydantic reads true as 1
        raise ValueError(f"'{path}' must be {_kind(annotation)}, got {value!r}")
    try:
        # The tuple is there because pydantic takes no config for a bare dataclass.
        single: Any = GenericAlias(tuple, (annotation,))
        adapter = pydantic.TypeAdapter(single, config=_ANY_TYPE)
    except (pydantic.PydanticUserError, pydantic.PydanticUndefinedAnnotation, TypeError):
        return value
    try:
        return adapter.validate_python((value,))[0]
    except pydantic.ValidationError as error:
        if _none(value) and type(None) in get_args(annotation):
            raise ValueError(
                f"'{path}' must be {_kind(annotation)}, got {value!r}: write null for none"
            ) from None
        raise ValueError(_told(error, value, annotation, path)) from None


def flatten(tree: Any, path: str = "") -> dict[str, Any]:  # noqa: ANN401
    """Return the leaves of a tree by dotted path, as overrides name them."""
    items: Any = ()
    if isinstance(tree, Mapping):
        items = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    if not items:
        return {path: tree} if path else {}
    return {p: v for k, sub in items for p, v in flatten(sub, f"{path}.{k}".lstrip(".")).items()}


def _told(error: pydantic.ValidationError, value: Any, annotation: Any, path: str) -> str:  # noqa: ANN401
    first = error.errors()[0]
    where = path
    inside: Any = value
    for key in first["loc"][1:]:  # it names alternatives of a union as well
        if not _has(inside, key):
            break
        where, inside = f"{where}.{key}", inside[key]
    if first["type"].startswith("dataclass") and where == path:
        return f"'{path}' must be {_kind(annotation)}, got {value!r}"
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if first["type"] == "missing" and isinstance(value, list):
        message = "too few items"
    if first["type"] != "value_error":  # a section's own message says it already
        message += f", got {first['input']!r}"
    return f"'{where}': {message}"


def _none(value: object) -> bool:
    return isinstance(value, str) and value.lower() == "none"


def _has(value: Any, key: int | str) -> bool:  # noqa: ANN401
    if isinstance(value, list):
        return key in range(len(value))
    return isinstance(value, dict) and key in value


def _takes_bool(annotation: Any) -> bool:  # noqa: ANN401
    if annotation in (Any, object, bool):
        return True
    return any(a is True or a is False or _takes_bool(a) for a in get_args(annotation))


def _kind(annotation: Any) -> str:  # noqa: ANN401
    """Return in plain words what a recipe may hold for a type."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_kind, inside)))
    if origin is Literal:
        return " or ".join(map(repr, inside))
    kind = origin or annotation
    if kind in _KINDS:
        return _KINDS[kind]
    if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, Mapping)):
        return "a mapping of settings"
    return getattr(kind, "__name__", None) or str(annotation)
