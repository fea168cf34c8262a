"""Whether an upstream is near: on this machine or in a private network, where a cache is the server's own and ready at once."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

_LOCAL_NAMES = ("localhost", ".localhost", ".local", ".internal", ".lan", ".home.arpa", ".svc")


@lru_cache(maxsize=256)
def is_local(base_url: str) -> bool:
    """True for a loopback or private address, and for names that only exist in a private network (also one without a dot)."""
    host = (urlsplit(base_url).hostname or "").rstrip(".")
    try:
        address = ip_address(host)
    except ValueError:
        return "." not in host or host.endswith(_LOCAL_NAMES)
    return address.is_private or address.is_loopback or address.is_link_local
