"""Keys with which versions of weights are signed, as openssl writes them."""

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def signing_keys(folder: Path) -> tuple[Path, Path]:
    """Writes a private and a public key."""
    key, files = Ed25519PrivateKey.generate(), (folder / "signing.pem", folder / "signing.pub")
    files[0].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    files[1].write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return files
