"""aiohttp's server, less what it does to requests and says of them: no decompression, no access log, no line that quotes a client.

All that we know of aiohttp's server beyond its documentation stands here; tests/e2e/test_relay_upload.py notices when it changes.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import _ErrInfo

from proxy.errors import ERROR_HEADER, error_body
from proxy.upstream import MAX_HEADER_BYTES, MAX_HEADERS

log = logging.getLogger("warmfold.listener")

_INVALID = f"The request is not valid HTTP, has a header line of more than {MAX_HEADER_BYTES} bytes, or more than {MAX_HEADERS} headers."


class Server(web.Server):
    """Makes our connections."""

    def __call__(self) -> web.RequestHandler:
        """A new connection."""
        return _Connection(
            self,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # None switches it off, which the annotation forgets
            auto_decompress=False,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
        )


class _Connection(web.RequestHandler):
    def data_received(self, data: bytes) -> None:
        """Parse; tell whoever is reading a body that it turned out to be misframed. aiohttp leaves that reader waiting for ever."""
        super().data_received(data)
        if self._messages and isinstance(self._messages[-1][0], _ErrInfo):
            request = self._current_request
            if request is not None and not request.content.is_eof():
                request.content.set_exception(web.RequestPayloadError("misframed"))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what aiohttp could not read. Its own quotes the header line at fault, which may be a credential."""
        log.warning("request refused status=%d error=%s", status, type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun")
        answer = web.Response(
            status=status,
            body=error_body(_INVALID, "invalid_request_error", "invalid_http"),
            content_type="application/json",
            headers={ERROR_HEADER: "invalid_http"},
        )
        answer.force_close()
        return answer

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """One line with the type: the message of an exception may quote a request."""
        log.warning("connection failed error=%s", type(kw.get("exc_info")).__name__)
