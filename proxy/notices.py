"""What a configuration means that its author may not have meant, in words for the log at start and for `warmfold check`."""

from __future__ import annotations

from collections.abc import Iterator

from proxy.config import Config
from proxy.config.kinds import quoted


def cache_given_up(config: Config) -> Iterator[str]:
    """The summary models for which a replay was asked for as well: there is none, so the provider's cache is of no use to a compaction."""
    rules = (
        (f"models[{i}]", rule.over(config.compaction), rule.model_fields_set) for i, rule in enumerate(config.models)
    )
    for section, policy, keys in (("compaction", config.compaction, {"summary_model"}), *rules):
        if policy.mode == "off" or policy.strategy != "replay" or not policy.summary_model:
            continue
        if keys & {"summary_model", "strategy", "mode"}:
            yield (
                f"{section}.summary_model = {quoted(policy.summary_model)}: this model is sent a transcript, so the provider's cache of the "
                'conversation is not reused; with strategy = "transcript" this is not mentioned'
            )
