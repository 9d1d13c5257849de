"""What can go wrong with a request, told alike by every door: HTTP, ZeroMQ and the clients."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar


class ServerError(Exception):
    """A request failed.  ``kind`` is stable and machine-readable, ``param`` names the field at fault, if one is."""

    kind: ClassVar[str] = "internal"

    def __init__(self, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after
        """Whole seconds after which sending the request again is worth it, where that can be said."""


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


class UnsupportedVersion(InvalidRequest):
    """The two sides of a ZeroMQ connection speak different versions of the protocol."""

    kind = "unsupported_version"


class Unavailable(ServerError):
    """The engine is not there, or the server is shutting down.  Sending the request again may work."""

    kind = "unavailable"


class Unauthorized(ServerError):
    """The server asks for a key, and what came with the request is none it knows."""

    kind = "invalid_api_key"


class Forbidden(ServerError):
    """Whoever asks is known, and may not do this."""

    kind = "forbidden"


class Overloaded(ServerError):
    """Too many requests wait already."""

    kind = "overloaded"


class TimedOut(ServerError):
    """The request took longer than the server allows one to take."""

    kind = "timeout"


_KINDS = {
    error.kind: error
    for error in (
        ServerError,
        InvalidRequest,
        UnknownModel,
        UnsupportedVersion,
        Unavailable,
        Unauthorized,
        Forbidden,
        Overloaded,
        TimedOut,
    )
}


def error_of(kind: str, message: str, param: str | None = None) -> ServerError:
    """The exception for an error that came over a wire; a ``kind`` not known here becomes a plain :class:`ServerError`."""
    return _KINDS.get(kind, ServerError)(message, param=param)


@contextmanager
def renaming(fields: dict[str, str]) -> Iterator[None]:
    """Where a field is refused that came from another one, name that."""
    try:
        yield
    except InvalidRequest as error:
        name = fields.get(error.param or "", error.param)
        if name is None or name == error.param:
            raise
        raise InvalidRequest(error.message.replace(error.param or "", name, 1), param=name) from None
