"""The HTTP proxy on the way to an upstream, where the environment names one: HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY, as SDKs read them.

Read by the standard library's own functions, once, at the start; certificates beside the system's are named by SSL_CERT_FILE, which OpenSSL reads.
"""

from __future__ import annotations

import logging
from typing import Final
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]  # typeshed lacks it

from yarl import URL

from proxy.config import is_loopback

VARIABLES: Final = "HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY"

log = logging.getLogger("warmfold.egress")


def proxy_for(origin: URL) -> URL | None:
    """The proxy that connections to this origin go through; None: none. An upstream on this machine is never behind one.

    Plain HTTP to the proxy only: another scheme is passed over, and a warning says so.
    """
    named = getproxies_environment()
    found = named.get(origin.scheme) or named.get("all")
    host = origin.host or ""
    if not found or is_loopback(host) or proxy_bypass_environment(f"{host}:{origin.port}"):
        return None
    try:
        proxy = URL(found if "://" in found else f"http://{found}")
        usable = proxy.scheme == "http" and bool(proxy.host)
    except ValueError:
        usable = False
    if not usable:
        # Without its text, which may hold a password.
        log.warning("the proxy for %s that the environment names is not used: only http:// proxies are", origin)
        return None
    log.info(
        "connections to %s go through the HTTP proxy %s:%d that the environment names", origin, proxy.host, proxy.port
    )
    return proxy
