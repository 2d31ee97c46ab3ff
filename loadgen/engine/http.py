"""The HTTP face of the engine: /v1/chat/completions (plain or SSE), /v1/models, /health. aiohttp does the HTTP.

A caller that hangs up is taken out of the engine. Conversations are told apart by the X-Correlation-ID header, where
there is one, and then prefer the rank that served them last.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from loadgen.engine.chat import Answer, ChatRequest, error_body
from loadgen.engine.core import Engine, Generation
from loadgen.engine.tokens import block_ids
from megamoe.errors import InvalidArgumentError, MegaMoeError, UnavailableError

log = logging.getLogger("loadgen")

MAX_BODY_BYTES = 64 << 20
SESSION_HEADER = "X-Correlation-ID"


class ChatServer:
    """Routes over one engine. model_name: the one model that requests may name."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name
        self._created = int(time.time())
        self.app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_json])
        self.app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post("/v1/chat/completions", self._chat),
            ]
        )

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"requests_in_flight": self._engine.num_in_flight})

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._model_name, "object": "model", "created": self._created, "owned_by": "megamoe"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            chat = ChatRequest.parse(await request.read())
            if chat.model != self._model_name:
                raise InvalidArgumentError(f"model must be {self._model_name!r}, got {chat.model[:100]!r}")
            self._engine.check_fits(chat.num_input, chat.num_output)  # before a long prompt costs anything
            uid = uuid.uuid4().hex
            generation = self._engine.generate(
                uid=uid,
                agent_uid=request.headers.get(SESSION_HEADER, uid),
                num_input=chat.num_input,
                hash_ids=block_ids(chat.prompt),
                num_output=chat.num_output,
            )
        except InvalidArgumentError as error:
            return web.json_response(error_body(error, "invalid_request_error"), status=400)
        except UnavailableError as error:
            return web.json_response(error_body(error, "service_unavailable"), status=503)
        try:
            if chat.stream:
                return await self._stream(request, chat, generation)
            async for _ in generation:
                pass
            answer = Answer(chat)
            return web.json_response(answer.whole(_usage(answer, generation)))
        except MegaMoeError as error:  # before the first byte: a status can still say it
            return web.json_response(error_body(error, "server_error"), status=503)
        finally:
            self._engine.abort(generation)

    async def _stream(
        self, request: web.Request, chat: ChatRequest, generation: Generation
    ) -> web.StreamResponse:
        """Server-sent events. Raises MegaMoeError only before the first byte; later ones end the stream as events."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        answer, usage_in = Answer(chat), chat.usage_in
        try:
            async for first, count in generation:
                if not response.prepared:
                    await response.prepare(request)
                usage = _usage(answer, generation) if usage_in == "every chunk" else None
                await _send(response, answer.chunk(first, count, usage))
            for chunk in answer.last_chunks(_usage(answer, generation), usage_in):
                await _send(response, chunk)
            await response.write(b"data: [DONE]\n\n")
        except MegaMoeError as error:
            if not response.prepared:
                raise
            await _send(response, error_body(error, "server_error"))
        except ConnectionResetError:
            log.info("the caller of %s has gone", generation.request.uid)
        return response


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What aiohttp refuses (paths, methods, sizes, encodings) in the API's form too."""
    try:
        return await handler(request)
    except web.RequestPayloadError as error:
        refused = InvalidArgumentError(f"body cannot be read: {error}")
        return web.json_response(error_body(refused, "invalid_request_error"), status=400)
    except web.HTTPException as error:
        refused = InvalidArgumentError(f"{request.method} {request.path[:100]}: {error.text or error.reason}")
        body = error_body(refused, "invalid_request_error")
        allow = {name: value for name, value in error.headers.items() if name == "Allow"}
        return web.json_response(body, status=error.status, headers=allow)


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode())


def _usage(answer: Answer, generation: Generation) -> dict[str, Any]:
    request = generation.request
    return answer.usage(request.num_emitted, max(request.num_cached, 0))
