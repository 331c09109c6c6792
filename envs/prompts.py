"""From rows to prompts: columns, conversations, and prompts that are too long."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from polopt.envs.rows import Source, first_line

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

__all__ = ["Prompts", "hold_out", "lengths", "load_tokenizer", "read"]

_PASSED_BY_TRL = (
    "prompts", "completions", "completion_ids", "environments", "trainer_state", "log_extra",
    "log_metric",
)  # fmt: skip
_TRUTH = "reward_model.ground_truth"  # where verl keeps the answer
_BATCH = 1000


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """What becomes of a row.

    Attributes:
        prompt_key: Column of the prompts, texts or lists of messages.
        answer_key: Column of the right answers, `a.b` for an entry of one; by default verl's
            `reward_model.ground_truth` where it exists, otherwise `answer` as it is.
        system_prompt: Message of the system that is put before each prompt.
        chat: Make texts conversations of one message of the user. A system prompt does.
        tokenizer: Folder or name of the model whose tokenizer and chat template measure prompts.
        max_prompt_length: Longest prompt, tokens, template included; None: any.
        overlong_prompts: What happens to longer ones; `cut` takes the beginning off a text, or
            off the last message of a conversation.
    """

    prompt_key: str = "prompt"
    answer_key: str | None = None
    system_prompt: str | None = None
    chat: bool = False
    tokenizer: str | None = None
    max_prompt_length: int | None = None
    overlong_prompts: Literal["drop", "cut", "refuse"] = "drop"

    def __post_init__(self) -> None:
        if self.max_prompt_length is None:
            return
        if self.max_prompt_length < 1:
            raise ValueError(f"max_prompt_length must be at least 1, got {self.max_prompt_length}")
        if self.tokenizer is None:
            raise ValueError(
                "max_prompt_length is in tokens: name the folder or hub name of the model in "
                "tokenizer"
            )


def read(
    source: Source, how: Prompts, limit: int | None = None
) -> tuple["Dataset", dict[str, Any]]:
    """Read rows, make them prompts, and count what is left out.

    Args:
        source: Where they are.
        how: What becomes of them.
        limit: Rows used, at most; the first ones.

    Returns:
        A dataset with the columns `prompt`, `answer` if there are answers, and all others; and
        counts: `rows`, dropped as `empty` (no prompt, one of blanks, or no answer) and as
        `too_long`, `cut`, `kept`, the `share_dropped`, and the `longest` prompt in tokens, None
        if not measured.

    Raises:
        ValueError: If a file, a column or the tokenizer is missing, or no row is left.
    """
    import datasets
    import pyarrow as pa

    table = _named(source.table().slice(0, limit), source, how)
    prompts = _conversations(table, source, how)
    lacking = [_blank(prompt) for prompt in prompts]
    if "answer" in table.column_names:
        known = table["answer"].is_valid().to_pylist()
        lacking = [bad or not good for bad, good in zip(lacking, known, strict=True)]
    keep = [i for i, bad in enumerate(lacking) if not bad]
    counts = {"rows": len(prompts), "empty": len(prompts) - len(keep), "too_long": 0, "cut": 0}
    longest = None
    if how.max_prompt_length is not None:
        keep, longest = _fit(prompts, keep, source, how, counts)
    if not keep:
        raise ValueError(
            f"no row of {source} is left of {len(prompts)}: {counts['empty']} without a prompt "
            f"or an answer, {counts['too_long']} longer than max_prompt_length="
            f"{how.max_prompt_length}"
        )
    if counts["cut"] or how.chat or how.system_prompt is not None:
        place = table.column_names.index("prompt")
        table = table.set_column(place, "prompt", pa.chunked_array([pa.array(prompts)]))
    rows = datasets.Dataset(table)
    report = {
        **counts,
        "kept": len(keep),
        "share_dropped": (len(prompts) - len(keep)) / len(prompts),
        "longest": longest,
    }
    return rows if len(keep) == len(prompts) else rows.select(keep), report


def _named(table: "pa.Table", source: Source, how: Prompts) -> "pa.Table":
    """Return a table with the columns `prompt` and, where there are answers, `answer`."""
    import pyarrow as pa

    if not table.num_rows:
        raise ValueError(f"{source} has no rows")
    answer_key = how.answer_key
    if answer_key is None and _path(table.schema, _TRUTH):
        answer_key = _TRUTH
    found: dict[str, pa.ChunkedArray] = {}
    wanted = {"prompt": ("prompt_key", how.prompt_key)}
    if answer_key is not None:
        wanted["answer"] = ("answer_key", answer_key)
    for name, (setting, key) in wanted.items():
        path = _path(table.schema, key)
        if not path:
            raise ValueError(
                f"{source} has no column {key!r}, it has {', '.join(sorted(table.column_names))}: "
                f"set {setting}"
            )
        column = table[path[0]]
        for part in path[1:]:
            import pyarrow.compute

            column = pyarrow.compute.struct_field(column, part)  # type: ignore[attr-defined]
        found[name] = column
    used = {how.prompt_key, answer_key, *found}
    rest = [name for name in table.column_names if name not in used]
    taken = [name for name in rest if name in _PASSED_BY_TRL]
    if taken:
        raise ValueError(
            f"{source} has the column {taken[0]!r}, and TRL gives rewards something else by that "
            "name: rename it"
        )
    return pa.table({**found, **{name: table[name] for name in rest}})


def _path(schema: "pa.Schema", key: str) -> list[str]:
    """Return the steps to a column, `[a]` or for an entry of a column `[a, b]`; empty: none."""
    import pyarrow as pa

    if key in schema.names:
        return [key]
    first, *rest = key.split(".")
    if first not in schema.names:
        return []
    kind = schema.field(first).type
    for part in rest:
        if not pa.types.is_struct(kind) or kind.get_field_index(part) < 0:
            return []
        kind = kind.field(part).type
    return [first, *rest]


def _conversations(table: "pa.Table", source: Source, how: Prompts) -> list[Any]:
    """Return the prompts, with the system's message before them."""
    import pyarrow as pa

    kind = table.schema.field("prompt").type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    messages = (
        (pa.types.is_list(kind) or pa.types.is_large_list(kind))
        and pa.types.is_struct(kind.value_type)
        and {"role", "content"} <= {field.name for field in kind.value_type}
    )
    if not text and not messages and not pa.types.is_null(kind):
        raise ValueError(
            f"the column {how.prompt_key!r} of {source} holds {kind}, expected texts, or "
            "conversations as lists of messages with role and content"
        )
    prompts = table["prompt"].to_pylist()
    if text and (how.chat or how.system_prompt is not None):
        prompts = [[{"role": "user", "content": p}] if p else None for p in prompts]
    if how.system_prompt is None:
        return prompts
    own = [i for i, p in enumerate(prompts) if p and p[0]["role"] == "system"]
    if own:
        raise ValueError(
            f"row {own[0]} of {source} has a message of the system already: leave out "
            "system_prompt, or take the message out of the rows"
        )
    first = {"role": "system", "content": how.system_prompt}
    return [[first, *p] if p else None for p in prompts]


def _blank(prompt: Any) -> bool:  # noqa: ANN401
    """Whether nothing is asked: no text but blanks, in a conversation besides the system's."""
    if not prompt or isinstance(prompt, str):
        return not (prompt and prompt.strip())
    asked = [m["content"] for m in prompt if m and m["role"] != "system"]
    return all(not part or (isinstance(part, str) and not part.strip()) for part in asked)


def _fit(
    prompts: list[Any], keep: list[int], source: Source, how: Prompts, counts: dict[str, int]
) -> tuple[list[int], int]:
    """Drop, cut (in place) or refuse prompts that are too long; return what is left."""
    assert how.tokenizer is not None
    assert how.max_prompt_length is not None
    ruler = _Ruler(load_tokenizer(how.tokenizer), how.tokenizer)
    lengths = ruler.lengths([prompts[i] for i in keep])
    limit = how.max_prompt_length
    long = [(i, length) for i, length in zip(keep, lengths, strict=True) if length > limit]
    if long and how.overlong_prompts == "refuse":
        row, length = max(long, key=lambda pair: pair[1])
        raise ValueError(
            f"{len(long)} of {len(prompts)} prompts of {source} are longer than "
            f"max_prompt_length={limit} tokens, the longest, row {row}, has {length}: raise the "
            "limit, or set overlong_prompts to drop or cut"
        )
    gone = {i for i, _ in long}
    if how.overlong_prompts == "cut":
        for i, length in long:
            shorter = ruler.cut(prompts[i], length, limit)
            if shorter is not None:
                prompts[i] = shorter
                gone.discard(i)
    counts["cut"], counts["too_long"] = len(long) - len(gone), len(gone)
    return [i for i in keep if i not in gone], max(lengths, default=0)


class _Ruler:
    """Measures prompts in tokens, as they reach the model."""

    def __init__(self, tokenizer: Any, name: str) -> None:  # noqa: ANN401
        self._tokenizer, self._name = tokenizer, name

    def lengths(self, prompts: Sequence[Any]) -> list[int]:
        found: list[int] = []
        for start in range(0, len(prompts), _BATCH):
            part = list(prompts[start : start + _BATCH])
            talks = not isinstance(part[0], str)
            if talks:
                part = self._rendered(part)
            ids = self._tokenizer(part, add_special_tokens=not talks)["input_ids"]
            found += map(len, ids)
        return found

    def _rendered(self, conversations: list[Any]) -> list[str]:
        if self._tokenizer.chat_template is None:
            raise ValueError(no_template(self._name))
        return self._tokenizer.apply_chat_template(
            conversations, add_generation_prompt=True, tokenize=False
        )

    def cut(self, prompt: Any, length: int, limit: int) -> Any:  # noqa: ANN401
        """Return the prompt without its beginning, or None where that is not enough."""
        talks = not isinstance(prompt, str)
        text = prompt[-1]["content"] if talks else prompt
        if not isinstance(text, str):
            return None
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        while length > limit:  # text cut between tokens may have a token more than it should
            ids = ids[length - limit :]
            if not ids:
                return None
            text = self._tokenizer.decode(ids)
            prompt = [*prompt[:-1], {**prompt[-1], "content": text}] if talks else text
            (length,) = self.lengths([prompt])
        return prompt


def lengths(prompts: Sequence[Any], tokenizer: Any) -> list[int]:  # noqa: ANN401
    """Return how long prompts are as they reach the model, tokens.

    Args:
        prompts: Texts, or conversations.
        tokenizer: Of the model; with a chat template for conversations.
    """
    return _Ruler(tokenizer, tokenizer.name_or_path).lengths(prompts)


def load_tokenizer(name: str) -> Any:  # noqa: ANN401
    """Load the tokenizer of a model.

    Raises:
        ValueError: If there is none.
    """
    import os

    from transformers import AutoTokenizer

    path = os.path.expandvars(os.path.expanduser(name))
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load the tokenizer {name!r}: {first_line(error)}") from error


def no_template(name: str) -> str:
    """Return what to do about a tokenizer without a chat template."""
    return (
        f"the tokenizer {name!r} has no chat template, and the prompts are conversations: take a "
        "model that was trained on them, save the tokenizer with a chat_template, or use texts "
        "as prompts"
    )


def hold_out(rows: "Dataset", share: float) -> tuple["Dataset", "Dataset"]:
    """Split rows by prompt: those whose prompts have the smallest hashes are held out.

    Rows that share a prompt stay together, and the order of the rows does not matter.

    Args:
        rows: With the column `prompt`.
        share: Of the different prompts, in (0, 1).

    Returns:
        The rows to train on, and one row of each held-out prompt.

    Raises:
        ValueError: If fewer than two different prompts are there.
    """
    digests = [digest(prompt) for prompt in rows["prompt"][:]]
    first: dict[bytes, int] = {}
    for i, key in enumerate(digests):
        first.setdefault(key, i)
    if len(first) < 2:
        raise ValueError("one prompt cannot be both held out and trained on: give eval_files")
    count = min(max(round(share * len(first)), 1), len(first) - 1)
    held = set(sorted(first)[:count])
    train = [i for i, key in enumerate(digests) if key not in held]
    return rows.select(train), rows.select(sorted(first[key] for key in held))


def digest(prompt: str | Sequence[Mapping[str, Any]]) -> bytes:
    """Return a hash of a prompt."""
    return hashlib.sha256(repr(prompt).encode()).digest()
