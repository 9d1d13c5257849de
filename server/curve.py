"""CURVE keys for ZeroMQ over TCP: read from the files that ``zmq.auth.create_certificates`` writes, and asked for at the door.

A client's public file may name the namespace that the client is held to, in a line ``namespace = NAME`` under ``metadata``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth import load_certificate
from zmq.auth.asyncio import AsyncioAuthenticator

from radixkv.server.access import Caller, check_private

KEY_LENGTH = 40
"""Characters of a key in Z85."""


@dataclass(frozen=True)
class CurveServer:
    """A server's key pair, and the clients it lets in by their public keys."""

    public_key: bytes
    secret_key: bytes
    clients: dict[bytes, Caller]

    @classmethod
    def load(cls, key: Path, clients: Path) -> CurveServer:
        """``key`` is a ``.key_secret`` file, ``clients`` a folder of ``.key`` files.

        Raises ``ValueError`` for files that hold no keys or are open to others, ``OSError`` for those that can't be read.
        """
        public, secret = read_pair(key)
        callers = {read_public(path): Caller(_namespace(path)) for path in sorted(clients.glob("*.key"))}
        if not callers:
            raise ValueError(f"{clients} holds no client's .key file, so nobody could connect")
        return cls(public, secret, callers)

    def protect(self, context: zmq.asyncio.Context, socket: zmq.Socket[Any]) -> AsyncioAuthenticator:
        """Make a socket that is not bound yet ask for keys.  Needs a running event loop; stop what it returns after the socket.

        The order matters: where no authenticator runs, libzmq lets every key in.
        """
        authenticator = AsyncioAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback("*", self)
        socket.curve_server = True
        socket.curve_publickey = self.public_key
        socket.curve_secretkey = self.secret_key
        return authenticator

    def callback(self, domain: str, key: bytes) -> bool:
        """What pyzmq's authenticator asks: is this client known?"""
        return key in self.clients

    def caller(self, frame: zmq.Frame) -> Caller:
        """Who sent a frame."""
        return self.clients[str(frame["User-Id"]).encode()]


@dataclass(frozen=True)
class CurveClient:
    """What proves to a server who a client is, and to the client that the server is the right one."""

    public_key: bytes
    secret_key: bytes
    server_key: bytes

    @classmethod
    def load(cls, server_key: Path | str, client_key: Path | str) -> CurveClient:
        """From the server's ``.key`` file and the client's ``.key_secret`` file; raises as :meth:`CurveServer.load` does."""
        return cls(*read_pair(Path(client_key)), read_public(Path(server_key)))

    def protect(self, socket: zmq.Socket[Any]) -> None:
        """Before the socket connects."""
        socket.curve_publickey, socket.curve_secretkey = self.public_key, self.secret_key
        socket.curve_serverkey = self.server_key


def read_pair(path: Path) -> tuple[bytes, bytes]:
    """Public and secret key of a file that only its owner can read."""
    check_private(path)
    public, secret = load_certificate(path)
    if secret is None or len(public) != KEY_LENGTH or len(secret) != KEY_LENGTH:
        raise ValueError(f"{path} must hold a public-key and a secret-key of {KEY_LENGTH} characters each: a .key_secret file")
    return public, secret


def read_public(path: Path) -> bytes:
    public, _ = load_certificate(path)
    if len(public) != KEY_LENGTH:
        raise ValueError(f"{path} must hold a public-key of {KEY_LENGTH} characters")
    return public


def _namespace(path: Path) -> str | None:
    for line in path.read_text().splitlines():
        name, separator, value = line.partition("=")
        if separator and name.strip() == "namespace":
            return value.strip(" \t'\"")
    return None
