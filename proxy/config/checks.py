"""What no single key can show: keys that contradict each other, listeners open to the network, secrets that are not there.

Pure: the environment is handed in. No finding echoes a secret, nor the name of a variable that is not set: it may be the secret itself.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from proxy.config.compaction import Compaction
from proxy.config.kinds import is_loopback, masked_url, quoted, shown
from proxy.config.model import Config
from proxy.config.sections import Admin


@dataclass(frozen=True, slots=True)
class Finding:
    """A contradiction. `keys`: all that take part, the one to change first."""

    keys: tuple[str, ...]
    found: str
    allowed: str


def findings(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """All contradictions of a configuration whose values are each valid."""
    yield from _watermarks_and_prompts(config)
    yield from _names(config)
    yield from _processes(config)
    yield from _listeners(config)
    yield from _loops(config)
    yield from _store(config)
    yield from _secrets(config, environ)


def _watermarks_and_prompts(config: Config) -> Iterator[Finding]:
    yield from _contradictions(config.compaction, "compaction", config.compaction.model_fields_set)
    for i, rule in enumerate(config.models):
        yield from _contradictions(rule.over(config.compaction), f"models[{i}]", rule.model_fields_set)


def _contradictions(merged: Compaction, section: str, keys_set: set[str]) -> Iterator[Finding]:
    """Only what `section` itself has a part in: a rule is not blamed for [compaction]."""

    def involved(*keys: str) -> tuple[str, ...]:
        blamed = [f"{section}.{key}" for key in keys if key in keys_set]
        return (*blamed, *(f"compaction.{key}" for key in keys)) if blamed else ()

    if merged.trigger_ratio >= merged.hard_ratio:
        trigger, hard = shown(merged.trigger_ratio), shown(merged.hard_ratio)
        keys = involved("trigger_ratio", "hard_ratio")
        if keys and keys[0].endswith("trigger_ratio"):
            yield Finding(keys, trigger, f"a number below hard_ratio, which is {hard}")
        elif keys:
            yield Finding(keys, hard, f"a number above trigger_ratio, which is {trigger}")
    if "{messages}" in merged.summary_prompt and merged.strategy == "replay" and not merged.summary_model:
        found = "{messages} in the summary_prompt of a replay, which sends no transcript"
        if keys := involved("summary_prompt", "strategy", "summary_model"):
            yield Finding(keys, found, '{messages} only with strategy = "transcript" or a summary_model')


def _names(config: Config) -> Iterator[Finding]:
    taken = {config.upstream.name}
    for i, upstream in enumerate(config.upstreams):
        if upstream.name in taken:
            yield Finding(
                (f"upstreams[{i}].name",),
                quoted(upstream.name),
                'each name once, and not "default", which is [upstream]',
            )
        taken.add(upstream.name)


def _processes(config: Config) -> Iterator[Finding]:
    if config.server.workers > 1:
        allowed = "1 for now (several workers come with a later release)"
        yield Finding(("server.workers",), str(config.server.workers), allowed)


def _listeners(config: Config) -> Iterator[Finding]:
    server, admin = config.server, config.admin
    if server.host == admin.host and server.port == admin.port != 0:
        yield Finding(
            ("admin.port", "server.port"), str(admin.port), "another port than that of [server] on the same host"
        )
    lends = next((key for key in config.variables() if key.endswith(".api_key_env")), None)
    if lends and not server.client_token_env and not is_loopback(server.host):
        allowed = f"the name of a variable, because server.host {quoted(server.host)} is not loopback and {lends} is set: anyone could spend that key"
        yield Finding(("server.client_token_env", "server.host", lends), '""', allowed)
    if not is_loopback(admin.host) and not admin.token_env:
        allowed = f"the name of a variable, because admin.host {quoted(admin.host)} is not loopback"
        yield Finding(("admin.token_env", "admin.host"), '""', allowed)


def _loops(config: Config) -> Iterator[Finding]:
    """An upstream that is our own listener: one request would call itself until no descriptor is left."""
    server = config.server
    upstreams = (("upstream", config.upstream), *((f"upstreams[{i}]", one) for i, one in enumerate(config.upstreams)))
    for section, upstream in upstreams:
        url = urlsplit(upstream.base_url)
        port = url.port or {"http": 80, "https": 443}[url.scheme]
        if port == server.port and _is_at(url.hostname or "", server.host):
            allowed = "the provider's URL, and not that of warmfold's own listener (server.host, server.port): each request would call itself"
            yield Finding((f"{section}.base_url", "server.port", "server.host"), quoted(upstream.base_url), allowed)


def _is_at(host: str, listening: str) -> bool:
    """Whether a connection to `host` reaches a listener on `listening`, as far as names and literal addresses tell."""
    called, ours = _address(host), _address(listening)
    if called == ours:
        return True
    return listening in ("0.0.0.0", "::") and is_loopback(called)


def _address(host: str) -> str:
    """The host in one spelling. Names of this machine's loopback are one, and so is the wildcard, which connects to it."""
    name = host.lower().removesuffix(".")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return "127.0.0.1" if name == "localhost" or name.endswith(".localhost") else name
    return "127.0.0.1" if address.is_unspecified or str(address) == "::1" else str(address)


def _store(config: Config) -> Iterator[Finding]:
    """redis-py ignores a database that is no number, and would then use database 0."""
    scheme = config.store.url.partition(":")[0]
    if scheme not in ("redis", "rediss"):
        return
    try:
        url = urlsplit(config.store.url)
        database = unquote(url.path).strip("/") if url.port != 0 else "none"
    except ValueError:
        database = "none"
    if database and not (database.isascii() and database.isdecimal()):
        allowed = f"{scheme}://HOST:PORT/DATABASE, port and database numbers, other characters percent-encoded"
        yield Finding(("store.url",), quoted(masked_url(config.store.url)), allowed)


def _secrets(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    admin_token = "admin.token_env"
    for key, name in config.variables().items():
        value = environ.get(name, "").strip()
        # On loopback the admin listener does without a token, unless somebody chose a variable for one.
        optional = key == admin_token and is_loopback(config.admin.host) and name == Admin().token_env
        if not value and not optional:
            found = "the name of a variable that is not set, or empty"
            keys = (key, "admin.host") if key == admin_token else (key,)
            yield Finding(keys, found, "the name of an environment variable that holds a value")
        elif key != "session.tenant_secret_env" and not (value.isascii() and value.isprintable()):
            # Such a value ends in an exception of the HTTP library at the first request, which quotes it.
            found = f"a value in {name} with line breaks or characters that no HTTP header may hold"
            yield Finding((key,), found, "printable ASCII; white space around it does no harm")
