"""Certificates for servers of the tests."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path


def certified(folder: Path, name: str) -> tuple[Path, ssl.SSLContext]:
    """A self-signed certificate for a host name, and a server's context that has it and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    made = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN={name}"
    subprocess.run(
        [*made.split(), "-addext", f"subjectAltName=DNS:{name}", "-keyout", key, "-out", cert],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return cert, context
