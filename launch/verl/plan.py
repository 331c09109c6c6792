"""The work sheet of an import: what verl would use, and what is said about each key."""

from dataclasses import dataclass, field
from typing import Any, Literal

from polopt.launch.verl import schema
from polopt.launch.verl.launches import Launch
from polopt.launch.verl.overrides import Override
from polopt.launch.verl.shell_state import set_option

__all__ = ["NOT_SET", "ImportFault", "Plan", "Row", "Verdict"]

Verdict = Literal[
    "exact",
    "converted",
    "approximate",
    "ours",
    "inert",
    "no effect",
    "unsupported",
    "refused",
]
"""What happens to a key.

- `exact`: the same number in the same unit.
- `converted`: the same meaning after arithmetic or renaming.
- `approximate`: something close; the row says how it differs.
- `ours`: TRL has no such thing, polopt does.
- `inert`: verl itself does nothing with it.
- `no effect`: what it controls is off, or it has the value that changes nothing.
- `unsupported`: left out; the row says what that costs. The loss stays what it was.
- `refused`: leaving it out would change what is trained.
"""

NOT_SET = object()
_LARGEST = 10**12


class ImportFault(ValueError):
    """The script cannot be imported; one sentence that starts with the line."""


@dataclass
class Row:
    """What the report says about one override."""

    override: Override
    verdict: Verdict
    target: str = ""
    how: str = ""


@dataclass
class Plan:
    """Collects the parts of the recipe and the rows of the report.

    Attributes:
        launch: What was read.
        trainer: Fields of TRL's `GRPOConfig`.
        sections: The other sections of the recipe.
        accelerate: Accelerate's configuration file.
        vllm: Flags of the vLLM server by name; None for a switch.
        rows: One row per override that was set, by identity of the override.
        facts: Quantities with their arithmetic, for the report.
        defaults: verl's silent defaults that are written out, as (key, target, reason).
        traps: What does not do what the script's author may think.
        refusals: Why the import stops unless allowed.
    """

    launch: Launch
    trainer: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)
    accelerate: dict[str, Any] = field(default_factory=dict)
    vllm: dict[str, Any] = field(default_factory=dict)
    rows: dict[int, Row] = field(default_factory=dict)
    facts: list[tuple[str, Any, str]] = field(default_factory=list)
    defaults: list[tuple[str, str, str]] = field(default_factory=list)
    traps: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._last: dict[str, Override] = {}
        for item in self.launch.overrides:
            earlier = self._last.get(item.name)
            if item.prefix == "~":
                self._last.pop(item.name, None)
                continue
            self._last[item.name] = item
            if earlier is not None:
                self.rows[id(earlier)] = Row(earlier, "inert", "", f"set again on line {item.line}")
                self.traps.append(
                    f"{item.name} is set twice, on lines {earlier.line} and {item.line}: "
                    f"{item.text} wins over {earlier.text}"
                )

    def override(self, name: str) -> Override | None:
        """The override that sets a key, the last one if there are several."""
        return self._last.get(name)

    def is_set(self, name: str) -> bool:
        """Whether the script sets the key."""
        return name in self._last

    def names(self) -> list[str]:
        """The keys that the script sets."""
        return list(self._last)

    def value(self, name: str, default: Any = NOT_SET) -> Any:  # noqa: ANN401
        """The value that verl would use: the script's, else verl's default."""
        return self._resolved(self._raw(name, default), (name,))

    def _raw(self, name: str, default: Any = NOT_SET) -> Any:  # noqa: ANN401
        item = self._last.get(name)
        if item is not None:
            return item.value
        if default is not NOT_SET:
            return default
        found = schema.find(name)
        return found.default if found else None

    def _resolved(self, value: Any, path: tuple[str, ...]) -> Any:  # noqa: ANN401
        """Follow `${other.key}` of Hydra."""
        if not (isinstance(value, str) and value.startswith("${") and value.endswith("}")):
            return value
        target = schema.canonical(value[2:-1])
        if "{" in target or "." not in target or schema.find(target) is None:
            return value
        if target in path:
            line = self._line(path[0])
            cycle = " -> ".join((*path, target))
            raise ImportFault(f"{line}keys refer to each other in a circle: {cycle}")
        return self._resolved(self._raw(target), (*path, target))

    def _line(self, name: str) -> str:
        item = self._last.get(name)
        return f"line {item.line}: " if item and item.line else ""

    def fail(self, name: str, expected: str) -> ImportFault:
        """The error for a value that does not fit."""
        value, item = self.value(name), self._last.get(name)
        if item and item.asks:
            asks = " and ".join(item.asks)
            return ImportFault(
                f"{self._line(name)}{item.key} depends on {asks}, which reading the script does "
                f"not give: supply it with {set_option(item.asks[0])}"
            )
        key = item.key if item else name
        return ImportFault(f"{self._line(name)}{key} must be {expected}, got {value!r}")

    def integer(self, name: str, *, low: int = 0, default: Any = NOT_SET) -> int:  # noqa: ANN401
        """A whole number of at least `low`."""
        value = self.value(name, default)
        if isinstance(value, str) and value.lstrip("-").isdecimal() and len(value) < 20:
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(name, "a whole number")
        if not low <= value <= _LARGEST:
            raise self.fail(name, f"between {low} and {_LARGEST}")
        return value

    def optional_integer(self, name: str, *, low: int = 0) -> int | None:
        """A whole number, or None for null."""
        return None if self.value(name) is None else self.integer(name, low=low)

    def number(self, name: str, *, default: Any = NOT_SET) -> float:  # noqa: ANN401
        """A finite number."""
        value = self.value(name, default)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise self.fail(name, "a number") from None
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise self.fail(name, "a number")
        if abs(value) > _LARGEST:
            raise self.fail(name, f"at most {_LARGEST} in size")
        return value

    def flag(self, name: str, *, default: Any = NOT_SET) -> bool:  # noqa: ANN401
        """True or false."""
        value = self.value(name, default)
        if value is None:
            return False
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if isinstance(value, bool) or value in (0, 1):
            return bool(value)
        raise self.fail(name, "true or false")

    def text(self, name: str, *, default: Any = NOT_SET) -> str:  # noqa: ANN401
        """Text; numbers are written out, null is empty."""
        value = self.value(name, default)
        if isinstance(value, list | dict):
            raise self.fail(name, "a single value")
        return "" if value is None else str(value)

    def texts(self, name: str) -> list[str]:
        """A list of texts; a single one is a list of one."""
        value = self.value(name)
        if value is None:
            return []
        if isinstance(value, dict):
            raise self.fail(name, "a list")
        return [str(v) for v in value] if isinstance(value, list) else [str(value)]

    def say(self, name: str, verdict: Verdict, target: str = "", how: str = "") -> None:
        """Add the row of a key, if the script sets it.

        Args:
            name: The key.
            verdict: See `Verdict`.
            target: Where its meaning went, such as `trainer.learning_rate`.
            how: Arithmetic, difference or consequence.
        """
        item = self._last.get(name)
        if item is None:
            return
        self.rows[id(item)] = Row(item, verdict, target, how)
        if verdict == "refused":
            self.refusals.append(f"{self._line(name)}{item.key}={item.text}: {how}")

    def refuses(self, name: str) -> bool:
        """Whether the row of a key is a refusal."""
        item = self._last.get(name)
        return (
            item is not None and id(item) in self.rows and self.rows[id(item)].verdict == "refused"
        )

    def default(self, name: str, target: str, reason: str) -> None:
        """State a silent default of verl that is written out, unless the script sets it."""
        if name not in self._last:
            self.defaults.append((name, target, reason))
