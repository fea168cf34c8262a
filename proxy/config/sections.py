"""The tables of the configuration: each key with its default, unit, range and why it exists. For operators: docs/configuration.md.

All values are frozen and checked once, when they are made: an int for a float is taken, a text for a number is not.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from proxy.config.kinds import BaseUrl, Filled, Header, HeaderOrEmpty, Host, StoreUrl, Variable


class Section(BaseModel):
    """A table of the configuration file."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=False, hide_input_in_errors=True
    )


class Server(Section):
    """[server]: the listener the SDK talks to."""

    host: Host = Field(
        default="127.0.0.1", description="Address to listen on. Loopback, so that nobody else's requests pass unasked."
    )
    port: int = Field(
        default=8080, ge=0, le=65535, description="TCP port to listen on; 0 takes any free one, for tests."
    )
    workers: int = Field(default=1, ge=1, le=256, description="Processes that share the port. This version runs one.")
    max_body_bytes: int = Field(
        default=64 * 1024 * 1024,
        ge=1,
        description="Bytes of a chat completion as they come over the wire. Beyond it 413, so that no request fills the memory; all else is streamed.",
    )
    grace_s: float = Field(
        default=30.0,
        ge=0,
        le=3600,
        description="Seconds that running streams and compactions get to finish at shutdown; 0 breaks them off.",
    )
    client_token_env: Variable = Field(
        default="",
        description="Variable with the token that clients must send as their API key; empty: none. Required where anyone could otherwise spend api_key_env.",
    )


class Upstream(Section):
    """[upstream]: the provider that gets every request no [[upstreams]] entry matches."""

    base_url: BaseUrl = Field(
        default="https://api.openai.com/v1",
        description="What the SDK's base_url was, version path included. The SDK's is now http://HOST:PORT/v1.",
    )
    api_key_env: Variable = Field(
        default="",
        description="Variable with the provider's key, sent instead of the client's credential; empty: the client's own is passed on.",
    )
    connect_timeout_s: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        description="Seconds until a connection must stand; past it the client gets an error instead of waiting on.",
    )
    read_idle_timeout_s: float = Field(
        default=600.0,
        gt=0,
        le=86400,
        description="Seconds between two bytes of an answer. There is no total timeout: a long stream is no fault.",
    )
    stream_usage: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Whether to ask a stream for its usage when the client did not: auto, always or never. Without it the pressure is an estimate.",
    )

    @property
    def name(self) -> str:
        """How metrics, logs and the store call this upstream."""
        return "default"


class NamedUpstream(Upstream):
    """[[upstreams]]: another provider, for the models that match. Keys left out have the built-in defaults, not those of [upstream]."""

    label: Filled = Field(
        alias="name", description="How metrics, logs and the store call it; each name once, and not default."
    )
    match: Filled = Field(
        description="Pattern of model names (*, ?, [abc]; case matters). The first entry that matches wins."
    )
    base_url: BaseUrl = Field(
        description="What the SDK's base_url was. Required: no model should go to another provider by omission."
    )

    @property
    def name(self) -> str:
        """How metrics, logs and the store call this upstream."""
        return self.label


class Store(Section):
    """[store]: where sessions and checkpoints live."""

    url: StoreUrl = Field(
        default="embedded:",
        repr=False,
        description="embedded: runs a private Valkey; otherwise redis://, rediss:// or unix://, shared by replicas.",
    )
    data_dir: Filled = Field(
        default=".warmfold",
        description="Directory of the embedded store, made with mode 0700 and locked. Unused otherwise.",
    )
    session_ttl_s: int = Field(
        default=86400,
        ge=1,
        description="Seconds until an idle session and its messages are forgotten; each turn renews it.",
    )
    checkpoint_ttl_s: int = Field(
        default=604800,
        ge=1,
        description="Seconds until an unused checkpoint is forgotten. Longer than a session, so that one resumed later need not pay again.",
    )
    timeout_ms: int = Field(
        default=50,
        ge=1,
        le=60000,
        description="Milliseconds for one call to the store. Past it the turn goes on without the store.",
    )


class Session(Section):
    """[session]: whose conversation a request belongs to."""

    id_headers: tuple[Header, ...] = Field(
        default=("x-session-id", "x-conversation-id", "session_id"),
        strict=False,
        description="Request headers that may carry an explicit id, the first found counts. An id only tells equal prefixes apart.",
    )
    id_fields: tuple[Filled, ...] = Field(
        default=("prompt_cache_key",),
        strict=False,
        description="Fields of the request body that may carry an explicit id, after the headers.",
    )
    tenant_header: HeaderOrEmpty = Field(
        default="",
        description="Header that names the tenant, set by a gateway in front of us; a request without it has no session. Empty: the credential names it.",
    )
    tenant_secret_env: Variable = Field(
        default="",
        description="Variable with the secret that keys the tenant hash; empty: made once and kept in the store. Needed where replicas have several stores.",
    )


class Admin(Section):
    """[admin]: health, metrics, sessions and the dashboard, on a port of its own."""

    host: Host = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(
        default=9090, ge=0, le=65535, description="TCP port to listen on; 0 takes any free one, for tests."
    )
    token_env: Variable = Field(
        default="WARMFOLD_ADMIN_TOKEN",
        description="Variable with the bearer token of the admin listener. Must be set where host is not loopback.",
    )
