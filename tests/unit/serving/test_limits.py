"""What the endpoint refuses, how much it takes at once, and how it ends."""

import copy
import dataclasses
import json
import socket
import threading
import time

import pytest

from rallypoint.errors import GenerationError, NotFiniteError
from rallypoint.generation import Output
from rallypoint.serving import Deadlines, bind


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


USER = {"role": "user", "content": "x"}


REFUSED = {
    "not JSON": (b"{", None, "not JSON"),
    "not UTF-8": (b'{"prompt": "\xff"}', None, "not JSON in UTF-8"),
    "not an object": (b"[1]", None, "expected an object"),
    "nested": (b"[" * 50_000, None, "recursion"),
    "no messages": ({"messages": []}, "messages", "at least 1"),
    "messages missing": ({}, "messages", "required"),
    "unknown role": ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role", "'system'"),
    "role of no template": ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "no tools here"),
    "picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.0.content",
        "type text",
    ),
    "half a tool call": ({"messages": [USER | {"tool_calls": [{}]}]}, "messages.0.tool_calls.0.function", "required"),
    "tool calls of a user": (
        {"messages": [USER | {"tool_calls": [{"function": {"name": "f"}}]}]},
        "messages.0",
        "only the assistant calls tools",
    ),
    "no content": ({"messages": [{"role": "user"}]}, "messages.0.content", "a string, or a list of parts"),
    "negative length": ({"messages": [USER], "max_tokens": -1}, "max_tokens", "greater than or equal to 1"),
    "no length": ({"messages": [USER], "max_completion_tokens": 0}, "max_completion_tokens", "greater"),
    "too long": ({"messages": [USER], "max_tokens": 395}, "messages", "6 tokens and the answer may have 395"),
    "long prompt": ({"messages": [USER | {"content": "x" * 500}]}, "messages", "505 tokens"),
    "huge n": ({"messages": [USER], "n": 10**12}, "n", "at most 8"),
    "n": ({"messages": [USER], "n": 0}, "n", "greater"),
    "huge integer": ({"messages": [USER], "seed": 10**30}, "seed", "less than"),
    "word": ({"messages": [USER], "temperature": "hot"}, "temperature", "number"),
    "truth": ({"messages": [USER], "n": True}, "n", "integer"),
    "not a number": (b'{"messages": [], "temperature": NaN}', None, "not JSON"),
    "tiny temperature": ({"messages": [USER], "temperature": 1e-30}, "temperature", "0 (greedy)"),
    "huge top_k": ({"messages": [USER], "top_k": 99999999999999999999}, "top_k", "less than or equal to 2147483647"),
    "top_k below all": ({"messages": [USER], "top_k": -2}, "top_k", "greater than or equal to -1"),
    "least and most": (
        {"messages": [USER], "max_tokens": 4, "min_tokens": 5},
        "min_tokens",
        "at most 4, which the answer may have; found 5",
    ),
    "least and room": ({"messages": [USER], "min_tokens": 10**30}, "min_tokens", "at most 394"),
    "top_p": ({"messages": [USER], "top_p": 0}, "top_p", "greater than 0"),
    "stop": ({"messages": [USER], "stop": ["a", ""]}, "stop", "list of strings"),
    "empty stop": ({"messages": [USER], "stop": ""}, "stop", "list of strings"),
    "alternatives": ({"messages": [USER], "logprobs": True, "top_logprobs": 3}, "top_logprobs", "sampled token"),
    "penalty": ({"messages": [USER], "frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
    "tools without a function": (
        {"messages": [USER], "tools": [{"type": "function"}]},
        "tools.0.function",
        "required",
    ),
    "tools that the template leaves out": (
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "add"}}]},
        "messages",
        "does not tell the model of the tool 'add'",
    ),
    "any tool that is to be called": (
        {"messages": [USER], "tool_choice": "required"},
        "tool_choice",
        "expected auto or none: no call can be promised; send auto",
    ),
    "a tool that is to be called": (
        {"messages": [USER], "tool_choice": {"type": "function", "function": {"name": "add"}}},
        "tool_choice",
        "tools with only the one that is meant, and ask again",
    ),
    "arguments that the template does not read": (
        {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
        "messages",
        "chat_template_kwargs: 'enable_thinking' is nothing that the chat template reads",
    ),
    "arguments that every template has": (
        {"messages": [USER], "chat_template_kwargs": {"tools": []}},
        "messages",
        "is given to every template already",
    ),
    "unknown": ({"messages": [USER], "temprature": 1}, "temprature", "no field"),
    "surrogate": (b'{"messages": [], "\\udc00": 1}', None, "not JSON"),
}


@pytest.mark.parametrize(("body", "param", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_answered_is_refused_by_name(serve, body, param, message):
    served = serve()
    answer = served.client.post("chat/completions", body)
    assert answer.status == 400, answer.body
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == param
    assert message in answer.error["message"]
    assert served.engine.seen == []


@pytest.mark.parametrize("prompt", [[], [[]], "", [["a"]], 5, {"a": 1}, [1, "a"], [257], [-1], [10**30], ["a", ""]])
def test_prompts_that_are_none_are_refused_and_leave_nothing_running(serve, prompt):
    client = serve().client
    answer = client.complete(prompt)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error"), answer.body
    client.wait_until(lambda health: health["num_running"] == 0)
    assert client.complete("x").status == 200


def test_a_key_is_asked_for_where_there_is_one(serve):
    client = serve(keys=("secret", "other")).client
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": "Bearer é"}):
        answer = client.get("/v1/models", **headers)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    for key in ("secret", "other"):
        assert client.get("/v1/models", Authorization=f"Bearer {key}").status == 200
    assert client.get("/health").status == 200


def test_without_a_key_pages_of_other_sites_cannot_call(serve):
    client = serve().client
    assert client.get("/v1/models", Host="evil.example").status == 403
    assert client.get("/v1/models", Host="[::1]:8000").status == 200
    answer = client.post("completions", {"prompt": "x"}, **{"Content-Type": "text/plain"})
    assert answer.status == 415


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_is_too_large_is_refused_however_it_is_sent(serve, is_chunked):
    client = serve(max_body_bytes=1000).client
    connection = client.connect()
    body = json.dumps({"prompt": "x" * 1000}).encode()
    parts = [body[i : i + 100] for i in range(0, len(body), 100)]
    connection.request(
        "POST",
        "/v1/completions",
        iter(parts) if is_chunked else body,
        {"Content-Type": "application/json"},
        encode_chunked=is_chunked,
    )
    response = connection.getresponse()
    assert response.status == 413
    assert "more than 1,000 bytes" in json.loads(response.read())["error"]["message"]
    assert client.complete("x").status == 200


@pytest.mark.parametrize("announced", [1001, 10**12, 10**30])
def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(serve, announced):
    client = serve(max_body_bytes=1000).client
    with socket.create_connection(("127.0.0.1", client.port)) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {announced}\r\n\r\n".encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 4")
    assert client.complete("x").status == 200


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_text_far_longer_than_so_many_tokens_is_refused_before_it_is_encoded(serve, tokenizer, path):
    encoded = []

    class Watched(type(tokenizer)):
        def _encode_plus(self, text, *args, **kwargs):
            encoded.append(len(text))
            return super()._encode_plus(text, *args, **kwargs)

    watched = Watched(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>")
    watched.chat_template = tokenizer.chat_template
    client = serve(tokenizer=watched).client

    def ask(text):
        asked = {"prompt": text} if path == "completions" else {"messages": [USER | {"content": text}]}
        return client.post(path, {**asked, "max_tokens": 4})

    around = 0 if path == "completions" else len("u:|a:")
    longest = 16 * 400 * len("<eos>") - around
    answer = ask("x" * (longest + 1))
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert answer.error["message"] == (
        "the prompt has 32001 characters, which is far too long: prompt and answer may have 400 tokens together"
    )
    assert encoded == []
    assert "the prompt has 32000 tokens" in ask("x" * longest).error["message"]
    assert len(encoded) == 1
    assert ask("x").status == 200


def test_a_message_that_the_template_leaves_out_is_refused_and_named(serve, tokenizer):
    forgetful = copy.copy(tokenizer)
    forgetful.chat_template = tokenizer.chat_template.replace("in messages", "in messages if message.role != 'system'")
    client = serve(tokenizer=forgetful).client
    asked = client.post("chat/completions", {"messages": [{"role": "system", "content": "Be brief."}, USER]})
    assert (asked.status, asked.error["param"]) == (400, "messages")
    assert "the chat template leaves out the text of message 0 (system), 'Be brief.'" in asked.error["message"]
    assert client.chat("x").status == 200


def test_a_slash_at_the_end_of_a_path_is_named_and_nobody_is_sent_elsewhere(serve):
    answer = serve().client.post("completions/", {"prompt": "x"})
    assert answer.status == 404
    assert answer.error["message"] == "POST /v1/completions/: Not Found; ask without the slash at the end"


def test_more_at_once_than_allowed_is_told_to_come_again(serve):
    served = serve(max_concurrency=4)
    served.engine.is_frozen = True
    waiting = served.client.begin("completions", {"prompt": "x", "n": 3})
    served.client.wait_until(lambda health: health["num_running"] == 3)
    answer = served.client.complete("x", n=2)
    assert (answer.status, answer.headers["retry-after"]) == (429, "1")
    assert "3 of at most 4 responses are under way" in answer.error["message"]
    served.engine.is_frozen = False
    assert waiting.getresponse().status == 200
    assert served.client.complete("x", n=2).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_takes_its_request_along(serve, stream):
    served = serve("hello" * 60)
    served.engine.is_frozen = True
    connection = served.client.begin("completions", {"prompt": "x", "n": 3, "stream": stream})
    served.client.wait_until(lambda health: health["num_running"] == 3)
    if stream:
        connection.getresponse()
    connection.sock.close() if connection.sock else None
    connection.close()
    served.client.wait_until(lambda health: health["num_running"] == 0)
    while len(served.engine.cancelled) < 3:
        time.sleep(0.005)


def test_a_client_that_does_not_read_holds_nobody_up(serve):
    served = serve("hello" * 60, max_concurrency=100)
    slow = [
        served.client.begin("completions", {"prompt": "x", "n": 8, "stream": True, "max_tokens": 300, "logprobs": 0})
        for _ in range(4)
    ]
    for _ in range(3):
        assert served.client.complete("x").json["choices"][0]["text"] == "hellohellohelloh"
    for connection in slow:
        assert connection.getresponse().read().endswith(b"data: [DONE]\n\n")


def test_a_client_that_never_reads_is_taken_for_gone(serve):
    served = serve("hello" * 70, deadlines=Deadlines(unread_s=0.5), send_buffer_bytes=4096, max_concurrency=64)
    asked = {"prompt": "x", "n": 64, "stream": True, "max_tokens": 300, "logprobs": 0, "return_token_ids": True}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", served.client.port))
        client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        served.client.wait_until(lambda health: health["num_running"] == 64)
        served.client.wait_until(lambda health: health["num_running"] == 0)
        assert served.client.complete("x").status == 200
        said = b"".join(iter(lambda: client.recv(65536), b""))
    assert said.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" not in said


def test_a_body_that_does_not_come_is_told_so(serve):
    client = serve(patience_s=0.5).client
    with socket.create_connection(("127.0.0.1", client.port)) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert b"408" in connection.recv(1000)
    assert client.complete("x").status == 200


def test_a_step_that_fails_costs_the_requests_under_way_and_the_next_one_is_answered(serve):
    served = serve()
    served.engine.is_frozen = True
    step, errors = served.engine.step, [OSError("burnt\nin a file of ours")]

    def failing_step() -> list[Output]:
        if len(served.engine.seen) == 3 and errors:
            raise errors.pop()
        return step()

    served.engine.step = failing_step
    waiting = served.client.begin("completions", {"prompt": "x", "n": 2})
    served.client.wait_until(lambda health: health["num_running"] == 2)
    others = served.client.complete("x")
    for status, body in ((others.status, others.body), ((whole := waiting.getresponse()).status, whole.read())):
        message = json.loads(body)["error"]["message"]
        assert (status, message) == (500, "the engine failed and its requests are lost: OSError: burnt")
    assert others.headers["x-should-retry"] == whole.headers["x-should-retry"] == "false"
    health = served.client.get("/health")
    assert (health.status, health.json["status"]) == (200, "ok")
    assert "are lost: OSError: burnt" in health.json["error"]
    served.engine.is_frozen = False
    assert served.client.complete("x").json["choices"][0]["text"] == "hello"
    assert served.engine.cancelled[:3] == [1, 2, 3]  # the thread's own request may end before it is cancelled
    health = served.client.get("/health")
    assert (health.status, health.json["error"]) == (200, None)


def test_an_engine_that_fails_again_is_an_error_of_everybody_and_no_empty_answer(serve):
    served = serve()
    served.engine.is_frozen = True
    bodies = [{"prompt": "x"}, {"prompt": "x", "stream": True}]
    whole, stream = (served.client.begin("completions", body) for body in bodies)
    served.client.wait_until(lambda health: health["num_running"] == 2)
    served.engine.error = OSError("burnt")
    response = whole.getresponse()
    assert response.status == 500
    error = json.loads(response.read())["error"]
    assert (error["type"], "burnt" in error["message"]) == ("server_error", True)
    text = stream.getresponse().read()
    assert b"burnt" in text
    assert b"[DONE]" not in text
    answer = served.client.complete("x")
    assert (answer.status, "is given up: OSError: burnt" in answer.error["message"]) == (500, True)
    health = served.client.get("/health")
    assert (health.status, health.json["status"]) == (503, "failed")


@pytest.mark.parametrize("error", [NotFiniteError("not finite"), GenerationError("a slice failed")], ids=str)
def test_one_response_that_fails_fails_its_request_only(serve, error):
    served = serve(lambda request: "hello")
    step = served.engine.step

    def failing_step() -> list[Output]:
        return [
            dataclasses.replace(output, finish_reason="failed", error=error) if output.request_id == 2 else output
            for output in step()
        ]

    served.engine.step = failing_step
    assert served.client.complete("x").status == 200
    answer = served.client.complete("x", n=3)
    assert (answer.status, answer.error["message"]) == (500, str(error))
    assert served.client.complete("x").status == 200
    assert served.client.get("/health").status == 200


def test_the_end_waits_for_what_is_under_way(serve):
    served = serve("hello" * 20)
    served.engine.is_frozen = True
    connection = served.client.begin("chat/completions", {"messages": [USER]})
    served.client.wait_until(lambda health: health["num_running"] == 1)
    ending = threading.Thread(target=served.server.stop, args=(served.thread.close,))
    ending.start()
    while accepts(served.client.port):
        time.sleep(0.005)
    served.engine.is_frozen = False
    assert json.loads(connection.getresponse().read())["choices"][0]["message"]["content"] == "hello" * 20
    ending.join()


def test_the_end_gives_up_what_does_not_end_in_time(serve):
    served = serve(grace_s=0.2)
    served.engine.is_frozen = True
    bodies = [{"prompt": "x"}, {"prompt": "x", "stream": True}]
    whole, stream = (served.client.begin("completions", body) for body in bodies)
    served.client.wait_until(lambda health: health["num_running"] == 2)
    served.server.stop(served.thread.close)
    response = whole.getresponse()
    assert (response.status, b"closed" in response.read()) == (500, True)
    assert b'"error"' in stream.getresponse().read()


def test_a_port_that_is_taken_is_named(serve):
    client = serve().client
    with pytest.raises(Exception, match=f"127.0.0.1:{client.port}: Address already in use"):
        bind("127.0.0.1", client.port)


def test_bytes_that_are_no_http_do_no_harm(serve):
    client = serve().client
    with socket.create_connection(("127.0.0.1", client.port)) as connection:
        connection.sendall(b"\x16\x03\x01\x00\xff\xfe\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    half = socket.create_connection(("127.0.0.1", client.port))
    half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Le")
    assert client.complete("x").status == 200
    half.close()
