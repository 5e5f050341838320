"""`paceline certs`: authorities and certificates for development and for trying out TLS.

There are two authorities. A certificate of the first lets a client call the gateway. A certificate
of the second makes a process a replica, which may call replicas past the gateway and its tenants.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paceline.errors import InvalidArgument
from paceline.rpc.tls import check_pair, read_pem

REPLICA_NAME = "paceline-replica"
"""The name in the certificate of replicas: ``data_plane_tls.server_name``."""
_CA_DAYS = 3650
_LOCAL = ("localhost", "127.0.0.1", "::1")

_Key = ec.EllipticCurvePrivateKey


def make_certificates(folder: Path, hosts: Sequence[str] = (), days: int = 90) -> dict[str, Path]:
    """Make new certificates, and the two authorities that sign them if they do not exist.

    A second run keeps the authorities and so renews the certificates.

    Args:
        hosts: names and IP addresses at which clients reach the gateway, beside loopback's.
        days: that the certificates are valid, 1 to 825.

    Returns:
        The path of each file by its name. Only their owner can read the keys.

    Raises:
        InvalidArgument: a host is neither a name nor an address, the folder cannot be written, or
            its authority cannot be used.
    """
    if not 1 <= days <= 825:  # clients accept no more
        raise InvalidArgument("days", days, "a number in [1, 825]")
    names = [_name(host) for host in dict.fromkeys([*hosts, *_LOCAL])]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        ca = _authority(folder, "ca", "Paceline development CA")
        replicas = _authority(folder, "replica-ca", "Paceline development CA of replicas")
        server, client = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
        _issue(folder, "server", ca, names, [server], days)
        _issue(folder, "client", ca, [x509.DNSName("paceline-client")], [client], days)
        replica_names = [x509.DNSName(REPLICA_NAME), *map(_name, _LOCAL)]
        _issue(folder, "replica", replicas, replica_names, [server, client], days)
    except OSError as error:
        raise InvalidArgument("folder", str(folder), f"a folder for files ({error})") from None
    stems = ("ca", "server", "client", "replica-ca", "replica")
    return {f"{stem}.{end}": folder / f"{stem}.{end}" for stem in stems for end in ("crt", "key")}


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    labels = host.removeprefix("*.").split(".")
    allowed = all(label.replace("-", "").isalnum() and label.isascii() for label in labels)
    if not allowed or len(host) > 253:
        raise InvalidArgument("host", host, "a DNS name or an IP address, without a port")
    return x509.DNSName(host)


def _authority(folder: Path, stem: str, name: str) -> tuple[x509.Certificate, _Key]:
    cert_file, key_file = folder / f"{stem}.crt", folder / f"{stem}.key"
    if cert_file.exists() and key_file.exists():
        cert, pem = read_pem("folder", str(cert_file)), read_pem("folder", str(key_file))
        check_pair("folder", str(key_file), cert, pem)
        key = serialization.load_pem_private_key(pem, password=None)
        if not isinstance(key, _Key):
            raise InvalidArgument("folder", str(key_file), "an authority that this command made")
        return x509.load_pem_x509_certificate(cert), key
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signs_only = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(subject, subject, key, _CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signs_only, critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(folder, stem, [certificate], key)
    return certificate, key


def _issue(
    folder: Path,
    stem: str,
    authority: tuple[x509.Certificate, _Key],
    names: Sequence[x509.GeneralName],
    usages: Sequence[x509.ObjectIdentifier],
    days: int,
) -> None:
    signer, signer_key = authority
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"paceline-{stem}")])
    certificate = (
        _builder(subject, signer.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer_key.public_key()),
            critical=False,
        )
        .sign(signer_key, hashes.SHA256())
    )
    _write(folder, stem, [certificate], key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: _Key, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))  # clocks of other machines may be behind
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _write(folder: Path, stem: str, chain: Sequence[x509.Certificate], key: _Key) -> None:
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    _replace(folder / f"{stem}.key", pem, 0o600)
    certs = b"".join(cert.public_bytes(serialization.Encoding.PEM) for cert in chain)
    _replace(folder / f"{stem}.crt", certs, 0o644)


def _replace(path: Path, data: bytes, mode: int) -> None:
    """Replace a file at once: a server that reads it meanwhile gets the old or the new one."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
        file.write(data)
    scratch.replace(path)
