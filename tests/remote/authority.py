"""Certificates of servers on loopback, and of their clients, signed by whom a test trusts."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

__all__ = ["Authority"]


class Authority:
    """Signs certificates; all lie in *folder* as PEM files."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.file = folder / f"{name}.pem"
        own = self._certificate(self._name, self._key.public_key())
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self._write(self.file, own)

    def issue(self, name: str) -> tuple[Path, Path]:
        """A certificate for 127.0.0.1, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        certificate, key_file = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        self._write(
            certificate,
            self._certificate(subject, key.public_key()).add_extension(names, critical=False),
        )
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return certificate, key_file

    def _certificate(
        self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
        )

    def _write(self, file: Path, certificate: x509.CertificateBuilder) -> None:
        signed = certificate.sign(self._key, hashes.SHA256())
        file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
