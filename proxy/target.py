"""Who writes a summary: the conversation's own model, which has its cache, or another one, perhaps at another provider."""

from __future__ import annotations

from dataclasses import replace

from proxy.config import Compaction, Config, Upstream
from proxy.core.model import Session
from proxy.core.overflow_text import Overflow
from proxy.core.transcript import DEFAULT_OUTPUT_KEY, Transcription, output_key
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
        upstream, inbound = summaries_at(self._config, policy, job.upstream, job.inbound)
        if policy.summary_model:
            model = policy.summary_model
            own = self._config.compaction_for(model)
            window = self._windows.of(upstream.name, model, own, tenant=job.warm.session.tenant)
        else:
            model = job.warm.model or (known.turn.model if known is not None and known.turn is not None else "")
            window = job.limits.window
        # What the client calls its limit is understood where its own requests go.
        key = output_key(job.warm.head + job.warm.tail) if inbound is job.inbound else DEFAULT_OUTPUT_KEY
        sizes = (policy.max_tool_result_chars, policy.max_transcript_chars)
        return replace(job, upstream=upstream, inbound=inbound, transcription=Transcription(model, window, *sizes, key))

    def taught(self, job: Job, said: Overflow) -> None:
        """Remember what whoever was asked said of their window when the call was too long."""
        if said.limit is not None:
            tenant = job.warm.session.tenant
            self._windows.learned(job.upstream.name, job.model, said.limit, said.input_only, tenant=tenant)


def summaries_at(config: Config, policy: Compaction, upstream: Upstream, inbound: Inbound) -> tuple[Upstream, Inbound]:
    """The upstream that summaries of this upstream's conversations are asked of, and the request whose headers and query go there.

    That is the client's own, `inbound`, only where both are the same place: its credentials may stand in any header or in the query.
    """
    asked = config.upstream_for(policy.summary_model) if policy.summary_model else upstream
    return asked, inbound if Place.of(asked.base_url) == Place.of(upstream.base_url) else _FRESH


def spends_our_key(config: Config, model: str) -> bool:
    """Whether a summary of this model's conversations is paid for with a key of the operator's."""
    writers = (model, config.compaction_for(model).summary_model or model)
    return any(config.upstream_for(writer).api_key_env for writer in writers)
