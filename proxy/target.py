"""Who writes a summary: the conversation's own model, which has its cache, or another one, perhaps at another provider."""

from __future__ import annotations

from dataclasses import replace

from proxy.config import Config, Upstream
from proxy.core.model import Session
from proxy.core.transcript import Transcription
from proxy.job import Job
from proxy.outbound import Inbound, Place
from proxy.windows import Windows

_FRESH = Inbound(method="POST", target="/v1/chat/completions", headers=(("Content-Type", "application/json"),))


class Targets:
    """Settles where compaction calls go."""

    def __init__(self, config: Config, windows: Windows) -> None:
        self._config = config
        self._windows = windows

    def aimed(self, job: Job, known: Session | None) -> Job:
        """The job with the upstream, the request whose route it takes, and the transcription, where its policy wants one.

        The model is the configured one, else the warm request's, else that of the session's last turn; "": none is known.
        """
        policy = job.policy
        if policy.strategy == "replay" and not policy.summary_model:
            return job
        own = job.warm.model or (known.turn.model if known is not None and known.turn is not None else "")
        model, upstream, window = own, job.upstream, job.limits.window
        if policy.summary_model:
            model = policy.summary_model
            upstream = self._config.upstream_for(model)
            window = self._windows.of(upstream.name, model, self._config.compaction_for(model))
        transcription = Transcription(model, window, policy.max_tool_result_chars, policy.max_transcript_chars)
        inbound = job.inbound if _is_same_place(upstream, job.upstream) else _FRESH
        return replace(job, upstream=upstream, inbound=inbound, transcription=transcription)


def spends_our_key(config: Config, model: str) -> bool:
    """Whether a summary of this model's conversations is paid for with a key of the operator's."""
    writers = (model, config.compaction_for(model).summary_model or model)
    return any(config.upstream_for(writer).api_key_env for writer in writers)


def _is_same_place(one: Upstream, other: Upstream) -> bool:
    """Whether what a client sent to the one may go to the other: its credentials, which may stand in any header or in the query."""
    return Place.of(one.base_url) == Place.of(other.base_url)
