"""A key for all of a vLLM server, its development endpoints included.

vLLM's own `--api-key` guards paths under /v1 alone: whoever reaches the port may replace the
weights. Given as `--middleware polopt.ext.vllm.auth.RequireKey`.
"""

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

__all__ = ["KEY", "RequireKey"]

KEY = "POLOPT_VLLM_KEY"
"""The environment variable with the key; arguments could be read by others of the machine."""

_OPEN = ("/health", "/ping")
"""Paths that only say that the server is there."""


class RequireKey:
    """ASGI middleware that answers 401 to a request without the key.

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
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            body = b'{"error": "the Authorization header does not hold the key of this server"}'
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _knows(self, scope: dict[str, Any]) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self._expected)
