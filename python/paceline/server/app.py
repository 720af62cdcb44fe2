# SPDX-License-Identifier: Apache-2.0
"""The routes of the server."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import paceline
from paceline.async_stream import ChunkStream
from paceline.prompts import with_salt
from paceline.server import tokens
from paceline.server.bodies import BODY, ClientGone, Receive
from paceline.server.connection import (
    EventStream,
    JsonResponse,
    Send,
    to_json_in_pieces,
    until_gone,
)
from paceline.server.cors import allow_origins
from paceline.server.drafter import check_may_change, read_drafter, set_drafter
from paceline.server.errors import ApiError, as_api_error
from paceline.server.exchange import REQUEST_ID, error_response
from paceline.server.field_schemas import FIELDS, MAX_MESSAGES
from paceline.server.fields import ChatCall, ServedModel, Wishes, read_chat, read_completion
from paceline.server.generation import Generation
from paceline.server.guard import API_KEY, GENERATING_PATHS, App, Guard, Scope
from paceline.server.live_page import page
from paceline.server.message_fields import read_message
from paceline.server.messages import MessageRun
from paceline.server.metrics import CONTENT_TYPE
from paceline.server.openapi import docs_page, document
from paceline.server.response_fields import read_response
from paceline.server.responses import ResponseRun
from paceline.server.runs import Run, RunContext
from paceline.server.service import Service
from paceline.server.shapes import ChatShape, CompletionShape
from paceline.server.traces import REQUEST_SPAN

_logger = logging.getLogger("paceline")

Endpoint = Callable[[Request], Awaitable[Response]]

_CLIENT_GONE: Final = 499  # is not sent: the client has closed the connection


def make_app(service: Service) -> App:
    """Makes the ASGI application that serves a model."""
    endpoints = _generating_endpoints(service) | _tokenizing_endpoints(service)
    endpoints["/v1/drafter"] = _drafter_endpoint(service)
    routes = [Route(path, endpoint) for path, endpoint in _facts(service).items()]
    # They refuse other methods; `_Shortcut` knows them too.
    routes += [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]
    kinds = (ApiError, ValueError, RuntimeError, MemoryError, Exception)
    handlers: dict[Any, Any] = dict.fromkeys(kinds, _on_error) | {HTTPException: _on_http_error}
    app = Starlette(routes=routes, exception_handlers=handlers)
    guarded = Guard(_Shortcut(app, endpoints), service)
    return allow_origins(guarded, service.cors_origins, has_key=bool(service.api_keys))


class _Shortcut:
    """Leads requests with a body to their endpoints, past the layers of Starlette, which take much
    of the event loop's time for a short request. All others go through Starlette."""

    def __init__(self, app: App, endpoints: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"]) if scope["method"] == "POST" else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await endpoint(request)
        except ClientGone:
            response = Response(status_code=_CLIENT_GONE)
        except Exception as error:
            answer = as_api_error(error)
            if not isinstance(error, ApiError | ValueError | RuntimeError | MemoryError):
                _logger.exception("%s failed", scope["path"])
            response = error_response(answer, scope)
        await response(scope, receive, send)


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(as_api_error(error), request.scope)


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    answer = ApiError(error.status_code, message, headers=error.headers)
    return error_response(answer, request.scope)


def _constant(response: Response) -> Endpoint:
    async def answer(_: Request) -> Response:
        return response

    return answer


def _facts(service: Service) -> dict[str, Endpoint]:
    """Returns what answers requests without a body, by path."""
    llm = service.allm.llm

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "paceline",
            "root": str(llm.target.path),
            "parent": None,
            "max_model_len": llm.max_model_len,
        }

    async def health(_: Request) -> Response:
        if service.is_draining:
            raise ApiError(503, "the server is about to end")
        service.check_running()
        described = service.health()
        if described is None:
            return Response()
        if described["status"] == "starting":
            error = ApiError(503, "no replica is up; requests wait until one has started")
            return JsonResponse(error.body() | described, status_code=error.status)
        return JsonResponse(described)

    async def metrics(_: Request) -> Response:
        return Response(await service.ask(service.metrics), media_type=CONTENT_TYPE)

    async def stats(_: Request) -> Response:
        return JsonResponse(await service.ask(service.stats))

    async def version(_: Request) -> Response:
        return JsonResponse({"version": paceline.__version__})

    async def models(_: Request) -> Response:
        return JsonResponse({"object": "list", "data": [card(name) for name in service.names]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        service.check_model(name)
        return JsonResponse(card(name))

    async def capabilities(_: Request) -> Response:
        served = {
            "models": list(service.names),
            "max_model_len": llm.max_model_len,
            "replicas": service.num_replicas,
            "max_outputs": service.admission.limit,
            "max_body_bytes": service.limits.max_body_bytes,
            "max_messages": MAX_MESSAGES,
            "tool_call_parser": None if service.text_format is None else service.text_format.name,
            "fields": {path: sorted(FIELDS[path]) for path in GENERATING_PATHS},
        }
        return JsonResponse(llm.capabilities() | {"server": served})

    pages = {"/": page(), "/docs": docs_page()}
    return {
        **{path: _constant(Response(text, headers=own)) for path, (text, own) in pages.items()},
        "/openapi.json": _constant(JsonResponse(document())),
        "/health": health,
        "/ping": health,  # the name of the same for Amazon SageMaker
        "/metrics": metrics,
        "/version": version,
        "/v1/stats": stats,
        "/v1/models": models,
        "/v1/models/{name:path}": model,
        "/v1/capabilities": capabilities,
    }


def _generating_endpoints(service: Service) -> dict[str, Endpoint]:
    """Returns what answers requests for outputs, by path."""
    allm = service.allm

    def salt_of(request: Request, wishes: Wishes) -> str | None:
        return service.cache_salt(request.scope.get(API_KEY), wishes.cache_salt)

    async def completions(request: Request) -> Response:
        call = await service.read(
            request,
            lambda given: read_completion(given, service.completion_params, service.check_model),
        )
        num_prompts = len(call.prompts)
        param = "prompt" if num_prompts > 1 else "n"
        # Before anything is made for each of the prompts, of which a body may have a million.
        service.admission.check_size(num_prompts * call.wishes.params.n, param)
        salt = salt_of(request, call.wishes)
        streams = [
            allm.stream(with_salt(prompt, salt), call.wishes.params) for prompt in call.prompts
        ]
        shape = CompletionShape(call.wishes, service.decode)
        run = Generation(streams, shape, _context(service, request))
        return await _answer(service, request, run, call.wishes, param, num_prompts)

    def chats(
        read: Callable[[dict[str, Any], ServedModel], ChatCall],
        make: Callable[[ChunkStream, ChatCall, RunContext], Run],
        param: str,
    ) -> Endpoint:
        async def answer(request: Request) -> Response:
            call = await service.read(request, lambda given: read(given, service.served))
            stream = allm.stream_chat(
                call.messages,
                call.wishes.params,
                cache_salt=salt_of(request, call.wishes),
                **call.template_arguments,
            )
            run = make(stream, call, _context(service, request))
            return await _answer(service, request, run, call.wishes, param)

        return answer

    found = (
        completions,
        chats(read_chat, _chat_run, "n"),
        chats(read_response, ResponseRun, "input"),
        chats(read_message, MessageRun, "messages"),
    )
    return dict(zip(GENERATING_PATHS, found, strict=True))


def _chat_run(stream: ChunkStream, call: ChatCall, context: RunContext) -> Run:
    return Generation([stream], ChatShape(call.wishes, call.make_parser), context)


def _context(service: Service, request: Request) -> RunContext:
    return RunContext(
        service.names[0],
        request.scope[REQUEST_ID],
        service.figures,
        request.scope.get(REQUEST_SPAN),
        service.write,
        service.shows_cached_tokens,
    )


def _tokenizing_endpoints(service: Service) -> dict[str, Endpoint]:
    """Returns what converts prompts to token ids and back, by path."""

    def endpoint(read: Callable[[Service, dict[str, Any]], tokens.Conversion]) -> Endpoint:
        async def answer(request: Request) -> Response:
            convert = await service.read(request, lambda given: read(service, given))
            # It takes what the preparation of a prompt does, so it counts as an output does.
            with service.admission.admit(1, "prompt"):
                content = await service.tokenize(request, lambda: to_json_in_pieces(convert()))
            return JsonResponse(content)

        return answer

    return {
        "/tokenize": endpoint(tokens.read_tokenize),
        "/detokenize": endpoint(tokens.read_detokenize),
        "/v1/messages/count_tokens": endpoint(tokens.read_count),
    }


def _drafter_endpoint(service: Service) -> Endpoint:
    async def answer(request: Request) -> Response:
        check_may_change(service)
        config = await service.read(request, read_drafter)
        return JsonResponse(await set_drafter(service, config))

    return answer


async def _answer(
    service: Service,
    request: Request,
    run: Run,
    wishes: Wishes,
    param: str,
    num_prompts: int = 1,
) -> Response:
    """Admits a request and runs it; `param` is the field that says how many outputs it has."""
    context = run.context
    if context.span is not None:
        context.span.note_request(
            context.model,
            context.request_id,
            wishes.params,
            is_chat=request.scope["path"] != "/v1/completions",
            is_streamed=wishes.is_streamed,
        )
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(service.admission.admit(num_prompts * wishes.params.n, param))
        stack.push_async_callback(run.close)
        if not wishes.is_streamed:
            return JsonResponse(await until_gone(request.receive, _whole(run, request)))
        if wishes.params.structured_outputs is None:
            # Short, and nothing runs on before the end of the client is noticed.
            await _start(run, request)
        else:
            await until_gone(request.receive, _start(run, request))  # it may compile a grammar
        return EventStream(run.events(), stack.pop_all().aclose)


async def _start(run: Run, request: Request) -> None:
    await run.start()
    request.scope[BODY].release()  # the prompts are token ids by now


async def _whole(run: Run, request: Request) -> dict[str, Any] | bytes:
    await _start(run, request)
    return await run.whole()
