"""A key for all of a vLLM server, its development endpoints included, and what it serves.

vLLM's own `--api-key` guards paths under /v1 alone: whoever reaches the port may replace the
weights. Given as `--middleware polopt.ext.vllm.auth.RequireKey`.
"""

import hmac
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

from polopt import __version__

__all__ = ["ABOUT", "KEY", "RequireKey"]

ABOUT = "/polopt"
"""The path that answers with the versions and the model of the server, as JSON."""

KEY = "POLOPT_VLLM_KEY"
"""The environment variable with the key; arguments could be read by others of the machine."""

_OPEN = ("/health", "/ping")
"""Paths that only say that the server is there."""


class RequireKey:
    """ASGI middleware that answers 401 to a request without the key, and `ABOUT` itself.

    Args:
        app: What answers the others.

    Raises:
        RuntimeError: If the environment has no key.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        key = os.environ.get(KEY)
        if not key:
            raise RuntimeError(f"set {KEY} to the key of this server")
        self._expected = f"Bearer {key}".encode()

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Callable[..., Awaitable[Any]],
        send: Callable[..., Awaitable[None]],
    ) -> None:
        """See ASGI."""
        if scope["type"] == "lifespan" or scope.get("path") in _OPEN or self._knows(scope):
            if scope.get("path") == ABOUT:
                await _answer(send, 200, _about(scope["app"].state.vllm_config))
            else:
                await self.app(scope, receive, send)
        elif scope["type"] == "http":
            error = "the Authorization header does not hold the key of this server"
            await _answer(send, 401, {"error": error})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _knows(self, scope: dict[str, Any]) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self._expected)


def _about(config: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return what a trainer compares with its own: `config` is vLLM's VllmConfig."""
    import vllm

    model = config.model_config.hf_config.to_dict()
    return {"polopt": __version__, "vllm": vllm.__version__, "model": model}


async def _answer(
    send: Callable[..., Awaitable[None]], status: int, content: dict[str, Any]
) -> None:
    body = json.dumps(content, default=str).encode()
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
