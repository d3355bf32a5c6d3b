"""The games that ship: their rules, and the rows that ask for them."""

import asyncio

import pytest

from rallypoint.config import load_config
from rallypoint.data import DataSet, Example, Generator, Message, load_dataset
from rallypoint.environments.episodes import check_episode_spec
from rallypoint.environments.shipped.games import FrozenLake, Wordle, signs
from rallypoint.environments.steps import play
from rallypoint.errors import DataError
from rallypoint.prepare.own_functions import own_episode
from rallypoint.run.folder import anchored
from rallypoint.run.trust import code_named


class Says:
    """A client that says what it is told to."""

    def __init__(self, *answers: str) -> None:
        self._answers, self.heard, self.states = list(answers), [], []

    async def chat(self, messages=(), *, max_tokens=None, state=None):
        self.heard += [one["content"] for one in messages]
        self.states.append(state)
        return {"role": "assistant", "content": self._answers.pop(0)}


def played(kind, truth, *answers):
    example = Example("a:0", "a", (Message("user", "Play."),), "", truth, {})
    client = Says(*answers)
    return asyncio.run(play(kind, example, client)), client


def test_a_lake_is_crossed_around_its_holes_and_every_move_costs_a_little():
    found, client = played(FrozenLake, "P.O/.../O.G", "I go right.", "d", "left? No: RIGHT", "down")
    assert found == {"crossed": True, "reward": [-0.05, -0.05, -0.05, 1.0]}
    assert client.heard[0] == ".PO\n...\nO.G"
    assert client.states[:2] == ["P.O\n...\nO.G", ".PO\n...\nO.G"]
    fell, _ = played(FrozenLake, "P.O/.../O.G", "r", "r")
    assert fell == {"crossed": False, "reward": [-0.05, 0.0]}
    stays, client = played(FrozenLake, "P.O/.../O.G", *["hm", "up"] * 5)
    assert stays == {"crossed": False, "reward": [-0.05] * 10}
    assert set(client.heard) == {"P.O\n...\nO.G"}


def test_a_word_is_found_by_its_signs():
    found, client = played(Wordle, "these", "geese", "I say: theme", "these")
    assert found == {"found": True, "reward": [0.0, 0.0, pytest.approx(0.8)]}
    assert client.heard == ["geese --+++", "theme +++-+"]
    assert client.states[-1] == "geese --+++\ntheme +++-+\n"
    lost, client = played(Wordle, "these", *["no"] * 6)
    assert lost == {"found": False, "reward": [0.0] * 6}
    assert client.heard == ["expected a word of 5 letters"] * 5
    assert [signs(*pair) for pair in (("sheet", "these"), ("eeeee", "these"), ("abcde", "fghij"))] == [
        "?++??",
        "--+-+",
        "-----",
    ]


@pytest.mark.parametrize("game", ["frozen_lake", "wordle"])
def test_rows_of_a_game_follow_from_seed_and_index_and_can_be_won(game):
    def rows(seed):
        return load_dataset([DataSet(f"games:{game}", generator=Generator(seed, {"size": 40}))])

    one, again, other = rows(0), rows(0), rows(1)
    assert one.examples == again.examples
    assert [row.ground_truth for row in one] != [row.ground_truth for row in other]
    assert len({row.ground_truth for row in one}) > 20
    for row in one:
        if game == "wordle":
            assert len(row.ground_truth) == 5
            assert row.ground_truth not in row.prompt[0].content
        else:
            assert row.prompt[0].content.endswith(row.ground_truth.replace("/", "\n"))
            assert crossed(row.ground_truth)
    with pytest.raises(DataError, match="there is no such game; did you mean"):
        load_dataset([f"games:{game}s"])
    with pytest.raises(DataError, match="has no parameter 'holes'; it has size and seed"):
        load_dataset([DataSet(f"games:{game}", generator=Generator(0, {"holes": 3}))])


def crossed(lake):
    """Whether some way leads to the other side, by spreading from where the player is."""
    lines = lake.split("/")
    free = {(y, x): field for y, line in enumerate(lines) for x, field in enumerate(line) if field != "O"}
    reached = {place for place, field in free.items() if field == "P"}
    for _ in free:
        reached |= {(y, x) for y, x in free if reached & {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)}}
    return any(free[place] == "G" for place in reached)


def test_a_config_names_a_game_which_is_no_code_of_somebody_else():
    config = load_config("digits-grpo", ["rollout.episode=frozen_lake"]).config
    assert own_episode(config).__name__ == "FrozenLake"
    assert code_named(config) == {}
    assert anchored(config).rollout.episode == "frozen_lake"
    assert "did you mean 'frozen_lake'" in str(check_episode_spec("frozen_lak"))
