"""Signatures of published versions: Ed25519 (RFC 8032), with the package cryptography.

openssl creates the keys:

    openssl genpkey -algorithm ed25519 -out signing.pem       the run's private key: weight_sync.signing_key
    openssl pkey -in signing.pem -pubout -out signing.pub     the public key, for readers
"""

import importlib
from pathlib import Path
from typing import Any

from automodel_rl.errors import InputError

PRIVATE, PUBLIC = "Ed25519PrivateKey", "Ed25519PublicKey"


class Signer:
    """Signs the hashes of versions, with a private key in PEM without a password.

    Raises:
        InputError: the file holds no such key, or the package cryptography is missing.
    """

    def __init__(self, file: Path):
        self._key = _read_key(file, PRIVATE, f"weight_sync.signing_key={file}")

    def sign(self, digest: str) -> str:
        signature: bytes = self._key.sign(digest.encode())
        return signature.hex()


class SignatureCheck:
    """Verifies signatures of a run, with its public key in PEM. Raises InputError as `Signer` does."""

    def __init__(self, file: Path):
        self._key = _read_key(file, PUBLIC, str(file))
        self._invalid = importlib.import_module("cryptography.exceptions").InvalidSignature

    def accepts(self, digest: str, signature: object) -> bool:
        """Returns whether `signature` (hexadecimal) is the run's."""
        if not isinstance(signature, str):
            return False
        try:
            self._key.verify(bytes.fromhex(signature), digest.encode())
        except (self._invalid, ValueError):
            return False
        return True


def _read_key(file: Path, kind: str, named: str) -> Any:
    try:
        reading = importlib.import_module("cryptography.hazmat.primitives.serialization")
        ed25519 = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
    except ImportError:
        raise InputError(f"{named}: signatures need cryptography: pip install 'automodel-rl[sign]'") from None
    try:
        content = file.read_bytes()
        key = (
            reading.load_pem_private_key(content, password=None)
            if kind == PRIVATE
            else reading.load_pem_public_key(content)
        )
    except OSError as error:
        raise InputError(f"{named}: cannot be read ({error.strerror}): pass a key file") from None
    except (ValueError, TypeError) as error:
        raise InputError(f"{named}: is not an unencrypted PEM key ({' '.join(str(error).split())[:100]})") from None
    if not isinstance(key, getattr(ed25519, kind)):
        raise InputError(f"{named}: is a {type(key).__name__.lstrip('_')}, but versions are signed with {kind}")
    return key
