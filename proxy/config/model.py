"""The whole configuration, and what holds for one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from pydantic import Field, PrivateAttr, SecretStr

from proxy.config.compaction import Compaction, ModelRule
from proxy.config.sections import Admin, NamedUpstream, Section, Server, Session, Store, Upstream


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load` knows beside the values: the environment, and where each key was set (`section.key` to file, variable or flag)."""

    environ: Mapping[str, str]
    origins: Mapping[str, str] = field(default_factory=dict)


class Config(Section):
    """The effective configuration. Its dump and repr hold no secret.

    Made by `load`; made directly, as in tests, it knows no secrets and calls every value a default.
    """

    server: Server = Field(default=Server(), description="The listener the SDK talks to.")
    upstream: Upstream = Field(default=Upstream(), description="The default provider.")
    upstreams: tuple[NamedUpstream, ...] = Field(default=(), strict=False, description="Other providers, by model.")
    store: Store = Field(default=Store(), description="Where sessions and checkpoints live.")
    compaction: Compaction = Field(default=Compaction(), description="When and how a conversation is compacted.")
    session: Session = Field(default=Session(), description="Whose conversation a request belongs to.")
    admin: Admin = Field(default=Admin(), description="The admin listener.")
    models: tuple[ModelRule, ...] = Field(default=(), strict=False, description="What differs by model.")

    _merged: tuple[tuple[str, Compaction], ...] = PrivateAttr(default=())
    _secrets: Mapping[str, SecretStr] = PrivateAttr(default_factory=dict)
    _origins: Mapping[str, str] = PrivateAttr(default_factory=dict)

    def model_post_init(self, context: object) -> None:
        """Merge the rules and take the secrets out of the environment, once: no request pays for either."""
        self._merged = tuple((rule.match, rule.over(self.compaction)) for rule in self.models)
        if isinstance(context, Loaded):
            self._origins = context.origins
            read = {name: context.environ.get(name, "").strip() for name in self.variables().values()}
            self._secrets = {name: SecretStr(value) for name, value in read.items() if value}

    def compaction_for(self, model: str) -> Compaction:
        """[compaction] with the keys of the first [[models]] rule that matches; the same object for every model of a rule."""
        for pattern, compaction in self._merged:
            if fnmatchcase(model, pattern):
                return compaction
        return self.compaction

    def rule_for(self, model: str) -> ModelRule | None:
        """The first [[models]] rule that matches: read only its prices, the rest is in `compaction_for`."""
        return next((rule for rule in self.models if fnmatchcase(model, rule.match)), None)

    def upstream_for(self, model: str) -> Upstream:
        """The first of [[upstreams]] that matches, else [upstream], whose name is `default`."""
        return next((u for u in self.upstreams if fnmatchcase(model, u.match)), self.upstream)

    def secret(self, name: str) -> str | None:
        """The value of a configured environment variable as it was at load, without surrounding white space; None: not set, or empty."""
        secret = self._secrets.get(name)
        return secret.get_secret_value() if secret else None

    def variables(self) -> Mapping[str, str]:
        """The environment variables that the configuration names, by key (`upstream.api_key_env`)."""
        named = {
            "server.client_token_env": self.server.client_token_env,
            "upstream.api_key_env": self.upstream.api_key_env,
            **{f"upstreams[{i}].api_key_env": upstream.api_key_env for i, upstream in enumerate(self.upstreams)},
            "session.tenant_secret_env": self.session.tenant_secret_env,
            "admin.token_env": self.admin.token_env,
        }
        return {key: name for key, name in named.items() if name}

    def origin(self, key: str) -> str:
        """Where a key was set: the file's path, the variable, the flag, or `default`. A list is set as a whole (`models[0].match`)."""
        return self._origins.get(key) or self._origins.get(key.partition("[")[0], "default")
