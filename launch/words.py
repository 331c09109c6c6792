"""The words of a command line that change settings of a recipe."""

from collections.abc import Sequence

from polopt.launch.recipe import RecipeError

__all__ = ["check_words"]


def check_words(words: Sequence[str], what: str) -> None:
    """Refuse words that are no settings.

    Args:
        words: What stands on the command line as settings.
        what: Of what there is one at a time, for the message.

    Raises:
        RecipeError: With the first that is not of the form key=value.
    """
    for place, word in enumerate(words):
        if "=" in word:
            continue
        before = words[:place]
        cut = next((w for w in before if w.count("{") + w.count("[") > _closed(w)), None)
        if cut is not None:  # the shell took it apart at its spaces
            raise RecipeError(
                f"{word!r} is not of the form key=value: put the whole setting that begins with "
                f"{cut} in quotes, '{cut} …'"
            )
        raise RecipeError(f"{word!r} is not of the form key=value; one {what} at a time")


def _closed(word: str) -> int:
    return word.count("}") + word.count("]")
