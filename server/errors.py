"""What can go wrong with a request, told alike by every door: HTTP, ZeroMQ and the clients."""

from __future__ import annotations

import re
from typing import ClassVar


class ServerError(Exception):
    """A request failed.  ``kind`` is stable and machine-readable, ``param`` names the field at fault, if one is."""

    kind: ClassVar[str] = "internal"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(ServerError, ValueError):
    """The request can never succeed as it stands; the message names the field and its limit."""

    kind = "invalid_request"

    @classmethod
    def of(cls, error: ValueError) -> InvalidRequest:
        """From a ``ValueError`` whose text begins with the field's name, as this project's checks word them."""
        text = str(error)
        field = re.match(r"[a-z_]+(?=[\s\[])", text)
        return cls(text, param=field[0] if field else None)


class UnknownModel(InvalidRequest):
    """Another model was asked for than the one served."""

    kind = "model_not_found"


class Unavailable(ServerError):
    """The engine is not there, or the server is shutting down.  Sending the request again may work."""

    kind = "unavailable"


_KINDS = {error.kind: error for error in (ServerError, InvalidRequest, UnknownModel, Unavailable)}


def error_of(kind: str, message: str, param: str | None = None) -> ServerError:
    """The exception for an error that came over a wire; a ``kind`` not known here becomes a plain :class:`ServerError`."""
    return _KINDS.get(kind, ServerError)(message, param=param)
