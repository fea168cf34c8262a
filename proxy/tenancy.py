"""Whose request is this? The credential names the tenant, or a header that a gateway in front of us sets."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Protocol

from proxy.core import fingerprint

Headers = Sequence[tuple[str, str]]

_CREDENTIALS = ("authorization", "api-key", "x-api-key", "x-goog-api-key")
"""Where SDKs put keys: OpenAI and most others, Azure, Anthropic, Google."""


class SecretSource(Protocol):
    """The store, for the secret that all replicas share."""

    async def tenant_secret(self) -> bytes | None:
        """32 bytes, or None where the store is out."""
        ...


def header(headers: Headers, name: str) -> str:
    """The first value of a header, or ""."""
    low = name.lower()
    return next((value for key, value in headers if key.lower() == low), "")


def the_only(headers: Headers, name: str) -> str:
    """The value of a header that must not be ambiguous; "" also where two differ: whoever put one in front of the gateway's would choose."""
    low = name.lower()
    values = {value for key, value in headers if key.lower() == low}
    return values.pop() if len(values) == 1 else ""


class Tenants:
    """Names tenants. `secret` keys the hash; empty: the one in the store is used."""

    def __init__(self, source: SecretSource, tenant_header: str, secret: str) -> None:
        self._source = source
        self._header = tenant_header
        self._secret: bytes | None = fingerprint.byte_hash(secret.encode()) * 2 if secret else None
        # Until the store tells the secret: a request that does not fit is compacted even so, for itself alone.
        self._stand_in = secrets.token_bytes(32)

    async def of(self, headers: Headers) -> str | None:
        """The tenant of a request; None: the header that names it is missing, so no sessions."""
        if self._header:
            named = the_only(headers, self._header)
            return await self._name(f"header:{named}") if named else None
        return await self.of_credential(tuple(header(headers, name) for name in _CREDENTIALS))

    async def of_authorization(self, value: str) -> str | None:
        """The tenant whose requests carry this Authorization header and no other key. None where a header names tenants."""
        return None if self._header else await self.of_credential((value, *("" for _ in _CREDENTIALS[1:])))

    async def of_credential(self, values: tuple[str, ...]) -> str:
        """The tenant of a set of keys. No key at all is a tenant too: a local server asks for none."""
        return await self._name("key:" + "\x00".join(values))

    async def _name(self, what: str) -> str:
        if self._secret is None:
            self._secret = await self._source.tenant_secret()
        return fingerprint.tenant(self._secret or self._stand_in, what)
