"""Sessions: list, look at, compact, undo, forget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from proxy.admin import asked, shown
from proxy.admin.ports import CompactAnswer, Compactor, Outcome
from proxy.admin.problem import Problem, answer
from proxy.admin.reasons import sentence
from proxy.core.model import Session, SessionId
from proxy.store import Store

_STATUS: Final[Mapping[Outcome, int]] = {
    "committed": 200,
    "skipped": 409,
    "failed": 502,
    "forbidden": 403,
    "unknown": 404,
}


@dataclass(frozen=True, slots=True)
class Sessions:
    """Handlers for /sessions and /tenants.

    `debounce_turns` says how long soft compaction rests after an undo; after `texts_live_s` what a deleted session leaves is gone.
    """

    store: Store
    compactor: Compactor
    debounce_turns: Callable[[Session], int]
    texts_live_s: int

    async def listing(self, request: web.Request) -> web.Response:
        """A page of sessions, newest turn first within the page, and the cursor of the next page, "" at the end."""
        limit, cursor = asked.page(request)
        page = await self.store.list(limit, cursor)
        if page is None:
            raise await self._absent(
                Problem(400, "invalid_cursor", "The store does not know this cursor; start again.", param="cursor")
            )
        newest_first = sorted(page.sessions, key=shown.last_turn_ms, reverse=True)
        return answer({"sessions": [shown.session(one) for one in newest_first], "cursor": page.cursor})

    async def single(self, request: web.Request) -> web.Response:
        """One session with its journal, newest attempt first."""
        found = await self._session(asked.session_id(request))
        journal = await self.store.journal(found.id)
        return answer({**shown.session(found), "journal": [shown.attempt(one) for one in journal]})

    async def summary(self, request: web.Request) -> web.Response:
        """The newest checkpoint that lives, with its text, ledger and anchors: all of a conversation that this listener gives out."""
        found = await self._session(asked.session_id(request))
        reference = shown.newest_alive(found)
        if reference is None:
            raise Problem(404, "checkpoint_not_found", "This session has no checkpoint in force.")
        newest = await self.store.checkpoint(found.id, reference.id)
        if newest is None:
            raise await self._absent(
                Problem(404, "checkpoint_not_found", "The checkpoint's text has passed its time to live.")
            )
        return answer(
            {**shown.checkpoint(newest), "session": str(found.id), "covered": newest.k, **shown.words(newest)}
        )

    async def compact(self, request: web.Request) -> web.Response:
        """Compacts now and answers when that has ended."""
        id_ = asked.session_id(request)
        region = await asked.region(request)
        found = await self._session(id_)
        if (region.to or 0) > found.length:
            raise Problem(400, "invalid_region", f"The session has {found.length} messages; to may not lie beyond.")
        became = await self.compactor.compact_now(id_, asked.upstream_credential(request), region.from_, region.to)
        told = {
            "outcome": became.outcome,
            "because": became.because,
            "checkpoint": shown.checkpoint(became.checkpoint) if became.checkpoint else None,
            "attempt": shown.attempt(became.attempt) if became.attempt else None,
        }
        if became.outcome == "committed":
            return answer({"id": str(id_), **told})
        raise Problem(_STATUS[became.outcome], became.because or became.outcome, _sentence(became), beside=told)

    async def undo(self, request: web.Request) -> web.Response:
        """Buries the newest checkpoint that lives; the next request carries what was in force before it."""
        found = await self._session(asked.session_id(request))
        if shown.newest_alive(found) is None:
            raise Problem(409, "nothing_to_undo", "This session has no checkpoint in force.")
        resumes = found.counters.turns + self.debounce_turns(found)
        if not await self.store.undo(found.id, resumes):
            raise await self._absent(
                Problem(409, "conflict", "The session changed meanwhile; look at it and ask again.")
            )
        after = await self.store.session(found.id)
        # A commit may have come between our read and the undo: say what was buried, not what we had seen.
        buried = _dead(after) - _dead(found) if after else set()
        return answer({"id": str(found.id), "undone": sorted(buried), "soft_compaction_resumes_at_turn": resumes})

    async def delete(self, request: web.Request) -> web.Response:
        """Forgets a session and its checkpoints. Bytes of messages may be those of other sessions too, and run out by themselves."""
        id_ = asked.session_id(request)
        if not await self.store.delete(id_):
            raise await self._absent(_no_session())
        return answer({"id": str(id_), "deleted": True, "texts_gone_within_s": self.texts_live_s})

    async def delete_tenant(self, request: web.Request) -> web.Response:
        """Forgets all that is kept of a tenant."""
        tenant = asked.tenant(request)
        keys = await self.store.delete_tenant(tenant)
        if keys is None:
            raise _store_out()
        if keys == 0:
            raise Problem(404, "tenant_not_found", "Nothing is kept of this tenant.", param="tenant")
        return answer({"tenant": tenant, "deleted": True, "keys": keys})

    async def _session(self, id_: SessionId) -> Session:
        found = await self.store.session(id_)
        if found is None:
            raise await self._absent(_no_session())
        return found

    async def _absent(self, otherwise: Problem) -> Problem:
        """`otherwise`, unless the store is out: its answers do not tell "there is none" from "I cannot say"."""
        return otherwise if await self.store.ping() else _store_out()


def _dead(session: Session) -> set[str]:
    return {one.id for one in session.checkpoints if one.dead}


def _no_session() -> Problem:
    return Problem(404, "session_not_found", "No such session; it may have passed its time to live.", param="id")


def _store_out() -> Problem:
    return Problem(503, "store_unavailable", "The store does not answer; /readyz says when it is back.")


def _sentence(became: CompactAnswer) -> str:
    match became.outcome:
        case "forbidden":
            return "Send the credential of the session's own tenant in x-upstream-authorization; this one is missing or another tenant's."
        case "unknown":
            return "No such session; it may have passed its time to live."
        case "skipped":
            return f"Not compacted ({became.because}). {sentence(became.because)}".rstrip()
        case "failed":
            return f"The compaction failed ({became.because}). {sentence(became.because)}".rstrip()
        case "committed":
            return "Compacted."
