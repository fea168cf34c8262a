"""Real answers of many providers, through the proxy: status, end-to-end headers and body come out as they went in."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.e2e.relay_wire import Exchange, ask, on_uvloop, pair

FOLDER = Path(os.environ.get("WARMFOLD_WIRE", Path(__file__).parents[2] / "../shared/wire"))
FRAMING = {"content-length", "transfer-encoding", "connection", "keep-alive"}
CUT = 37  # bytes a chunk: no boundary of an event, a character or a gzip block falls on it for long


SAMPLES = sorted(path.stem for path in FOLDER.glob("*.json"))


@pytest.mark.skipif(not SAMPLES, reason=f"no recorded answers in {FOLDER} (WARMFOLD_WIRE)")
@on_uvloop
async def test_recorded_answers_pass_unchanged() -> None:
    served = {}

    async def script(exchange: Exchange) -> None:
        sample, _, framing = exchange.request.first.split(b" ")[1].decode().removeprefix("/v1/").partition("?")
        meta = json.loads((FOLDER / f"{sample}.json").read_text())
        body = (FOLDER / f"{sample}.body").read_bytes()
        headers = [(k.encode(), v.encode()) for k, v in meta["headers"] if k.lower() not in FRAMING]
        served[sample] = (meta["status"], headers, body)
        head = b"HTTP/1.1 %d Said So\r\n" % meta["status"] + b"".join(b"%s: %s\r\n" % h for h in headers)
        if framing == "fixed":
            await exchange.send(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            return
        await exchange.send(head + b"Transfer-Encoding: chunked\r\n\r\n")
        for start in range(0, len(body), CUT):
            piece = body[start : start + CUT]
            await exchange.send(b"%x\r\n%s\r\n" % (len(piece), piece))
        await exchange.send(b"0\r\n\r\n")

    async with pair(script) as (_, warmfold):
        for sample in SAMPLES:
            for framing in ("fixed", "chunked"):
                got = await ask(warmfold.port, f"GET /v1/{sample}?{framing} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
                headers = [(k, v) for k, v in got.headers if k.decode().lower() not in FRAMING]
                assert (got.status, headers, got.body) == served[sample], sample
                assert got.complete, sample
