"""What goes wrong with a server; importing this needs no library."""

__all__ = ["ServerError", "StartError"]


class ServerError(RuntimeError):
    """The server did not do what it was asked, or does not hold the trainer's weights.

    Args:
        message: What and why.
        refused: The server answered that the request is wrong: another would say the same.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class StartError(RuntimeError):
    """The server did not come up; the message has the end of its log."""
