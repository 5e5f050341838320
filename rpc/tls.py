"""TLS for both ends of a connection, from PEM files.

A server looks at its files before each handshake, so it uses a renewed certificate from the next
connection on; open connections stay as they are. Without a certificate, :func:`check_plain_text`
keeps a server on loopback.
"""

from __future__ import annotations

import ipaddress
import logging
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc

from paceline.errors import InvalidArgument

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Stamps = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """What a server shows, and what it wants to see.

    Attributes:
        cert, key: PEM files; intermediate certificates follow the server's own.
        client_ca: PEM file of the authority that signs clients' certificates.
        require_client_cert: refuse connections of clients without such a certificate (mTLS).
        prefix: of the attributes' names in errors.
    """

    cert: str
    key: str
    client_ca: str | None = None
    require_client_cert: bool = False
    prefix: str = ""

    def __post_init__(self) -> None:
        if self.require_client_cert and self.client_ca is None:
            raise InvalidArgument(
                f"{self.prefix}client_ca", None, "a file, as client certificates are required"
            )

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials that follow changes of the files.

        Raises:
            InvalidArgument: a file cannot be read or used, or the key is another certificate's.
        """
        configuration = self._read()
        return grpc.dynamic_ssl_server_credentials(
            configuration,
            _Reload(self, self._read).fetch,  # type: ignore[arg-type]  # None: no change
            self.require_client_cert,
        )

    def context(self) -> ssl.SSLContext:
        """The same for servers on Python's own ssl module.

        Raises: as :meth:`credentials`.
        """
        context = newest = self._new_context()
        reload = _Reload(self, self._new_context)

        def choose(connection: Any, name: str | None, initial: ssl.SSLContext) -> None:
            nonlocal newest
            newest = reload.fetch() or newest
            connection.context = newest

        context.sni_callback = choose  # called at every handshake, with a server name or without
        return context

    def _new_context(self) -> ssl.SSLContext:
        self._read()  # its errors name the file
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(Path(self.cert).expanduser(), Path(self.key).expanduser())
        if self.client_ca is not None:
            context.load_verify_locations(Path(self.client_ca).expanduser())
            required = self.require_client_cert
            context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
        return context

    def _read(self) -> grpc.ServerCertificateConfiguration:
        cert = read_pem(f"{self.prefix}cert", self.cert)
        key = read_pem(f"{self.prefix}key", self.key)
        check_pair(f"{self.prefix}key", self.key, cert, key)
        roots = read_pem(f"{self.prefix}client_ca", self.client_ca) if self.client_ca else None
        if roots is not None:
            _certificates(f"{self.prefix}client_ca", self.client_ca or "", roots)
        return grpc.ssl_server_certificate_configuration([(key, cert)], roots)

    def _stamps(self) -> _Stamps:
        files = (self.cert, self.key) if self.client_ca is None else (
            self.cert, self.key, self.client_ca,
        )  # fmt: skip
        stats = [Path(file).stat() for file in files]
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)


class _Reload(Generic[T]):
    """gRPC asks this before each handshake, on threads of its own."""

    def __init__(self, tls: ServerTls, read: Callable[[], T]) -> None:
        self._tls = tls
        self._read = read
        self._lock = threading.Lock()
        self._seen = tls._stamps()

    def fetch(self) -> T | None:
        """The new configuration, or None to keep what is in use."""
        try:
            with self._lock:
                stamps = self._tls._stamps()
                if stamps == self._seen:
                    return None
                # Files that do not fit together (yet) are read again when one of them changes.
                self._seen = stamps
                configuration = self._read()
        except (OSError, InvalidArgument) as error:
            logger.error("the certificate stays as it was: %s", error)
            return None
        logger.info("the certificate in %s is in use now", self._tls.cert)
        return configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """What a client trusts, and what it shows.

    Attributes:
        ca: PEM file of the authority that signs the server's certificate; None trusts the system's.
        cert, key: PEM files of the client's own certificate, both or neither.
        server_name: the name in the server's certificate, if it is not the address's.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    server_name: str | None = None
    prefix: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials from the files as they are now.

        Raises:
            InvalidArgument: a file cannot be read or used, or one of ``cert`` and ``key`` is
                missing, or the key is another certificate's.
        """
        given = {"cert": self.cert, "key": self.key}
        for name, other in (("cert", "key"), ("key", "cert")):
            if given[name] is None and given[other] is not None:
                raise InvalidArgument(
                    f"{self.prefix}{name}", None, f"a file, as there is a {other}"
                )
        roots = cert = key = None
        if self.ca is not None:
            roots = read_pem(f"{self.prefix}ca", self.ca)
            _certificates(f"{self.prefix}ca", self.ca, roots)
        if self.cert is not None and self.key is not None:
            cert = read_pem(f"{self.prefix}cert", self.cert)
            key = read_pem(f"{self.prefix}key", self.key)
            check_pair(f"{self.prefix}key", self.key, cert, key)
        return grpc.ssl_channel_credentials(roots, key, cert)

    @property
    def options(self) -> tuple[tuple[str, str], ...]:
        """Options that a channel with these credentials needs."""
        if self.server_name is None:
            return ()
        return (("grpc.ssl_target_name_override", self.server_name),)


def read_pem(field: str, path: str) -> bytes:
    """The bytes of a PEM file.

    Raises:
        InvalidArgument: the file is not readable; names ``field`` and the path, never contents.
    """
    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise InvalidArgument(field, path, f"a PEM file ({error.strerror})") from None
    if b"-----BEGIN " not in data:
        raise InvalidArgument(field, path, "a file in PEM format (-----BEGIN ...)")
    return data


def _certificates(field: str, path: str, data: bytes) -> list[object]:
    from cryptography import x509

    try:
        return list(x509.load_pem_x509_certificates(data))
    except ValueError:
        raise InvalidArgument(field, path, "a PEM file with certificates") from None


def check_pair(field: str, path: str, cert: bytes, key: bytes) -> None:
    """Refuse a key that is not the certificate's: gRPC would fail at each handshake.

    Raises:
        InvalidArgument: it is another one's; names ``field`` and the path.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    try:
        certificate = x509.load_pem_x509_certificates(cert)[0]
    except ValueError:
        raise InvalidArgument(field, path, "a key whose certificate is a PEM file") from None
    try:
        private = serialization.load_pem_private_key(key, password=None)
    except (ValueError, TypeError):  # TypeError: it has a password
        raise InvalidArgument(field, path, "a PEM file with a key without password") from None
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    if private.public_key().public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise InvalidArgument(field, path, "the key of the certificate")


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a server on ``host``."""
    host = host.strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may lead anywhere


def check_plain_text(host: str, field: str, allowed: str) -> None:
    """Raise InvalidArgument when a server without TLS would listen beyond this machine.

    Args:
        field: where the configuration would have TLS.
        allowed: what to do instead.
    """
    if not is_loopback(host):
        raise InvalidArgument(field, None, f"{allowed}, as {host!r} is not a loopback address")
