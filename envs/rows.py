"""Rows of files and of the Hugging Face hub. They are data: nothing in them is executed."""

import glob
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

__all__ = ["Source", "first_line"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where rows are.

    Attributes:
        files: Parquet, JSON or JSON-lines files; `~`, `$NAME` and `*` are expanded.
        name: Instead, a dataset on the hub, or a folder that `datasets.load_dataset` reads.
        config: Its configuration, if it has several.
        split: Its split.
    """

    files: tuple[str, ...] = ()
    name: str | None = None
    config: str | None = None
    split: str = "train"

    def __str__(self) -> str:
        if self.name is not None:
            return f"{self.name} ({self.split})"
        some = ", ".join(self.files[:3])
        return some if len(self.files) <= 3 else f"{some} and {len(self.files) - 3} more files"

    def paths(self) -> list[Path]:
        """Return the files, whether they are there or not."""
        found: list[Path] = []
        for file in self.files:
            path = os.path.expandvars(os.path.expanduser(file))
            many = sorted(glob.glob(path)) if glob.has_magic(path) else []
            found += map(Path, many or [path])
        return found

    def check_files(self) -> None:
        """Refuse a file that is not here, without reading any.

        Raises:
            ValueError: With its path.
        """
        for path in self.paths():
            _check_file(path)

    def count(self) -> int:
        """Return the number of rows without reading them, 0 where that is not known.

        It is not for a name, if a file is not here, and for lists of JSON.

        Raises:
            ValueError: If a file cannot be read.
        """
        if self.name is not None or not all(path.is_file() for path in self.paths()):
            return 0
        counts = [_count(path) for path in self.paths()]
        return 0 if None in counts else sum(counts)  # type: ignore[arg-type]

    def table(self) -> "pa.Table":
        """Read all rows.

        Raises:
            ValueError: If that is not possible, with the file and the reason.
        """
        import pyarrow as pa

        if self.name is not None:
            return self._load().data.table
        tables = [_read(path) for path in self.paths()]
        try:
            return pa.concat_tables(tables, promote_options="permissive")
        except pa.ArrowException as error:
            raise ValueError(
                f"the columns of {self} do not fit together: {first_line(error)}"
            ) from error

    def _load(self) -> "Dataset":
        import datasets

        progress = datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            found: Any = datasets.load_dataset(str(self.name), self.config, split=self.split)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"cannot load the dataset {self.name!r} (config {self.config}, split "
                f"{self.split!r}): {first_line(error).rstrip('.')}; files of yours are named by "
                "train_files"
            ) from error
        finally:
            if not progress:
                datasets.enable_progress_bars()
        return found.flatten_indices() if found._indices is not None else found


def _count(path: Path) -> int | None:
    try:
        if path.suffix == ".parquet":
            from pyarrow.parquet import ParquetFile

            return int(ParquetFile(path).metadata.num_rows)
        with path.open("rb") as file:
            if file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
                return None
            file.seek(0)
            return sum(1 for line in file if line.strip())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {first_line(error)}") from error


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}: bring it here or change the path")


def _read(path: Path) -> "pa.Table":
    _check_file(path)
    try:
        if path.suffix == ".parquet":
            from pyarrow.parquet import read_table

            table = read_table(path, partitioning=None)  # type: ignore[arg-type]
            return table.replace_schema_metadata(None)
        if path.suffix in (".json", ".jsonl"):
            return _table(list(_objects(path)), path)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {first_line(error)}") from error
    raise ValueError(f"cannot read {path}: expected a file .parquet, .json or .jsonl")


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file that holds one a line, or one list of them."""
    text = path.read_text(encoding="utf-8-sig")
    lines: Sequence[Any] = text.split("\n")  # splitlines cuts at U+2028, too, which texts may hold
    listed = text.lstrip().startswith("[")
    if listed:
        lines = json.loads(text)
    for i, line in enumerate(lines, 1):
        if not listed and not line.strip():
            continue
        try:
            found = line if listed else json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {i} is not JSON: {error}") from error
        if not isinstance(found, dict):
            place = "entry" if listed else "line"
            raise ValueError(f"{place} {i} is not an object with columns, but {str(found)[:40]!r}")
        yield found


def _table(rows: Sequence[Mapping[str, Any]], path: Path) -> "pa.Table":
    import pyarrow as pa

    columns = {}
    for key in {key: None for row in rows for key in row}:
        try:
            columns[key] = pa.array([row.get(key) for row in rows])
        except (pa.ArrowException, OverflowError) as error:
            raise ValueError(f"the column {key!r} mixes types: {first_line(error)}") from error
    return pa.table(columns)


def first_line(error: BaseException) -> str:
    """Return the first line of an error."""
    return str(error).strip().split("\n")[0] or type(error).__name__
