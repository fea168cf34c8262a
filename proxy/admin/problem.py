"""Errors as the listener answers them: JSON in the shape that OpenAI's API uses, so one parser reads both."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

log = logging.getLogger("warmfold.admin")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# Answers hold checkpoint text and tenant hashes; no cache between us and the operator may keep them.
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class Problem(Exception):
    """A request that ends in an error answer.

    `code` is the word for machines, `message` the sentence for people. Neither may hold what the caller sent unless it was
    recognised first: a credential pasted into the wrong place would come back in the answer and in logs.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        beside: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{status} {code}")
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.beside = dict(beside or {})
        self.headers = dict(headers or {})

    def answer(self) -> web.Response:
        """The answer: `error` with message, type, param and code, and what stands `beside` it."""
        error = {"message": self.message, "type": _kind(self.status), "param": self.param, "code": self.code}
        return answer({"error": error, **self.beside}, self.status, self.headers)


def answer(value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """`value` as a JSON response that no cache keeps."""
    return encoded(orjson.dumps(value), status, headers)


def encoded(
    body: bytes, status: int = 200, headers: Mapping[str, str] | None = None, content_type: str = ""
) -> web.Response:
    """Bytes as a response that no cache keeps; JSON unless told otherwise."""
    kind = {"Content-Type": content_type or "application/json"}
    return web.Response(body=body, status=status, headers={**_HEADERS, **kind, **(headers or {})})


@web.middleware
async def problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The handler's answer, or its failure as JSON: ours, the router's (404, 405), and whatever nobody foresaw (500)."""
    try:
        return await handler(request)
    except Problem as problem:
        return problem.answer()
    except web.HTTPException as refused:
        return _of_router(refused).answer()
    except Exception as error:
        # The type alone: a message of a foreign exception may quote the request.
        resource = request.match_info.route.resource
        log.error("%s %s failed: %s", request.method, resource.canonical if resource else "-", type(error).__name__)
        return Problem(
            500, "internal", f"The request failed inside the proxy ({type(error).__name__}); its log says when."
        ).answer()


def _of_router(refused: web.HTTPException) -> Problem:
    if refused.status == 404:
        return Problem(404, "not_found", "No such path; the documentation lists them all (docs/admin.md).")
    if refused.status == 405:
        allowed = refused.headers.get("Allow", "")
        return Problem(405, "method_not_allowed", f"This path answers to {allowed}.", headers={"Allow": allowed})
    if refused.status == 413:
        return Problem(413, "body_too_large", "The body is larger than any request of this interface needs (64 KiB).")
    return Problem(refused.status, "refused", refused.reason)


def _kind(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 403: "permission_error"}.get(status, "invalid_request_error")
