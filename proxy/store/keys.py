"""Where a root's values lie. All keys of a root share one hash tag, so that a script, and a cluster's slot, holds all of them.

docs/store.md lists the keys with their bytes and times to live. The keys that only scripts use (`x:`, `k:`, `l:`, `m`, `u`) are built in proxy/store/lua.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.model import ByteHash, SessionId

SCHEMA = "1"
"""Version of all values. Another one reads as "nothing there": sessions are rebuilt by the next turn, so nothing is ever migrated."""

SECRET = b"wf:secret"
SESSIONS = "wf:{*}:s:*"
"""Glob of all session records."""
LOCKS = "wf:{*}:l:*"
"""Glob of the locks of compactions under way."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one root. `owner` (TENANT.ROOT) stands in the values too, so that a value in the wrong place is noticed."""

    owner: str

    @classmethod
    def of(cls, tenant: str, root: str) -> Keys:
        """The keys of a tenant's root."""
        return cls(f"{tenant}.{root}")

    @classmethod
    def around(cls, session: SessionId) -> Keys:
        """The keys of a session's root."""
        return cls.of(session.tenant, session.root)

    @property
    def base(self) -> bytes:
        """What all keys of the root begin with; also the key by which a cluster finds the node."""
        return encoded(f"wf:{{{self.owner}}}:")

    def body(self, byte_hash: ByteHash) -> bytes:
        """The bytes of one message or of one part of an envelope."""
        return self.base + b"b:" + byte_hash.hex().encode()

    def checkpoint(self, id: str) -> bytes:
        """A checkpoint."""
        return self.base + encoded(f"c:{id}")

    def journal(self, lineage: str) -> bytes:
        """A session's journal."""
        return self.base + encoded(f"j:{lineage}")

    def offer(self, lineage: str) -> bytes:
        """The checkpoint made for a session whose first turn is not stored yet."""
        return self.base + encoded(f"o:{lineage}")


def of_tenant(tenant: str) -> str:
    """Glob of all keys of a tenant; the tenant must be a name as `is_name` says, or it would be a pattern itself."""
    return f"wf:{{{tenant}.*}}:*"


def session_of(key: bytes) -> SessionId | None:
    """The session whose record lies under this key; None: it is no such key."""
    head, tag, rest = key.partition(b"{")
    owner, _, record = rest.partition(b"}:s:")
    tenant, _, root = owner.partition(b".")
    if head != b"wf:" or not tag or not all(map(is_name, (tenant, root, record))):
        return None
    return SessionId(tenant.decode(), root.decode(), record.decode())


def is_name(text: str | bytes) -> bool:
    """Whether this can be a tenant, a root or a lineage."""
    return text.isalnum() and text.isascii() and len(text) <= 32


def encoded(text: str) -> bytes:
    """Text as bytes of a key, whatever a person typed."""
    return text.encode("utf-8", "surrogatepass")
