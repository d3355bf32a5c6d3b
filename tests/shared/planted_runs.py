"""Runs with a fault that is known, written by the writers of real runs: what a reader of runs has to find.

`hot`: a learning rate ten times too high from step 60; `straggler`: rank 2 samples four times as long; `empty`: a
reward that pays the empty answer; `impossible`: every other prompt is never solved; `agent`: a tool answers in the
middle, and a correction masks tokens; `broken`: in each step one sample has no score, one is truncated, and a group was
replaced; `sound`: none of these.
"""

import dataclasses
import random
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rallypoint.config import load_config, values_of
from rallypoint.data import Example, Message
from rallypoint.environments.conversation import RolloutInWords, TurnInWords
from rallypoint.environments.failures import RewardFailure
from rallypoint.environments.scored import Scored
from rallypoint.journal import (
    BatchTaken,
    GroupDropped,
    GroupScored,
    Journal,
    RoleLost,
    RolesRestarted,
    RolesStarted,
    RolloutFailed,
    RunBegan,
    RunEnded,
    StepDone,
    Validated,
)
from rallypoint.run.folder import create_run
from rallypoint.run.rollouts import RolloutFiles
from rallypoint.run.step_rollouts import StepRollouts
from rallypoint.types import ActorBatch, Metrics, RolloutBatch

TRACEBACK = "the reward function's traceback for train:0:\n  File rewards.py, line 7, in f"
RAISED = {"why": "raised", "reason": "ValueError: no tool"}
HOT_FROM, SLOW_RANK, NUM_RANKS = 60, 2, 4
HOSTILE = (
    "<script>window.hostile = 1</script>",
    "<img src=x onerror='window.hostile = 1'>",
    "</script></pre><svg onload=window.hostile=1>",
    "\x1b[31mred\x1b[0m \x07 \u202egnp.exe\u202c \u200b\ufeff",
    "é" * 3 + "👩‍👩‍👧‍👦 ﷽ Z̷̧͓a̶l̷g̵o̴",
    "0123456789" * 100_000,
)


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({one: at for at, one in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = byte_tokenizer()


def planted_run(folder: Path, kind="sound", *, num_steps=100, prompts=8, group=8, last=None, texts=(), name=None):
    """Write a run below a folder and return its path; without `last` of a run that was killed."""
    keys = {
        "model.path": "m",
        "data.train": "[d.jsonl]",
        "reward.function": "'rewards.py:f'",
        "trainer.num_steps": num_steps,
        "rollout.num_prompts": prompts,
        "rollout.group_size": group,
        "trainer.name": name or kind,
        "trainer.runs_dir": folder,
        "cluster.pools": f"{{main: [{NUM_RANKS}]}}",
    }
    if kind in ("broken", "impossible"):
        keys["kl"] = "null"  # so that nothing is learned from a row without an advantage
    if kind == "broken":
        keys |= {"rollout.mask_truncated": True, "rollout.dynamic_sampling": 4}
    if kind == "agent":
        keys["correction"] = "[{name: mask, low: 0.99, high: 1.01}]"
    loaded = load_config("grpo", [f"{key}={value}" for key, value in keys.items()])
    run = create_run(loaded)
    clock = SimpleNamespace(now=(began := float(round(time.time()))), began=began)
    run.model.mkdir(exist_ok=True)
    TOKENIZER.save(str(run.model / "tokenizer.json"))
    with Journal(run.journal, clock=lambda: clock.now) as journal:
        config = dict(values_of(loaded.config))
        began = RunBegan(first=0, config=config, software={"rallypoint": "0"}, machine="x", folder=str(run.path))
        processes = {"rollout": [f"{4700 + rank}@node{rank // 2}" for rank in range(NUM_RANKS)]}
        started = RolesStarted(
            step=0,
            metrics={"time_s/start": 3.0},
            processes=processes,
            planned_gib={"actor": 2.0, "rollout": 1.0},
        )
        journal.append(began, started)
        files = RolloutFiles(run.path, max_gib=8.0, first=0, journal=journal, num_free=lambda _: 2**40)
        for step in range(1, num_steps + 1):
            if kind == "broken" and step == 3:  # the first start was killed after step 2, and lost it
                clock.began = clock.now
                journal.append(dataclasses.replace(began, first=1), dataclasses.replace(started, step=1))
                _write_step(journal, files, clock, 2, _Fault(kind, 2, random.Random(2)), (prompts, group), texts)
                journal.append(RoleLost(role="rollout", rank=1, step=3, why="ActorDiedError: killed by a signal"))
                journal.append(
                    RolesRestarted(first=None, seconds=4.0, processes={"rollout": ["9001@node0"] * NUM_RANKS})
                )
            _write_step(journal, files, clock, step, _Fault(kind, step, random.Random(step)), (prompts, group), texts)
        if kind == "broken":
            (run.checkpoints / "step_000002.damaged").mkdir(parents=True)
        files.flush()
        files.close()
        if last is not None:
            journal.append(RunEnded(how=last))
    return run.path


class _Fault:
    def __init__(self, kind, step, chance):
        self.kind, self.step, self.chance = kind, step, chance
        self.hot = kind == "hot" and step >= HOT_FROM
        self.skill = 0.25 + 0.6 * min(1.0, step / 80)
        if self.hot:
            self.skill = max(0.02, self.skill - 0.08 * (step - HOT_FROM))

    def answer(self, prompt, texts):
        if self.kind == "empty" and self.chance.random() < min(1.0, self.step / 40):
            return "", 1.0
        if texts:
            return self.chance.choice(texts), float(self.chance.random() < self.skill)
        is_right = self.chance.random() < self.skill and not (self.kind == "impossible" and prompt % 2)
        right = prompt % 7 + prompt % 5
        return f"I add them up: {right if is_right else right + 1}", float(is_right)

    def metrics(self, scores, lengths, signal):
        noise = self.chance.random()
        return {
            "reward/mean": sum(scores) / len(scores),
            "reward/std": float(torch.tensor(scores).std(correction=0)),
            "reward/num_scored": float(len(scores)),
            "rollout/num_tokens": float(sum(lengths)),
            "rollout/response_length": sum(lengths) / len(lengths),
            "rollout/truncated": 0.0,
            "rollout/logprob_gap_mean": 0.004 + 0.001 * noise,
            "actor/loss": 0.01 * noise,
            "actor/lr": 1e-5 if self.hot else 1e-6,
            "actor/grad_norm": (4.0 if self.hot else 0.4) + 0.1 * noise,
            "actor/approx_kl": (0.3 if self.hot else 0.004) + 0.001 * noise,
            "actor/clip_fraction": (0.6 if self.hot else 0.08) + 0.02 * noise,
            "actor/entropy": 0.01 if self.kind == "empty" and self.step > 30 else 0.8 + 0.05 * noise,
            "actor/without_signal": signal,
            "actor/num_tokens": float(sum(lengths)),
            "actor/memory_gib": 1.5 + 0.1 * noise,
            "actor/mfu": 0.3,
            "rollout/idle": 0.1,
            "rollout/staleness_mean": 0.0,
        }


def _write_step(journal, files, clock, step, fault, shape, texts):
    prompts, group = shape
    began, answers, scores = clock.now, [], []
    busy = [2.0 + 0.2 * fault.chance.random() for _ in range(NUM_RANKS)]
    if fault.kind == "straggler":
        busy[SLOW_RANK] *= 4
    asked, groups = clock.now - clock.began, []
    for place in range(prompts):
        found = [fault.answer(place, texts) for _ in range(group)]
        answers += [text for text, _ in found]
        scores += [score for _, score in found]
        rank = place % NUM_RANKS
        groups.append(
            GroupScored(
                prompt=(step - 1) * prompts + place,
                rank=rank,
                admitted_s=asked,
                sampled_s=asked + busy[rank],
                scored_s=asked + busy[rank] + 0.1,
                turns=[(sample, 0, [(step - 1, 9)], "0") for sample in range(group)],
            )
        )
    if fault.kind == "broken":
        lost = {"prompt": (step - 1) * prompts, "sample": 99, "validation": None, "num_turns": 1, "num_tokens": 5}
        journal.append(RolloutFailed(**lost, **RAISED))
        journal.say(f"left out: 1 rollout failed (1 raised), the first is train:0, sample 99: no tool\n{TRACEBACK}")
    for scored in sorted(groups, key=lambda one: one.scored_s):
        clock.now = clock.began + scored.scored_s
        journal.append(scored)
    order = range((step - 1) * prompts, step * prompts)
    if fault.kind == "broken":
        journal.append(GroupDropped(prompt=order[-1], why="no signal"))
        journal.say(f"1 rollout has no score (1 raised), the first is train:0, sample 0: boom\n{TRACEBACK}")
        order = order[:-1]
    taken = clock.now - clock.began
    journal.append(
        BatchTaken(step=step, prompts=list(order), asked_s=asked, taken_s=taken, loaded_s=asked, busy_s=busy)
    )
    rows, signal = _rollouts(step, fault, shape, answers, scores)
    files.put(step, rows)
    clock.now += 1.5
    times = {"time_s/rollout": max(busy) + 0.1, "time_s/judge": 0.4, "time_s/learn": 0.9, "time_s/publish": 0.2}
    metrics = fault.metrics(scores, rows.rows.num_loss_tokens and _lengths(rows.rows), signal) | times
    if fault.kind == "broken":
        metrics |= {"reward/failed": 1.0, "reward/failed_raised": 1.0, "rollout/failed": 1.0}
    learn_s = clock.now - 1.1
    done = StepDone(
        step=step,
        metrics=metrics,
        digests={"tokens": f"{fault.kind if fault.hot else ''}{step}"},
        seconds=clock.now - began,
        began_s=began,
        begins={
            "rollout": 0.0,
            "judge": learn_s - 0.4 - began,
            "learn": learn_s - began,
            "publish": clock.now - 0.2 - began,
        },
        work={"actor": [[("train", learn_s, learn_s + 0.8, 0.8, 1)] for _ in range(NUM_RANKS)]},
    )
    journal.append(done)
    if step % 20 == 0:
        journal.append(Validated(step=step, metrics={"validation/score": fault.skill}))


def _lengths(batch):
    return (batch.offsets.diff() - 4).tolist()


def _rollouts(step, fault, shape, answers, scores):
    prompts, group = shape
    tokens = [[1, 2, 3, 4, *TOKENIZER.encode(text[:2000]).ids, 0] for text in answers]
    lengths = torch.tensor([len(one) for one in tokens])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    flat = torch.tensor([token for one in tokens for token in one])
    place = torch.arange(len(flat)) - offsets[:-1].repeat_interleave(lengths)
    mask, size = place >= 4, len(answers)
    if fault.kind == "agent":
        mask &= (place < 8) | (place >= 12)
    index = torch.arange(size)
    torch.manual_seed(step)
    sampled = -torch.rand(len(flat)) * mask
    fields = {
        "offsets": offsets,
        "tokens": flat,
        "loss_mask": mask,
        "prompt_index": (step - 1) * prompts + index // group,
        "sample_index": index % group,
    }
    rows = RolloutBatch(
        **fields,
        rollout_logprobs=sampled,
        versions=torch.full((size,), step - 1),
        truncated=torch.tensor([fault.kind == "broken" and row == 1 for row in range(size)]),
    )
    by_group = torch.tensor(scores).view(prompts, group)
    advantages = (by_group - by_group.mean(1, keepdim=True)) / (by_group.std(1, keepdim=True) + 1e-6)
    each = advantages.flatten().repeat_interleave(lengths) * mask
    drift = (0.3 if fault.hot else 0.01) * torch.randn(len(flat)) * mask
    entropies = (0.01 if fault.kind == "empty" and step > 30 else 0.8) * 2 * torch.rand(len(flat)) * mask
    old = {"rollout_logprobs": sampled, "old_logprobs": sampled + drift, "entropies": entropies}
    if fault.kind in ("broken", "impossible"):  # the update passes over the others alone, see `Actor.update`
        idle = ~advantages.flatten().bool().repeat_interleave(lengths)
        old |= {name: old[name].masked_fill(idle, torch.nan) for name in ("old_logprobs", "entropies")}
    learned = ActorBatch(**fields, **old, reference_logprobs=None, advantages=each)
    rewards = torch.zeros(len(flat)).index_add(0, offsets[1:] - 1, torch.tensor(scores))
    kept, failures, replaced = list(range(size)), [], frozenset()
    if fault.kind == "broken":
        replaced = frozenset({step * prompts - 1})
        kept = kept[1:]
        failures = [RewardFailure("train:0", 0, 0, "raised", "boom", "Traceback: boom")]
        learned = learned.rows(torch.arange(2, size - group))
    batch, extras = rows.scored(rewards).rows(torch.tensor(kept)), tuple({} for _ in kept)
    scored = Scored(batch, tuple(kept), tuple(failures), extras, tuple(None for _ in kept), Metrics())
    examples = [
        Example(f"train:{at}", "sums", (Message("user", f"What is {at % 7}+{at % 5}?"),), "", str(at % 7 + at % 5), {})
        for at in range(prompts)
        for _ in range(group)
    ]
    said = [_conversation(text) for text in answers] if fault.kind == "agent" else ()
    found = StepRollouts(rows, scored, examples, answers, learned=learned, replaced=replaced, conversations=said)
    found = dataclasses.replace(found, needs_advantage=fault.kind in ("broken", "impossible"))
    return found, float((by_group.std(1) == 0).double().mean())


def _conversation(text):
    asks = TurnInWords(parent=-1, said=(("user", text),), num_added=4, start=4, length=4, response=text[:4], limit=None)
    tool = (("tool", f"4, says {text}"),)
    ends = TurnInWords(parent=0, said=tool, num_added=4, start=12, length=9, response=text, limit=None)
    return RolloutInWords((asks, ends), {"moves": 2.0}, num_tool_calls=1, num_tool_errors=0, own_s=0.1)
