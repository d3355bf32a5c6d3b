"""A served teacher: what vLLM's and SGLang's servers answer, slow, broken and wrong in turn."""

import asyncio
import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from rallypoint.config.sections.learning import ServedTeacherConfig
from rallypoint.errors import TeacherError
from rallypoint.roles.served_teacher import ServedTeacher
from rallypoint.types import Sequences

VOCABULARY = 12


def said_of(ids, place):
    """Return the logprobs, by id, of every token that might stand at a place of a row."""
    logits = torch.tensor([math.sin(1.0 + token * sum(ids[:place])) for token in range(VOCABULARY)])
    return logits.double().log_softmax(0).tolist()


def as_vllm(asked):
    ids, num = asked["prompt"], asked["prompt_logprobs"]
    places = [None]
    for place in range(1, len(ids)):
        said = said_of(ids, place)
        order = sorted(range(VOCABULARY), key=lambda token: -said[token])
        named = dict.fromkeys([ids[place], *order[:num]])
        places.append({str(one): {"logprob": said[one], "rank": order.index(one) + 1} for one in named})
    return {"choices": [{"text": "x", "prompt_logprobs": places}]}


def as_sglang(asked):
    ids, num = asked["input_ids"], asked["top_logprobs_num"]
    own, tops = [[None, ids[0], None]], [None]
    for place in range(1, len(ids)):
        said = said_of(ids, place)
        order = sorted(range(VOCABULARY), key=lambda token: -said[token])
        own.append([said[ids[place]], ids[place], None])
        tops.append([[said[one], one, None] for one in order[:num]])
    return {"meta_info": {"input_token_logprobs": own, "input_top_logprobs": tops if num else []}}


class Handler(BaseHTTPRequestHandler):
    """Answers as the server's `answer` says, after it has refused as often as it should."""

    def do_GET(self):
        self.reply(200, {"data": [{"id": name} for name in self.server.names]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.path, self.headers.get("Authorization"), asked))
            status = self.server.refusals.pop() if self.server.refusals else 200
        if self.server.together is not None:
            self.server.together.wait(60)
        self.reply(status, self.server.answer(asked) if status == 200 else {"error": "busy"})

    def reply(self, status, answer):
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.refusals, server.lock, server.together = [], [], threading.Lock(), None
    server.names, server.answer = ["big"], as_vllm
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.shutdown()
    server.server_close()


ROWS = Sequences(
    offsets=torch.tensor([0, 4, 7]),
    tokens=torch.tensor([1, 2, 7, 8, 3, 4, 4]),
    loss_mask=torch.tensor([False, False, True, True, False, False, True]),
    prompt_index=torch.tensor([0, 1]),
    sample_index=torch.tensor([0, 0]),
)
PLACES = {2: ([1, 2, 7, 8], 2), 3: ([1, 2, 7, 8], 3), 6: ([3, 4, 4], 2)}


def judge(url, top_k=None, **settings):
    teacher = ServedTeacher.open(url, ServedTeacherConfig(**{"retries": 0, "timeout_s": 60.0, **settings}))
    return asyncio.run(teacher.judge(ROWS, top_k))


@pytest.mark.parametrize(("path", "answer"), [("/v1", as_vllm), ("/generate", as_sglang)])
def test_trained_tokens_have_the_logprobs_that_the_server_says(server, path, answer):
    server.answer = answer
    wanted = torch.zeros(7)
    for at, (ids, place) in PLACES.items():
        wanted[at] = said_of(ids, place)[ids[place]]
    torch.testing.assert_close(judge(server.url + path), wanted)
    found = judge(server.url + path, top_k=3)
    assert found.shape == (7, 7)
    for at, (ids, place) in PLACES.items():
        most = torch.tensor(said_of(ids, place)).topk(3)
        torch.testing.assert_close(found[at], torch.cat([wanted[at : at + 1], most.values, most.indices.float()]))
    assert not found[[0, 1, 4, 5]].any(), "nothing is said of prompts"
    assert {asked[0] for asked in server.asked} == {"/v1/completions" if path == "/v1" else "/generate"}


def test_the_model_and_the_key_are_sent_and_rows_are_judged_at_once(server, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "secret")
    server.together = threading.Barrier(2)
    judge(server.url + "/v1", key="TEACHER_KEY", concurrency=2)
    _, authorization, asked = server.asked[0]
    assert authorization == "Bearer secret"
    expected = {"model": "big", "max_tokens": 1, "prompt_logprobs": 0, "add_special_tokens": False}
    assert {name: asked[name] for name in expected} == expected
    with pytest.raises(TeacherError, match=r"variable NO_SUCH_KEY of teacher.served.key is not set"):
        judge(server.url + "/v1", key="NO_SUCH_KEY")


def test_a_busy_server_is_asked_again(server):
    server.refusals = [503, 429]
    assert judge(server.url + "/v1", retries=2, concurrency=1)[2] < 0
    assert len(server.asked) == 4


def shorter(asked):
    answer = as_vllm(asked)
    answer["choices"][0]["prompt_logprobs"].pop()
    return answer


def other_tokens(asked):
    return as_vllm({**asked, "prompt": [(token + 1) % VOCABULARY for token in asked["prompt"]], "prompt_logprobs": 0})


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (shorter, r"expected logprobs of the \d tokens of a row, found \d; does the endpoint add tokens"),
        (
            other_tokens,
            r"expected the logprob of token \d, found 1 tokens: \[\d\]; its model may have another tokenizer",
        ),
        (lambda asked: as_vllm({**asked, "prompt_logprobs": 1}), r"expected the 3 likeliest tokens.*--max-logprobs"),
        (lambda _: {"choices": [{"text": "x"}]}, r"expected `prompt_logprobs` in the answer, as vLLM's server"),
        (lambda _: {"object": "error"}, r"the teacher gave no answer: .*KeyError: 'choices', 1 times"),
    ],
)
def test_a_wrong_answer_says_what_was_expected_and_found(server, answer, message):
    server.answer = answer
    with pytest.raises(TeacherError, match=message):
        judge(server.url + "/v1", top_k=3)


def test_an_endpoint_that_is_not_there_or_serves_several_models_is_refused_at_once(server):
    with pytest.raises(TeacherError, match=r"no teacher answers: http://127.0.0.1:9/v1: URLError: .*refused"):
        judge("http://127.0.0.1:9/v1")
    server.names = ["big", "small"]
    with pytest.raises(TeacherError, match=r"serves big, small; set teacher.served.model to one"):
        judge(server.url + "/v1")
    assert judge(server.url + "/v1", model="small").shape == (7,)
    server.refusals = [401]
    with pytest.raises(TeacherError, match=r"the teacher gave no answer: .*status 401"):
        judge(server.url + "/v1", model="small", retries=9)


def test_a_silent_server_holds_up_neither_the_end_of_a_run_nor_that_of_the_program(server):
    is_asked, answers = threading.Event(), threading.Event()

    def never(_):
        is_asked.set()
        answers.wait(60)
        return {}

    server.answer = never
    before = set(threading.enumerate())
    teacher = ServedTeacher.open(server.url + "/v1", ServedTeacherConfig(retries=9, concurrency=1))

    async def give_up():
        judged = asyncio.create_task(teacher.judge(ROWS, None))
        assert await asyncio.to_thread(is_asked.wait, 60)
        judged.cancel()
        await asyncio.wait([judged])
        return judged.cancelled()

    assert asyncio.run(give_up())
    asking = [thread for thread in {*threading.enumerate()} - before if thread.name.startswith("teacher_")]
    assert asking
    assert all(thread.daemon for thread in asking), "the interpreter waits for all others"
    teacher.close()
    with pytest.raises(TeacherError, match="the run has ended, and nobody asks again"):
        teacher.endpoint.sleep(3600.0)
    answers.set()
    for thread in asking:
        thread.join(60)
        assert not thread.is_alive(), "nine more attempts are not made"
    assert len(server.asked) == 1, "the second row was waiting"
