"""API keys and request ids: who may call, and under which label.

Keys are compared as SHA-256 digests, each in constant time and always all of them, so that neither time nor text tells a
caller how near a guess came. Knows nothing of routes; the app asks for every route that is not marked public.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re

from octavo.server.errors import ApiError, ErrorType

MESSAGE = "missing or invalid API key: send it as 'Authorization: Bearer KEY'"

# Visible ASCII without quotes or separators: safe in a header, a log line and a shell.
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class KeyRing:
    """The keys that this server accepts; with none, everyone may call."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, authorization: list[bytes]) -> None:
        """Raises ApiError(401) unless the one Authorization header of a request holds one of the keys."""
        if not self._digests:
            return
        given = authorization[0] if len(authorization) == 1 else b""
        scheme, _, key = given.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()

        known = False
        for accepted in self._digests:
            known |= hmac.compare_digest(accepted, digest)
        if known and scheme.lower() == b"bearer":
            return
        raise ApiError(
            401,
            MESSAGE,
            type=ErrorType.AUTHENTICATION,
            code="invalid_api_key" if authorization else None,
            headers={b"www-authenticate": b"Bearer"},
        )


def request_label(given: bytes | None) -> str:
    """The x-request-id to echo: the client's if it is well formed, else a fresh one. A label only, never a key."""
    if given is not None and REQUEST_ID.fullmatch(given):
        return given.decode("ascii")
    return "req-" + os.urandom(12).hex()
