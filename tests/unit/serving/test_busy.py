"""A run in training that has no time says so, and when to come again."""

from rallypoint.errors import BusyError


class Busy:
    """An engine that is wanted by somebody else."""

    version, max_request_tokens, is_asleep, has_work = 3, 100, False, False

    def submit(self, request):
        raise BusyError("the model is being trained; try again")

    def cancel(self, request_id):
        raise AssertionError("there is nothing to give up")

    def step(self):
        return []


def test_a_request_without_time_is_503_with_the_time_to_wait(serve):
    answer = serve(engine=Busy()).client.complete()
    assert answer.status == 503
    assert answer.headers["retry-after"] == "5"
    assert answer.error == {
        "message": "the model is being trained; try again", "type": "server_error", "param": None, "code": None
    }  # fmt: skip
