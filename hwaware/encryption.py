"""Encrypt the connections of one program with TLS 1.3, by Python's `ssl`.

The driver draws a key pair and signs a certificate with it. Ray hands both to the program's workers, beside the secret.
Both ends of a connection show this certificate, and accept no other. No certificate authority has a part in it.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import ssl
import tempfile
from typing import Iterator, NamedTuple

from hwaware.errors import UnusableInputError

_NAME = "hwaware"
# No certificate outlives its program, and clocks of hosts may differ.
_FIRST, _LAST = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31)


class Identity(NamedTuple):
    """Hold the certificate of one program and its private key, both as PEM text."""

    certificate: str
    key: str


def new_identity() -> Identity:
    """Draw a key pair on the curve P-256, and certify it by itself.

    Raises:
        UnusableInputError: The package `cryptography` is missing, or Python's `ssl` has no TLS 1.3.
    """
    if not ssl.HAS_TLSv1_3:
        raise UnusableInputError(
            f"encrypt is on, but Python's ssl ({ssl.OPENSSL_VERSION}) has no TLS 1.3.",
            "use a Python that was built with OpenSSL 1.1.1 or newer, or set encrypt=False.",
        )
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise UnusableInputError(
            f"encrypt is on, but the driver cannot make a certificate: {error}.",
            "install the package (pip install cryptography) on the driver's host, or set encrypt=False.",
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), _FIRST, _LAST)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return Identity(certificate.public_bytes(pem).decode(), key.private_bytes(pem, *plain).decode())


class Encryption:
    """Wrap the connections of one program.

    Args:
        identity: The program's certificate and key.

    Raises:
        UnusableInputError: Python's `ssl` has no TLS 1.3.
    """

    def __init__(self, identity: Identity) -> None:
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, identity)
        self._server.num_tickets = 0  # a mailbox says nothing after its greeting
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, identity)

    def wrapped(self, connection: socket.socket, is_mailbox: bool) -> ssl.SSLSocket:
        """Return a new connection as one that will be encrypted; the given object must not be used any more."""
        context = self._server if is_mailbox else self._client
        return context.wrap_socket(connection, is_mailbox, do_handshake_on_connect=False)


def _context(protocol: int, identity: Identity) -> ssl.SSLContext:
    made = ssl.SSLContext(protocol)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # the program has one certificate, whatever its hosts are called
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=identity.certificate)
    with _readable(identity.certificate + identity.key) as path:
        made.load_cert_chain(path)
    return made


@contextlib.contextmanager
def _readable(text: str) -> Iterator[str]:
    """Yield a path to read the text from: `ssl` loads keys from files alone. On Linux, no disk ever holds the text."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create(_NAME), "w") as stream:
            stream.write(text)
            stream.flush()
            yield f"/proc/self/fd/{stream.fileno()}"
        return
    with tempfile.NamedTemporaryFile("w", prefix=_NAME) as stream:  # only its owner may read it
        stream.write(text)
        stream.flush()
        yield stream.name
