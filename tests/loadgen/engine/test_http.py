"""The engine over HTTP: what a client of the chat-completions API sends and gets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from loadgen.engine.tokens import filler, num_tokens
from loadgen.steps.records import Status
from megamoe.errors import MegaMoeError, PeerTimeoutError
from tests.loadgen.engine.conftest import MODEL, Served, serving

PROMPT = "x" * 200


def events_of(body: bytes) -> list[Any]:
    """JSON of every server-sent event; the last one must be [DONE]."""
    *events, done, rest = body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def text_of(events: list[Any]) -> str:
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


async def test_the_model_is_listed_and_the_engine_is_healthy(served: Served) -> None:
    models = await (await served.client.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == [MODEL]
    assert await (await served.client.get("/health")).json() == {"requests_in_flight": 0}


async def test_a_stream_carries_exactly_the_tokens_asked_for(served: Served) -> None:
    reply = await served.chat(stream=True, max_tokens=50)
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    events = events_of(await reply.read())
    assert text_of(events) == filler(0, 50)
    first, *rest = [event["choices"][0] for event in events]
    assert first["delta"]["role"] == "assistant"
    assert num_tokens(first["delta"]["content"]) == 1  # what prefill emits
    assert {num_tokens(choice["delta"]["content"]) for choice in rest[:-2]} == {3, 4}  # 6 drafts accept 3.77
    assert [choice["finish_reason"] for choice in rest] == [None] * (len(rest) - 1) + ["length"]
    assert not any("usage" in event for event in events)
    assert {event["id"] for event in events} == {events[0]["id"]}
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


async def test_every_decode_step_calls_every_layer_of_the_service(served: Served) -> None:
    await (await served.chat(stream=True, max_tokens=50)).read()
    steps = [event for event in served.tier.steps if "decode" in event[1]]
    assert len(steps) in (13, 14)  # 49 tokens by 3.77 a step
    assert all(sum(rows) == 7 for rows, _ in steps)
    assert len(served.tier.calls) == 4 * len(served.tier.steps)
    assert served.tier.bad_batches == []


async def test_usage_comes_last_when_asked_for(served: Served) -> None:
    options = {"include_usage": True}
    reply = await served.chat(stream=True, max_completion_tokens=10, stream_options=options)
    events = events_of(await reply.read())
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 10,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert not any("usage" in event for event in events[:-1])


async def test_usage_in_every_chunk_counts_up(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(await (await served.chat(stream=True, max_tokens=20, stream_options=options)).read())
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 20)


async def test_without_streaming_the_answer_comes_whole(served: Served) -> None:
    answer = await (await served.chat(max_tokens=30)).json()
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": filler(0, 30)}
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 30


async def test_a_prefix_that_came_before_is_cached(served: Served) -> None:
    system = {"role": "system", "content": PROMPT}
    for question, cached in (("one", 0), ("two", 192)):
        messages = [system, {"role": "user", "content": [{"type": "text", "text": question}]}]
        usage = (await (await served.chat(messages=messages, max_tokens=2)).json())["usage"]
        assert usage["prompt_tokens"] == 203
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached  # full blocks of 64


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model": "other"}, "model must be 'fake', got 'other'"),
        ({"messages": []}, "messages: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"n": 2}, "n: "),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.list[_Part].0.type: Input should be 'text'",
        ),
        ({"max_tokens": 10**30}, "prompt and output must be at most context_limit"),
        ({"messages": [{"role": "user", "content": "x" * (2 << 20)}]}, "prompt and output must be at most"),
        ({"max_tokens": 1 << 21}, "prompt and output must be at most context_limit"),
    ],
)
async def test_a_bad_request_is_refused_by_field(
    served: Served, fields: dict[str, Any], sentence: str
) -> None:
    reply = await served.chat(**fields)
    assert reply.status == 400
    error = (await reply.json())["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(sentence)
    assert served.tier.steps == []


@pytest.mark.parametrize("body", [b"{", b"", b"\xff\xfe", b"[" * 100_000, b'{"model": "\\ud800"}', b"[]"])
async def test_a_body_that_is_no_request_is_refused(served: Served, body: bytes) -> None:
    reply = await served.client.post("/v1/chat/completions", data=body)
    assert reply.status == 400
    assert (await reply.json())["error"]["code"] == "invalid_argument"


async def test_what_the_http_server_refuses_is_said_in_the_same_form(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, path = served.client, "/v1/chat/completions"
    monkeypatch.setattr(client.app, "_client_max_size", 1000)
    replies = {
        404: await client.post("/v1/completions", json={}),
        405: await client.get(path),
        413: await client.post(path, data=b"x" * 1001),
        400: await client.post(path, data=b"no gzip", headers={"Content-Encoding": "gzip"}),
    }
    for status, reply in replies.items():
        assert reply.status == status
        error = (await reply.json())["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_argument")
    assert replies[405].headers["Allow"] == "POST"


async def test_null_is_the_default_of_what_may_be_left_out(served: Served) -> None:
    reply = await served.chat(
        n=None, stream=None, max_tokens=None, max_completion_tokens=3, stream_options=None
    )
    assert (await reply.json())["usage"]["completion_tokens"] == 3


async def test_a_caller_that_hangs_up_leaves_the_engine() -> None:
    async with serving(time_scale=0.2) as served:
        reply = await served.chat(stream=True, max_tokens=100_000)
        await reply.content.readline()
        assert served.engine.num_in_flight == 1
        reply.close()
        await served.in_flight(0)
        (record,) = served.engine.record.requests
        assert record.status is Status.CANCELLED
        assert record.num_emitted < 1000
        assert (await served.chat(max_tokens=2)).status == 200  # the others go on


def failing_at(step: int) -> Any:
    def fail(step_idx: int, layer_idx: int) -> MegaMoeError | None:
        return PeerTimeoutError("rank 2 did not come", [2]) if step_idx == step else None

    return fail


async def test_a_service_that_fails_before_the_first_token_is_a_status() -> None:
    async with serving(failing_at(0)) as served:
        reply = await served.chat(stream=True, max_tokens=20)
        assert reply.status == 503
        error = (await reply.json())["error"]
        assert error["code"] == "peer_timeout"
        assert "rank 2 did not come" in error["message"]
        assert (await served.chat(max_tokens=2)).status == 200
        assert [record.status for record in served.engine.record.requests] == [
            Status.FAILED,
            Status.COMPLETED,
        ]


async def test_a_service_that_fails_in_a_stream_ends_it_with_the_error() -> None:
    async with serving(failing_at(3)) as served:
        reply = await served.chat(stream=True, max_tokens=50)
        assert reply.status == 200
        *_, last, rest = (await reply.read()).decode().split("\n\n")
        assert rest == ""
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "peer_timeout"  # and no [DONE]


async def test_requests_in_flight_are_told_when_the_engine_stops() -> None:
    async with serving(time_scale=0.2) as served:
        waiting = asyncio.create_task(served.chat(max_tokens=100_000))
        await served.in_flight(1)
        served.engine.stop()
        reply = await waiting
        assert reply.status == 503
        assert "stopped" in (await reply.json())["error"]["message"]
        assert (await served.chat()).status == 503


async def test_many_requests_share_steps() -> None:
    async with serving(num_drafts=0) as served:
        replies = await asyncio.gather(*(served.chat(stream=True, max_tokens=20) for _ in range(16)))
        for reply in replies:
            assert text_of(events_of(await reply.read())) == filler(0, 20)
        most = max(sum(rows) for rows, phases in served.tier.steps if "prefill" not in phases)
        assert most == 16
