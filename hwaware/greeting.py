"""Prove that both ends of a connection belong to one program; every other program is a stranger.

A driver draws a random secret, and hands it to its workers through Ray. The greeting shows that both ends know the
secret, and never sends it. A mailbox speaks first, and the caller proves itself first, so a stranger gets a nonce only:

    mailbox: MAGIC, nonce
    caller:  MAGIC, nonce, length of its name (u16, little-endian), name (UTF-8), proof
    mailbox: proof

A proof is an HMAC-SHA256 (RFC 2104) over the role, the purpose, the mailbox's address, both nonces and the name. So a
recorded greeting proves nothing on another connection, and a reflected one nothing in the other role. The nonces also
yield a key for the digests of this connection's messages.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from typing import Any, Optional, Sequence, Tuple

MAGIC = b"hwaware\x01"
NONCE_BYTES = PROOF_BYTES = 32
LONGEST_NAME_BYTES = 1024
_SECRET_BYTES = 32
_LENGTH = "<H"
_MAILBOX, _CALLER, _MESSAGES = b"mailbox", b"caller", b"messages"


class StrangerError(OSError):
    """The other end is no part of this program, or does not speak this protocol."""


class Credentials:
    """Hold what the members of one program know of each other.

    This is no NamedTuple, because the profiler could not ship one by value.

    Args:
        secret: Random bytes, from `new_secret`.
        purpose: Purpose of the connections; both ends must name the same.
        digests: True if every message carries a keyed digest; both ends must choose the same.
        encryption: `hwaware.encryption.Encryption` of the program; None if its connections are plain.
    """

    def __init__(self, secret: bytes, purpose: str, digests: bool = False, encryption: Any = None) -> None:
        self._secret = secret
        self._purpose = f"{purpose}, digests {digests}, encrypted {encryption is not None}".encode()
        self.digests = digests
        self.encryption = encryption

    def proof(self, role: bytes, fields: Sequence[bytes]) -> bytes:
        """Return the HMAC of a role and the fields of a greeting, each with its length."""
        made = hmac.new(self._secret, digestmod="sha256")
        for field in (role, self._purpose, *fields):
            made.update(struct.pack("<I", len(field)) + field)
        return made.digest()


class Seal:
    """Compute the digests of one connection's messages in their order, so that none can be changed, moved or repeated.

    Args:
        key: Key of this connection alone.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def digest(self, *parts: memoryview) -> bytes:
        """Return the digest of the next message, which consists of these parts."""
        made = hmac.new(self._key, struct.pack("<Q", self._count), "sha256")
        for part in parts:
            made.update(part)
        self._count += 1
        return made.digest()

    def is_right(self, found: memoryview, *parts: memoryview) -> bool:
        """Return True if the next message's digest is the one that was found."""
        return hmac.compare_digest(self.digest(*parts), bytes(found))


class Caller:
    """Hold what a mailbox learnt of a proven caller.

    Attributes:
        name: Its name, for errors; empty if it has none.
        answer: The mailbox's own proof, for the caller.
        seal: For the digests of its messages; None if they carry none.
    """

    def __init__(self, name: str, answer: bytes, seal: Optional[Seal]) -> None:
        self.name = name
        self.answer = answer
        self.seal = seal


def new_secret() -> bytes:
    """Return a new random secret for one program."""
    return secrets.token_bytes(_SECRET_BYTES)


def hear(connection: socket.socket, credentials: Credentials, address: Tuple[str, int], limit_s: float) -> Caller:
    """Let a caller prove itself to the mailbox at `address`; the answer is not sent yet.

    Raises:
        StrangerError: The caller proved nothing.
        OSError: The caller went away, or took longer than `limit_s`.
    """
    end_s = time.monotonic() + limit_s
    own = secrets.token_bytes(NONCE_BYTES)
    connection.settimeout(limit_s)
    connection.sendall(MAGIC + own)
    start = _read(connection, len(MAGIC) + NONCE_BYTES + struct.calcsize(_LENGTH), end_s)
    (name_bytes,) = struct.unpack(_LENGTH, start[-struct.calcsize(_LENGTH) :])
    if not start.startswith(MAGIC) or name_bytes > LONGEST_NAME_BYTES:
        raise StrangerError("it does not speak this protocol")
    name = _read(connection, name_bytes, end_s)
    fields = _fields(address, own, start[len(MAGIC) : len(MAGIC) + NONCE_BYTES], name)
    if not hmac.compare_digest(credentials.proof(_CALLER, fields), _read(connection, PROOF_BYTES, end_s)):
        raise StrangerError("it does not know this program's secret")
    return Caller(str(name, "utf-8", "replace"), credentials.proof(_MAILBOX, fields), _seal(credentials, fields))


def introduce(
    connection: socket.socket, credentials: Credentials, address: Tuple[str, int], name: str, limit_s: float
) -> Optional[Seal]:
    """Prove this end to the mailbox at `address`, and let the mailbox prove itself.

    Returns:
        For the digests of the messages to it; None if they carry none.

    Raises:
        StrangerError: Another program answered.
        OSError: The mailbox closed the connection, or took longer than `limit_s`.
    """
    end_s = time.monotonic() + limit_s
    start = _read(connection, len(MAGIC) + NONCE_BYTES, end_s)
    if not start.startswith(MAGIC):
        raise StrangerError("it does not speak this protocol")
    own, said = secrets.token_bytes(NONCE_BYTES), name.encode()[:LONGEST_NAME_BYTES]
    fields = _fields(address, start[len(MAGIC) :], own, said)
    connection.sendall(MAGIC + own + struct.pack(_LENGTH, len(said)) + said + credentials.proof(_CALLER, fields))
    if not hmac.compare_digest(credentials.proof(_MAILBOX, fields), _read(connection, PROOF_BYTES, end_s)):
        raise StrangerError("it does not know this program's secret")
    return _seal(credentials, fields)


def _fields(address: Tuple[str, int], of_mailbox: bytes, of_caller: bytes, name: bytes) -> Sequence[bytes]:
    return f"{address[0]} {address[1]}".encode(), of_mailbox, of_caller, name


def _seal(credentials: Credentials, fields: Sequence[bytes]) -> Optional[Seal]:
    return Seal(credentials.proof(_MESSAGES, fields)) if credentials.digests else None


def _read(connection: socket.socket, count: int, end_s: float) -> bytes:
    """Read `count` bytes until `end_s`, however slowly they come."""
    data = b""
    while len(data) < count:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise socket.timeout("the greeting took too long")
        connection.settimeout(left_s)
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionResetError("the other end closed the connection within the greeting")
        data += part
    return data
