"""Episodes that are a class with `reset` and `step`: how they are played, and what is refused."""

import asyncio
import threading

import pytest

from rallypoint.data import Example
from rallypoint.environments.episodes import find_misfit
from rallypoint.environments.steps import play
from rallypoint.errors import EpisodeError, RowFullError

EXAMPLE = Example("rows.jsonl:3", data_source="rows", prompt=(), ability="", ground_truth="3", extra_info={})
ASKED = [{"role": "user", "content": "Guess."}]


class Counts:
    """A client that answers 0, 1, 2 ..., and has room for so many answers."""

    def __init__(self, room: int = 99) -> None:
        self.heard, self._room, self.limits, self.states = [], room, [], []

    async def chat(self, messages=(), *, max_tokens=None, state=None):
        if len(self.heard) == self._room:
            raise RowFullError("no room")
        self.heard.append(messages)
        self.limits.append(max_tokens)
        self.states.append(state)
        return {"role": "assistant", "content": str(len(self.heard) - 1)}


class Guess:
    """Sync, as most games are."""

    last = None

    def __init__(self) -> None:
        self.threads, self.closed = {threading.get_ident()}, threading.Event()
        type(self).last = self

    def reset(self, example):
        self.threads.add(threading.get_ident())
        self.number = example.ground_truth
        return ASKED

    def step(self, message):
        self.threads.add(threading.get_ident())
        is_right = message["content"] == self.number
        return [{"role": "user", "content": "No."}], float(is_right), is_right, {"guesses": int(message["content"]) + 1}

    def close(self):
        self.closed.set()


class AsyncGuess(Guess):
    async def reset(self, example):
        return super().reset(example), {"info": "as gym has it"}

    async def step(self, message):
        messages, reward, done, metrics = super().step(message)
        return messages, reward, done, False, metrics

    async def close(self):
        super().close()


class InDicts(Guess):
    def step(self, message):
        return dict(zip(("messages", "reward", "done", "metrics"), super().step(message), strict=True))


def played(kind, client=None):
    return asyncio.run(play(kind, EXAMPLE, client or Counts()))


@pytest.mark.parametrize("kind", [Guess, AsyncGuess, InDicts])
def test_a_game_is_played_to_its_end_with_a_reward_for_each_turn(kind):
    client = Counts()
    assert find_misfit(kind) is None
    assert played(kind, client) == {"reward": [0.0, 0.0, 0.0, 1.0], "guesses": 4}
    assert client.heard == [ASKED, *[[{"role": "user", "content": "No."}]] * 3]
    assert kind.last.closed.wait(60)


def test_methods_that_may_block_run_in_one_thread_of_the_object_and_never_in_the_event_loops():
    played(Guess)
    assert len(Guess.last.threads) == 1
    assert threading.get_ident() not in Guess.last.threads


def test_a_game_that_has_no_room_left_ends_with_the_rewards_so_far():
    assert played(Guess, Counts(room=2)) == {"reward": [0.0, 0.0], "guesses": 2}
    with pytest.raises(RowFullError):
        played(Guess, Counts(room=0))
    assert Guess.last.closed.wait(60)


def returning(*steps, first=None):
    """Return a game whose steps are these."""
    left = list(steps)

    class Game:
        def reset(self, example):
            return first

        def step(self, message):
            return left.pop(0)

    return Game


@pytest.mark.parametrize(
    ("steps", "reward"),
    [
        ([ASKED, ([], None, True)], None),  # the reward function is to say it
        ([ASKED, (None, 1.0, True)], [0.0, 1.0]),
        ([ASKED[0], ([], 1.0, True, {})], [0.0, 1.0]),  # one message
        ([(ASKED[0], 0.5, False), {"messages": ASKED[0]}, ([], 1.0, True)], [0.5, 0.0, 1.0]),
        ([ASKED * 3, (ASKED, 0.5, False), {"done": True}], [0.0, 0.5, 0.0]),
        ([(ASKED, 0.25, False, True, {})], [0.25]),
    ],
)
def test_a_step_may_leave_out_its_reward(steps, reward):
    assert played(returning(*steps))["reward"] == reward


@pytest.mark.parametrize("first", [None, []])
def test_a_game_may_begin_with_the_messages_of_the_example(first):
    client = Counts()
    played(returning(([], 1.0, True), first=first), client)
    assert not client.heard[0]


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (None, "Game.step returned NoneType 'None' for a list of messages"),
        ("text", "Game.step returned str 'text'"),
        ([], "Game.step returned no message and is not done"),
        (([], 0.0, False), "Game.step returned no message and is not done"),
        ((ASKED, 0.5), "for a list of messages"),
        ((ASKED, 0.5, None), "Game.step returned None for done"),
        ((ASKED, 0.5, False, 7), "Game.step returned int for metrics"),
        ({"observations": ASKED}, "Game.step returned a dict with 'observations'"),
        ([{"content": "no role"}], "returned dict"),
    ],
)
def test_what_is_no_step_is_refused_with_what_is_expected(step, problem):
    with pytest.raises(EpisodeError, match=problem) as refused:
        played(returning(step))
    assert "expected" in str(refused.value)


def test_first_messages_are_checked_and_what_a_method_raises_is_raised():
    with pytest.raises(EpisodeError, match=r"Game\.reset returned str 'Guess\.'"):
        played(returning(first="Guess."))
    with pytest.raises(RuntimeError, match="StopIteration"):
        played(type("Raises", (Guess,), {"step": lambda self, message: next(iter(()))}))


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ({"reset": lambda self, example: None}, "found Game, which has no step"),
        ({"reset": lambda self: None, "step": lambda self, message: None}, "Game.reset takes"),
        (
            {"reset": lambda s, e: None, "step": lambda s, m: None, "__init__": lambda self, size: None},
            "made without arguments",
        ),
    ],
)
def test_a_class_that_is_no_episode_is_refused_before_the_run(names, problem):
    assert problem in find_misfit(type("Game", (), names))


def test_a_step_that_hangs_holds_up_neither_the_end_of_its_episode_nor_that_of_the_process():
    goes_on, began = threading.Event(), threading.Event()

    class Hangs(Guess):
        def step(self, message):
            began.set()
            goes_on.wait()

    async def give_up():
        playing = asyncio.create_task(play(Hangs, EXAMPLE, Counts()))
        while not began.is_set():
            await asyncio.sleep(0)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(give_up())
    assert all(each.daemon for each in threading.enumerate() if each.name == "episode Hangs")
    goes_on.set()


def test_a_game_says_how_long_its_next_answer_may_be():
    class Brief(Guess):
        max_tokens = 2

        def step(self, message):
            self.max_tokens += 1
            return super().step(message)

    client = Counts()
    asyncio.run(play(Brief, EXAMPLE, client))
    assert client.limits == [2, 3, 4, 5]


class Walk(Guess):
    """Says where it is."""

    def reset(self, example):
        self.state = 0
        return super().reset(example)

    def step(self, message):
        self.state += 1
        return super().step(message)


def test_a_game_may_say_in_which_state_each_turn_begins():
    for kind, states in ((Walk, ["0", "1", "2", "3"]), (Guess, [None] * 4)):
        client = Counts()
        asyncio.run(play(kind, EXAMPLE, client))
        assert client.states == states
