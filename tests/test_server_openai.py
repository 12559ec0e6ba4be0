"""The real `openai` client against the real server: sync and async, whole and streamed, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server import LONG, Server, toy_bundle

pytestmark = [pytest.mark.oracle, pytest.mark.iree]
KEY = "the-right-key"
MESSAGES: Any = [{"role": "user", "content": "abc"}]
EXTRA = {"ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a key, three slots and a queue of one."""
    home = tmp_path_factory.mktemp("openai")
    (home / "keys").write_text(KEY + "\n")
    bundle = toy_bundle(home / "toy")
    options = ("--api-key-file", home / "keys", "--queue", 1, "--max-tokens", 1_000_000)
    with Server(bundle, *options, key=KEY) as running:
        yield running
    assert running.errors == ""


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    """The sync client, without retries, so that the first answer is the one seen."""
    openai = pytest.importorskip("openai", reason="needs openai")
    base = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=base, api_key=KEY, max_retries=0) as found:
        yield found


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"


def test_completion_whole_and_streamed(client: Any) -> None:
    asked: Any = {"model": "toy", "prompt": "abc", "max_tokens": 15, "temperature": 2, "seed": 5,
                  "n": 2, "logprobs": 2, "extra_body": EXTRA}  # fmt: skip
    whole = client.completions.create(**asked)
    assert whole.usage.completion_tokens == 30 and whole.usage.prompt_tokens == 3
    assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    assert whole.choices[0].text != whole.choices[1].text
    for choice in whole.choices:
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == 15
        assert all(value <= 0 for value in choice.logprobs.token_logprobs)
        assert all(2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs)
    texts, tokens, usage = ["", ""], [[], []], None
    with client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                if choice.logprobs:
                    tokens[choice.index] += choice.logprobs.tokens
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert usage == whole.usage


def test_stop_and_seed(client: Any) -> None:
    asked: Any = {"model": "toy", "prompt": [1, 2, 3], "max_tokens": 40, "temperature": 3,
                  "extra_body": EXTRA}  # fmt: skip
    texts = {client.completions.create(**asked, seed=s).choices[0].text for s in (1, 1, 2)}
    assert len(texts) == 2
    text = client.completions.create(**asked, seed=1).choices[0].text
    assert text in texts
    choice = client.completions.create(**asked, seed=1, stop=["no such", text[5:7]]).choices[0]
    assert choice.finish_reason == "stop" and choice.text == text[: text.index(text[5:7])]


def test_chat_whole_and_streamed(client: Any) -> None:
    asked: Any = {"model": "toy", "messages": MESSAGES, "max_completion_tokens": 8, "seed": 1,
                  "logprobs": True, "top_logprobs": 2, "extra_body": EXTRA}  # fmt: skip
    whole = client.chat.completions.create(**asked)
    message = whole.choices[0].message
    assert message.role == "assistant" and whole.usage.completion_tokens == 8
    content = whole.choices[0].logprobs.content
    assert len(content) == 8 and all(len(entry.top_logprobs) == 2 for entry in content)
    stream = client.chat.completions.create(**asked, stream=True)
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == message.content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_the_async_client(server: Server, client: Any) -> None:
    import openai

    asked: Any = {"model": "toy", "max_tokens": 10, "seed": 7, "extra_body": EXTRA}
    wanted = [client.completions.create(prompt=[1 + i], **asked).choices[0].text for i in range(4)]

    async def run() -> list[str]:
        base = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key=KEY, max_retries=0) as client:

            async def one(place: int) -> str:
                if place % 2:
                    found = await client.completions.create(prompt=[1 + place], **asked)
                    return found.choices[0].text
                stream = await client.completions.create(prompt=[1 + place], stream=True, **asked)
                return "".join([chunk.choices[0].text async for chunk in stream])

            chat = await client.chat.completions.create(
                model="toy", messages=MESSAGES, max_tokens=3
            )
            assert chat.usage is not None and chat.usage.completion_tokens <= 3
            return await asyncio.gather(*(one(i) for i in range(4)))

    assert asyncio.run(run()) == wanted


def test_leaving_a_stream_frees_the_slot(server: Server, client: Any) -> None:
    asked: Any = {"model": "toy", "prompt": LONG["prompt"], "max_tokens": LONG["max_tokens"]}
    with client.completions.create(**asked, stream=True, extra_body=EXTRA) as stream:
        assert next(iter(stream)).choices
        assert server.busy() == 1
    server.until(lambda: server.busy() == 0, 2)


def test_errors_have_their_classes(server: Server, client: Any) -> None:
    import openai

    asked: Any = {"model": "toy", "prompt": "a"}
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(**asked, temperature=-1)
    assert bad.value.param == "temperature" and "temperature" in str(bad.value)
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").completions.create(**asked)
    running = [server.send(LONG) for _ in range(4)]
    server.until(lambda: server.busy() == 4)
    with pytest.raises(openai.InternalServerError) as full:
        client.completions.create(**asked)
    assert full.value.status_code == 503 and full.value.code == "queue_full"
    for sock in running:
        sock.close()
    server.until(lambda: server.busy() == 0)


def test_a_retry_comes_through_a_full_queue(server: Server, client: Any) -> None:
    running = [server.send(LONG) for _ in range(4)]
    server.until(lambda: server.busy() == 4)
    before = server.metric('scanwright_rejected_requests_total{reason="queue_full"}')

    async def free() -> str:
        import openai

        base = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key=KEY, max_retries=3) as client:
            task = asyncio.create_task(
                client.completions.create(model="toy", prompt="a", max_tokens=2, extra_body=EXTRA)
            )
            await asyncio.sleep(0.3)
            for sock in running:
                sock.close()
            return (await task).choices[0].finish_reason

    assert asyncio.run(free()) == "length"
    assert server.metric('scanwright_rejected_requests_total{reason="queue_full"}') > before


def test_an_error_in_a_stream_is_raised(server: Server, tmp_path: Path) -> None:
    import openai

    with Server(toy_bundle(tmp_path / "toy"), "--request-timeout", 0.4,
                "--max-tokens", 1_000_000) as hasty:  # fmt: skip
        base = f"http://127.0.0.1:{hasty.port}/v1"
        with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
            asked: Any = {"model": "toy", "prompt": [1], "max_tokens": 1_000_000}
            with pytest.raises(openai.InternalServerError) as late:
                client.completions.create(**asked, extra_body=EXTRA)
            assert late.value.status_code == 504
            with pytest.raises(openai.APIError) as middle:
                for _ in client.completions.create(**asked, stream=True, extra_body=EXTRA):
                    pass
            assert "0.4 s" in str(middle.value)
