"""What the policy said of pairs before it was trained: computed once, told while that takes long, read back."""

import asyncio
import itertools
import json
from typing import Any, cast

import pytest
import torch
from full_disks import files_end_at
from heard import heard

from rallypoint.config import load_config
from rallypoint.data import (
    Conversations,
    RowStream,
    StreamedRows,
    encode_rows,
    load_conversations,
    make_digits_tokenizer,
)
from rallypoint.errors import DiskError
from rallypoint.roles.examples import ExampleSource
from rallypoint.roles.reference import InitialLogprobs

KEYS = ("model.create={}", "data.train=unread.jsonl", "data.num_examples=4", "trainer.num_epochs=null")


class SaysTokens:
    """An actor whose logprob of a token is its id; counts the rows that it was asked about."""

    def __init__(self):
        self.num_rows = 0

    async def logprobs(self, batch):
        self.num_rows += len(batch)
        return torch.where(batch.loss_mask, batch.tokens.double(), 0.0)


@pytest.fixture
def file(tmp_path):
    rows = [{"prompt": f"{n}", "chosen": f"{n + 1}", "rejected": f"{n}"} for n in range(10, 20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "pairs.jsonl"


def encoded(conversations, **options):
    tokenizer = make_digits_tokenizer()
    return encode_rows(tokenizer, conversations, stop_tokens=[0], max_row_tokens=99, **options)


def source_of(file, config, *, is_stream):
    if not is_stream:
        return ExampleSource(config, encoded(load_conversations([file], "pairs")), None)
    rows = RowStream.of_conversations([file], "pairs")
    options = {"num_rows": 6, "seed": 0, "shuffle": True, "keeps_all": True}
    stream = StreamedRows(
        rows, lambda read: encoded(Conversations.of(read), may_be_empty=True), lambda _: None, **options
    )
    return ExampleSource(config, stream, None)


@pytest.mark.parametrize("is_stream", [False, True])
def test_every_pair_is_judged_once_an_epoch_at_most_and_known_after_a_restart(file, tmp_path, is_stream):
    def made(num_steps):
        config, actor, told = load_config("dpo", [*KEYS, f"trainer.num_steps={num_steps}"]).config, SaysTokens(), []
        source, seconds = source_of(file, config, is_stream=is_stream), itertools.count(step=20.0)
        found = InitialLogprobs(config, cast(Any, actor), source, heard(told.append), lambda: next(seconds))
        return found, actor, source, told

    reference, actor, source, told = made(3)
    asyncio.run(reference.compute())
    asyncio.run(reference.compute())
    assert actor.num_rows == 2 * (12 if is_stream else 10)
    assert not told, "it took 20 seconds"
    for _ in range(3):
        batch, _ = source.next_batch()
        said = torch.zeros(len(batch), dtype=torch.float64)
        said.index_add_(0, batch.row_of_token, torch.where(batch.loss_mask, batch.tokens.double(), 0.0))
        assert torch.equal(reference.of(source.taken), said)
    (tmp_path / "training").mkdir()
    with files_end_at(10), pytest.raises(DiskError, match=r"initial.*cannot be written"):
        reference.save(tmp_path)
    reference.save(tmp_path)
    longer, actor, _, _ = made(5)
    asyncio.run(longer.restore(tmp_path))
    assert actor.num_rows == 2 * (8 if is_stream else 0)


def test_it_is_told_how_far_a_long_pass_is(file):
    config, told = load_config("dpo", [*KEYS, "trainer.num_steps=300"]).config, []
    seconds = itertools.count(step=20.0)
    source = source_of(file, config, is_stream=True)
    asyncio.run(
        InitialLogprobs(config, cast(Any, SaysTokens()), source, heard(told.append), lambda: next(seconds)).compute()
    )
    assert told == ["the reference has judged 1,024 of 1,200 pairs, before the first step"]
