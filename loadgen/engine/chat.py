"""The chat-completions request and its answers, as the OpenAI API defines them: validation and JSON, no I/O.

Outputs are always as long as the request allows (as with ignore_eos), so every answer ends with "length".
Fields that sample or shape text are accepted and mean nothing here: there is no model.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loadgen.engine.tokens import filler, num_tokens
from megamoe.errors import InvalidArgumentError, MegaMoeError

DEFAULT_MAX_TOKENS = 128
"""Output length of a request that names none."""


class _Part(BaseModel):
    """One part of a message; only text has tokens."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore")
    role: str
    content: str | list[_Part] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False
    continuous_usage_stats: bool = False


class ChatRequest(BaseModel):
    """Body of POST /v1/chat/completions."""

    model_config = ConfigDict(extra="ignore")
    model: str
    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    n: Literal[1] | None = 1
    stream: bool | None = False
    stream_options: _StreamOptions | None = None

    @classmethod
    def parse(cls, body: bytes) -> ChatRequest:
        """Raises InvalidArgumentError naming the field."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            first = max(
                error.errors(), key=lambda one: len(one["loc"])
            )  # of what may be one of two, the closer one
            field = ".".join(str(part) for part in first["loc"]) or "body"
            raise InvalidArgumentError(f"{field}: {first['msg']}") from None

    @property
    def prompt(self) -> str:
        """The texts of all messages; roles and templates have no tokens."""
        return "".join(message.text for message in self.messages)

    @property
    def num_input(self) -> int:
        """Prompt tokens, at least 1: an empty prompt still has a first position."""
        return max(num_tokens(self.prompt), 1)

    @property
    def num_output(self) -> int:
        return self.max_completion_tokens or self.max_tokens or DEFAULT_MAX_TOKENS

    @property
    def usage_in(self) -> Literal["none", "end", "every chunk"]:
        """Where a stream carries usage."""
        options = self.stream_options or _StreamOptions()
        if options.continuous_usage_stats:
            return "every chunk"
        return "end" if options.include_usage else "none"


class Answer:
    """The JSON of one answer. num_cached: prompt tokens found in the prefix cache, known once prefill has begun."""

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def usage(self, num_emitted: int, num_cached: int) -> dict[str, Any]:
        """Token counts so far."""
        return {
            "prompt_tokens": self._request.num_input,
            "completion_tokens": num_emitted,
            "total_tokens": self._request.num_input + num_emitted,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def chunk(self, first: int, count: int, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """A stream's chunk with `count` tokens from token `first` on."""
        delta = {"content": filler(first, count)}
        if first == 0:
            delta = {"role": "assistant", **delta}
        return self._chunk([{"index": 0, "delta": delta, "finish_reason": None}], usage)

    def last_chunks(
        self, usage: dict[str, Any] | None, include: Literal["none", "end", "every chunk"]
    ) -> list[Any]:
        """What ends a stream: the reason, then usage in a chunk of its own where it was asked for."""
        end = self._chunk(
            [{"index": 0, "delta": {}, "finish_reason": "length"}],
            usage if include == "every chunk" else None,
        )
        return [end] if include == "none" else [end, self._chunk([], usage)]

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        message = {"role": "assistant", "content": filler(0, self._request.num_output)}
        return {
            **self._head("chat.completion"),
            "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
            "usage": usage,
        }

    def _chunk(self, choices: list[Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        chunk = {**self._head("chat.completion.chunk"), "choices": choices}
        return chunk if usage is None else chunk | {"usage": usage}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._request.model}


def error_body(error: MegaMoeError, kind: str) -> dict[str, Any]:
    """The API's error object."""
    return {"error": {"message": str(error), "type": kind, "param": None, "code": str(error.code)}}
