"""Every wrong config is refused at once: with the key, the value, and the way out."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from grids import thinned

from rallypoint.config import load_config
from rallypoint.errors import ConfigError
from rallypoint.prepare.preflight import load_checked

OWN = ("model.create=null", "model.path=model", "data.generate=null", "data.train=good.jsonl")
OWN = (*OWN, "reward.function=rewards.py:compute_score")

AHEAD = "rollout.max_staleness=1 cluster.pools={main:[1],sampling:[1]} rollout.placement.pool=sampling"

DATA = "data.generate=null reward.function=rewards.py:compute_score"


WRONG: dict[str, tuple[str, tuple[str, ...]]] = {
    # Unknown keys, at every level: the nearest right one is named.
    "unknown: section": ("actr.num_epochs=2", ("actr={num_epochs: 2}", "did you mean actor.num_epochs?")),
    "unknown: section in a section": ("actor.optimiser.lr=1", ("{lr: 1}", "did you mean actor.optimizer.lr?")),
    "unknown: leaf": ("rollout.temprature=0.9", ("rollout.temprature=0.9", "did you mean rollout.temperature?")),
    "unknown: deep leaf": ("actor.optimizer.beta_1=0.9", ("beta_1=0.9", "did you mean actor.optimizer.betas?")),
    "unknown: in a section that may be off": ("kl.coeff=1", ("kl.coeff=1", "did you mean kl.coef?")),
    "unknown: right name without its section": ("lr=1e-3", ("lr=0.001", "actor.optimizer.lr or critic.optimizer.lr")),
    "unknown: half a name": ("optimizer.lr=1e-3", ("optimizer={lr: 0.001}", "did you mean actor.optimizer.lr")),
    "unknown: near name without its section": ("epochs=3", ("epochs=3", "did you mean actor.num_epochs")),
    "unknown: a word of the field": ("gamma=0.9", ("gamma=0.9", "did you mean advantage.discount=0.9?")),
    "unknown: the algorithm": ("algorithm=grpo", ("algorithm='grpo'", "did you mean recipe=grpo?")),
    "unknown: what follows": (
        "actor.mesh.dp_replicate=2",
        ("what the others leave", "by dp_shard x ep x cp x sp x tp"),
    ),
    "unknown: nothing near": ("foo.bar=1", ("foo={bar: 1}", "the top level has the keys recipe, seed")),
    # Wrong types.
    "type: text for a number": ("actor.optimizer.lr=fast", ("lr='fast'", "a number above 0, at most 1")),
    "type: fraction for a count": ("trainer.num_steps=1.5", ("num_steps=1.5", "whole number of at least 1 (steps)")),
    "type: float for a count": ("trainer.num_steps=1e2", ("num_steps=100.0", "did you mean 100?")),
    "type: octal": ("trainer.num_steps=010", ("num_steps='010'", "a whole number of at least 1")),
    "type: clock": ("trainer.num_steps=1:30", ("num_steps='1:30'", "a whole number of at least 1")),
    "type: true for a number": ("seed=true", ("seed=true", "a whole number from 0 to 2147483647")),
    "type: number for true": ("data.shuffle=1", ("data.shuffle=1", "expected true or false")),
    "type: number for text": ("trainer.name=5", ("trainer.name=5", 'with quotes it is text: "5"')),
    "type: null for a number": (
        "seed=null rollout.top_p=null trainer.runs_dir=null",
        (
            "it cannot be unset; its default is seed=0, expected a whole number",
            "default is rollout.top_p=1.0",
            "its default is trainer.runs_dir='runs'",
        ),
    ),
    "type: list for a number": ("seed=[1]", ("seed=[1]", "a whole number")),
    "type: section for a number": ("seed.x=1", ("seed={x: 1}", "a whole number")),
    "type: number for a section": ("actor=3", ("actor=3", "a section with the keys num_epochs")),
    "type: true for a section": ("kl=true", ("kl=true", "{} switches it on")),
    "type: number for paths": (
        "data.train=3",
        ("data.train=3", "text, or a list of texts and of objects with the keys path, weight"),
    ),
    "type: pools": ("cluster.pools.main=2", ("cluster.pools.main=2", "such as {main: [2]}")),
    "type: processes": ("cluster.pools.main=[a]", ("cluster.pools.main=['a'] (command line)", "{main: [2]}")),
    "type: object of python": ("seed=!!python/object:os.system", ("seed (command line)", "python/object:os.system")),
    "type: number for two": ("actor.optimizer.betas=0.9", ("betas=0.9", "such as [0.9, 0.95]")),
    "type: one of two": ("actor.optimizer.betas=[0.9]", ("betas=[0.9]", "2 numbers, each from 0 to 0.99999")),
    "type: text in a list": ("actor.optimizer.betas=[0.9,high]", ("betas=[0.9, 'high']", "2 numbers")),
    # Sampling ahead.
    "staleness: no room": (
        "rollout.max_staleness=1",
        ("pool 'main' has actor, reference, critic, too", "'cluster.pools={main: [1], sampling: [1]}' rollout.placeme"),
    ),
    "staleness: no correction": (
        "rollout.max_staleness=1 loss.name=gspo",
        ("rollouts of older weights", "loss.name=gspo", "loss.name=decoupled", "correction=[{name: tis, cap: 2.0}]"),
    ),
    "staleness: a mask that masks nothing": (
        'rollout.max_staleness=1 loss.name=clip correction=[{"name":"mask","level":"token","low":0,"high":1e9}]',
        ("correction leaves everything as it is (mask of up to 1e+09, where a bound is at most 100)", "cap: 2.0}]'"),
    ),
    "staleness: a mask of rows that masks nothing": (
        'rollout.max_staleness=1 loss.name=clip correction=[{"name":"kl_mask","max_kl":1e4}]',
        ("correction leaves everything as it is (kl_mask of up to", "correction=[{name: tis, cap: 2.0}]"),
    ),
    "staleness: a weight without a bound": (
        'rollout.max_staleness=1 loss.name=clip correction=[{"name":"tis","cap":1e9}]',
        ("correction leaves everything as it is (tis of up to 1e+09", "correction=[{name: tis, cap: 2.0}]"),
    ),
    "staleness: a KL and a mask": (
        'kl.coef=0.1 kl.placement=loss rollout.max_staleness=1 loss.name=clip correction=[{"name":"mask"}]',
        ("with kl.placement=loss their gradient is not that of a divergence", "cap: 2.0}]', loss.name=decoupled"),
    ),
    "staleness: a loss of any weight": (
        "rollout.max_staleness=4 loss.name=importance_sampling loss.anchor=rollout",
        ("loss.name=importance_sampling lets a token weigh anything", "loss.name=decoupled", "{name: mask, high: 10"),
    ),
    "staleness: the usual loss without its bound": (
        "rollout.max_staleness=1 loss.max_weight=null",
        ("loss.max_weight=null lets a token weigh anything", "a bound of at most 100: loss.max_weight=5, or a mask"),
    ),
    "staleness: a bound that bounds nothing": (
        "rollout.max_staleness=1 loss.name=dppo loss.max_ratio=1e9",
        ("loss.max_ratio=1e+09 lets a token weigh anything", "loss.max_ratio=20"),
    ),
    "staleness: a teacher and older samplers": (
        "recipe=opd teacher.path=t teacher.loss=reverse rollout.max_staleness=4",
        ("with teacher.loss=reverse their gradient is not that of a divergence", "correction=[{name: tis, cap: 2.0}]'"),
    ),
    "staleness: a teacher and a mask": (
        'recipe=opd teacher.path=t teacher.loss=mixed rollout.max_staleness=4 correction=[{"name":"mask"}]',
        (
            "with teacher.loss=mixed their gradient is not that of a divergence",
            "teacher.loss=policy_gradient, or a teac",
        ),
    ),
    "staleness: a teacher, rewards and their loss": (
        "recipe=opd teacher.path=t teacher.loss=forward teacher.reward_coef=1 rollout.max_staleness=1",
        ("'correction=[{name: tis, cap: 2.0}]' loss.name=clip, teacher.loss=policy_gradient",),
    ),
    "fit: a correction of nothing sampled": (
        'recipe=opd teacher.path=t teacher.loss=reverse teacher.top_k=4 correction=[{"name":"tis"}]',
        ("correction has no effect with teacher.loss=reverse and teacher.top_k=4", "leave it out"),
    ),
    "staleness: a window that leaves no room": (
        "rollout.max_staleness=1 rollout.window=200",
        ("rollout.window=200", "expected at most 9 with rollout.max_staleness=1, or rollout.max_staleness=25"),
    ),
    "staleness: a schedule of nothing": (
        "rollout.schedule=schedule.jsonl",
        ("rollout.max_staleness=0 samples and trains in turns", "leave it out"),
    ),
    "staleness: nothing under way that could be kept": (
        "rollout.on_load=keep",
        ("rollout.on_load='keep' has no effect: with rollout.max_staleness=0", "leave it out, or set rollout.max_stal"),
    ),
    "staleness: an engine that has nothing to keep": (
        "rollout.max_staleness=1 rollout.engine=hf rollout.on_load=keep",
        ("rollout.on_load='keep' has no effect: rollout.engine='hf' keeps", "leave it out, or use rollout.engine=nati"),
    ),
    "staleness: an endpoint that hardly answers": (
        "rollout.max_staleness=1 rollout.serve=0",
        ("sampled while training samples nothing", "expected null, or rollout.max_staleness=0"),
    ),
    "staleness: an engine that computes again": (
        "rollout.engine=vllm rollout.on_load=keep",
        ("rollout.on_load='keep' is for our own engine", "leave it at recompute"),
    ),
    # Shaping.
    "overlong: never reached": (
        "reward.overlong.max_tokens=20480",
        ("max_tokens=20480 is never reached", "rollout.max_response_tokens=8", "or null"),
    ),
    "overlong: longer than a response": (
        "reward.overlong.buffer_tokens=4096",
        ("buffer_tokens=4096 begins before the response does", "at most 8, usually a fifth"),
    ),
    "dynamic sampling: with a reward model": (
        "recipe=grpo rollout.dynamic_sampling=5 reward.path=judge",
        ("dynamic_sampling=5 does not go with this reward.path", "expected null"),
    ),
    "staleness: a schedule that is not there": (
        f"{AHEAD} rollout.schedule=/nonexistent",
        ("rollout.schedule='/nonexistent' cannot be read (no such file)", "expected journal.jsonl of a run that"),
    ),
    "staleness: a schedule of another seed": (
        f"{AHEAD} rollout.schedule=schedule.jsonl",
        ("rollout.schedule='schedule.jsonl' is of a run with seed=7 (here 0); expected the same",),
    ),
    "over-sampling: nothing beside": (
        "rollout.over_sampling=8 rollout.num_prompts=8",
        ("rollout.over_sampling=8 leaves nothing over beside rollout.num_prompts=8", "such as 10, or null"),
    ),
    "over-sampling: ahead": (
        "rollout.over_sampling=48 rollout.num_prompts=8 rollout.max_staleness=1",
        ("rollout.over_sampling=48 does not go with rollout.max_staleness=1", "rollout.window; expected"),
    ),
    "mask: groups of one": (
        "recipe=grpo rollout.dynamic_sampling=0 rollout.group_size=1 advantage.name=reinforce_plus_plus",
        ("dynamic_sampling=0 with rollout.group_size=1", "usually 8"),
    ),
    "mask: a teacher judges them": (
        "recipe=opd teacher.path=t rollout.dynamic_sampling=0 rollout.mask_truncated=true",
        ("rollout.dynamic_sampling=0: a teacher judges groups of equal scores, too", "rollout.mask_truncated"),
    ),
    "warmup: of the whole run": (
        "critic.warmup_steps=20",
        ("critic.warmup_steps=20 of trainer.num_steps=20", "expected less than 20"),
    ),
    # Out of range.
    "range: one of two": ("actor.optimizer.betas=[0.9,1]", ("betas=[0.9, 1]", "each from 0 to 0.99999")),
    "range: below": ("actor.num_epochs=0", ("actor.num_epochs=0", "from 1 to 100")),
    "range: above": ("actor.num_epochs=101", ("actor.num_epochs=101", "from 1 to 100")),
    "range: must be above": ("actor.optimizer.lr=0", ("actor.optimizer.lr=0", "above 0, at most 1")),
    "range: nan": ("actor.optimizer.lr=.nan", ("actor.optimizer.lr=nan", "above 0")),
    "range: infinite": ("critic.clip=.inf", ("critic.clip=inf", "a number above 0 or null")),
    "range: unit": ("cluster.object_store_gib=0", ("object_store_gib=0", "from 0.1 to 1024 (GiB)")),
    "range: dual clip": ("loss.dual_clip=0.5", ("loss.dual_clip=0.5", "above 1 or null")),
    # Words that are none.
    "word: algorithm": (
        "recipe=pppo",
        ("recipe='pppo'", "one of ppo, grpo, sft, reward_model, dpo, opd; did you mean ppo?"),
    ),
    "word: runtime": ("cluster.runtime=slurm", ("cluster.runtime='slurm'", "one of ray, inline")),
    "word: dtype": ("model.dtype=bfloat", ("model.dtype='bfloat'", "did you mean bfloat16?")),
    # Keys that do not fit together.
    "fit: ranks and bundles": ("actor.placement.num_ranks=3", ("num_ranks=3", "cluster.pools.main=[2] makes 2")),
    "fit: vllm's heads": (
        "rollout.engine=vllm model.create.num_heads=4 model.create.num_key_value_heads=4",
        ("heads are 16 wide, and vLLM on processors knows 32, 64", "model.create.num_heads=2"),
    ),
    "fit: vllm and wide adapters": ("rollout.engine=vllm model.lora.rank=513", ("rank=513", "at most 512")),
    "fit: vllm and the way of adapters": (
        "rollout.engine=vllm model.lora.rank=8 rollout.weights=broadcast",
        ("rollout.weights='broadcast'", "adapters take the way `folder`; leave it at auto"),
    ),
    "fit: 8 bits and another engine": (
        "rollout.quantization=fp8",
        (
            "rollout.quantization=fp8: rollout.engine='native' samples from weights as they are trained",
            "rollout.quantization=fp8: GPUs compute in 8 bits, and cluster.device=cpu does not",
            "and model.dtype=float32; expected bfloat16",
            "each token has to be weighed back to its sampler; expected 'correction=[{name: tis, cap: 2.0}]'",
        ),
    ),
    "fit: 8 bits and weights by row": (
        'rollout.quantization=fp8 rollout.engine=vllm correction=[{"name":"tis","level":"sequence"}]',
        ("expected 'correction=[{name: tis, cap: 2.0}]'",),
    ),
    "fit: vllm and exact": ("rollout.engine=vllm rollout.exact=true", ("rollout.exact=true", "rollout.engine=native")),
    "range: temperature that overflows": ("rollout.temperature=1e-300", ("temperature=1e-300", "from 0.001 to 10")),
    "fit: validation almost greedy": (
        "validation.temperature=1e-300",
        ("1e-300: expected 0 (greedy) or",),
    ),
    "fit: shortest and longest response": (
        "rollout.min_response_tokens=9 rollout.max_response_tokens=8",
        ("rollout.min_response_tokens=9 is more than rollout.max_response_tokens=8", "at most that"),
    ),
    "fit: an empty stop text": ("rollout.stop=['.','']", ("rollout.stop=['.', ''] has an empty text", "leave it out")),
    "fit: one token to choose from": (
        "rollout.top_k=1",
        ("rollout.top_k=1 makes the 4 rollouts", "at least 2, or null"),
    ),
    "fit: a way of weights that stay where they are": (
        "rollout.weights=memory",
        ("rollout.weights='memory' has no effect", "leave it at auto"),
    ),
    "fit: device memory without a device": (
        "cluster.pools={main:[1],second:[1]} rollout.placement.pool=second rollout.weights=ipc",
        ("rollout.weights='ipc' shares the memory of accelerators", "expected auto or memory"),
    ),
    "fit: memory of two nodes": (
        "cluster.pools={main:[1],second:[1,1]} rollout.placement.pool=second rollout.weights=memory",
        ("cluster.pools.second=[1, 1] has 2", "expected auto, broadcast or folder"),
    ),
    "range: beyond 64 bits": ("rollout.top_k=99999999999999999999", ("top_k=999", "1 to 2147483647 or null")),
    "range: no token to choose from": ("rollout.top_p=0", ("rollout.top_p=0", "above 0, at most 1")),
    "type: number for a stop text": ("rollout.stop=[3]", ("rollout.stop=[3]", "text or a list of texts")),
    "fit: heads and tensor-parallel ranks": (
        "cluster.pools.main=[6] actor.mesh.tp=3",
        ("actor.mesh.tp=3 does not divide 4 attention heads, 2 key/value heads and 256 columns", "choose 1 or 2"),
    ),
    "fit: ranks that sample together, and have whole models": (
        "cluster.pools.main=[2] rollout.engine=hf actor.mesh.tp=2 rollout.mesh.tp=2",
        ("rollout.mesh.tp=2: rollout.engine='hf' has a whole model in every process", "rollout.engine=native or vllm"),
    ),
    "fit: heads and ranks that sample together": (
        "cluster.pools.main=[4] rollout.mesh.tp=4",
        ("rollout.mesh.tp=4 does not divide 2 key/value heads; choose 1 or 2",),
    ),
    "fit: ranks that sample together, and whole weights": (
        "cluster.pools.main=[2] rollout.mesh.tp=2 rollout.weights=memory",
        ("rollout.weights='memory' carries whole weights", "expected auto or folder"),
    ),
    "fit: ranks that sample together, of which one is missing": (
        "cluster.pools.main=[2] actor.mesh.tp=2 rollout.mesh.tp=2 rollout.placement.num_ranks=1",
        ("rollout.mesh: tp=2 makes 2 ranks, but the role has 1", "or rollout.placement.num_ranks=2"),
    ),
    "fit: ranks that sample together, bit by bit": (
        "cluster.pools.main=[2] actor.mesh.tp=2 rollout.mesh.tp=2 rollout.exact=true",
        ("rollout.exact=true with rollout.mesh.tp=2", "expected rollout.exact=false, or rollout.mesh.tp=1"),
    ),
    "fit: a server over more processes than there are": (
        "cluster.pools.main=[1] rollout.engine=vllm rollout.mesh.tp=2",
        ("rollout.mesh: tp=2 makes 2 ranks, but the role has 1 (in pool 'main')", "cluster.pools.main=[2]"),
    ),
    "fit: a server over processes of two nodes": (
        "cluster.pools.main=[3,1] rollout.engine=vllm rollout.mesh.tp=2",
        ("rollout.mesh.tp=2 does not divide cluster.pools.main=[3, 1]", "expected a multiple of 2 on each node"),
    ),
    "fit: a server over parts of devices": (
        "cluster.pools.main=[2] rollout.engine=vllm rollout.mesh.tp=2 cluster.device=cuda "
        "cluster.num_gpus_per_process=0.6",
        ("rollout.mesh.tp=2 with cluster.num_gpus_per_process=0.6; expected 1", "has 2 whole devices"),
    ),
    "fit: heads and the devices of a server": (
        "cluster.pools={main:[1],second:[1]} rollout.placement.pool=second rollout.engine=vllm rollout.mesh.tp=3",
        ("rollout.mesh.tp=3 does not divide 4 attention heads and 256 columns of the MLP; choose 1, 2 or 4",),
    ),
    "fit: heads and sequence parallelism": (
        "cluster.pools.main=[6] actor.mesh.sp=3",
        ("actor.mesh.sp=3 does not divide 4 attention heads of a tp rank", "1, 2 or 4, or actor.mesh.cp, which may be"),
    ),
    "fit: heads of linear attention and sequence parallelism": (
        "model.create=null model.path=hybrid cluster.pools.main=[4] actor.mesh.sp=4",
        ("actor.mesh.sp=4 does not divide 2 key heads of linear attention", "choose 1 or 2"),
    ),
    "fit: heads of linear attention and context parallelism": (
        "model.create=null model.path=hybrid cluster.pools.main=[4] actor.mesh.cp=2 actor.mesh.sp=2",
        ("actor.mesh.cp x sp=4 does not divide 2 key heads of linear attention", "choose 1 or 2"),
    ),
    "fit: linear attention and exact rollouts": (
        "model.create=null model.path=hybrid rollout.exact=true",
        ("rollout.exact=true: models of type 'qwen3_5_text' have linear attention", "leave it at false"),
    ),
    "fit: a family without a plan and tensor parallelism": (
        "model.create=null model.path=cohere actor.mesh.tp=2",
        (
            "actor.mesh.tp=2: models of type 'cohere' cannot be shared",
            "those of type deepseek_v3, gemma, gemma2,",
            "qwen3_next can",
        ),
    ),
    "fit: experts and tensor-parallel ranks": (
        "model.create=null model.path=mixture reference.mesh.tp=2",
        ("reference.mesh.tp=2 does not divide 9 experts; choose 1",),
    ),
    "fit: experts and ranks that share them": (
        "model.create=null model.path=mixture actor.mesh.ep=2",
        ("actor.mesh.ep=2 does not divide 9 experts of a tp rank; choose 1, 3 or 9",),
    ),
    "fit: a model without experts": (
        "actor.mesh.ep=2",
        (
            "actor.mesh.ep=2: models of type 'llama' have no experts",
            "qwen3_moe, qwen3_next have. Use actor.mesh.dp_shard or",
        ),
    ),
    "fit: an engine that does not say which experts it chose": (
        "model.create.architecture=qwen3_moe rollout.router_replay=true rollout.engine=hf",
        ("rollout.engine='hf' does not say which experts it chose; expected rollout.engine=native or vllm",),
    ),
    "fit: experts of the newest weights": (
        "model.create.architecture=qwen3_moe rollout.router_replay=true rollout.engine=vllm rollout.max_staleness=1",
        ("rollout.engine='vllm' says the experts of the newest for all tokens", "expected rollout.engine=native"),
    ),
    "fit: a server that has other weights than were published": (
        "model.create.architecture=gpt_oss rollout.engine=vllm",
        ("experts of models of type 'gpt_oss' are others in vLLM 0.32 on processors", "use rollout.engine=native"),
    ),
    "fit: no experts to choose again, or to balance": (
        "rollout.router_replay=true actor.router_aux_loss_coef=0.01",
        (
            "rollout.router_replay=true: models of type 'llama' have no experts",
            "actor.router_aux_loss_coef=0.01: models of type 'llama' have no experts",
            "qwen3_moe, qwen3_next have. Leave it out",
        ),
    ),
    "fit: heads that share keys and values, which are made of latents": (
        "model.create.architecture=deepseek_v3 model.create.num_key_value_heads=2",
        ("=2 is not, where every head has its own, model.create.num_heads=4; expected one of 4",),
    ),
    "fit: no biases to move, and routers that stay as they are": (
        "model.create.architecture=qwen3_moe actor.router_bias_update_rate=0.001 model.lora={}",
        (
            "actor.router_bias_update_rate=0.001: routers of models of type 'qwen3_moe' have no bias; those of type ",
            "have. Leave it out; actor.router_aux_loss_coef balances the experts of any mixture",
            "actor.router_bias_update_rate=0.001 contradicts model.lora, with which routers stay as they are",
        ),
    ),
    "fit: mesh and ranks": (
        "actor.mesh.tp=3",
        ("actor.mesh: tp=3 makes 3 ranks, but the role has 2", "whose product divides 2"),
    ),
    "fit: mesh and pool": (
        "cluster.pools.main=[2] actor.mesh.sp=2 actor.mesh.tp=2",
        ("whose product divides 2, or a pool of as many, such as cluster.pools.main=[4] (",),
    ),
    "fit: one rank and tp": ("actor.placement.num_ranks=1 actor.mesh.tp=2", ("1, or actor.placement.num_ranks=2 (",)),
    "fit: mesh and ranks of a smaller pool": (
        "cluster.pools.main=[2] actor.placement.num_ranks=1 actor.mesh.sp=2 actor.mesh.tp=2",
        ("such as cluster.pools.main=[4] with actor.placement.num_ranks=4 (",),
    ),
    "fit: shards and threads": (
        "actor.mesh.dp_shard=2 cluster.runtime=inline",
        ("actor.mesh.dp_shard=2 needs a process for every rank", "use cluster.runtime=ray"),
    ),
    "fit: pool": ("critic.placement.pool=gpus", ("pool='gpus'", "expected one of main")),
    "fit: pool of nobody": ("cluster.pools.mian=[4]", ("cluster.pools.mian=[4]", "no role is placed on it")),
    "fit: empty node": ("cluster.pools.main=[2,0]", ("cluster.pools.main=[2, 0]", "at least 1 for each node")),
    "cluster: not an address": ("cluster.address=head", ("cluster.address='head'", "expected auto, or the host:port")),
    "cluster: a client address": ("cluster.address=ray://a:10001", ("cluster.address='ray://a:10001'", "host:port")),
    "cluster: inline joins nothing": (
        "cluster.address=auto cluster.runtime=inline",
        ("cluster.address='auto' contradicts cluster.runtime=inline",),
    ),
    "cluster: inline has no ray": (
        "cluster.rendezvous=ray cluster.runtime=inline",
        ("cluster.rendezvous=ray contradicts cluster.runtime=inline", "leave it at auto"),
    ),
    "sleep where it is": (
        "engine.sleep=true",
        ("engine.sleep=true has nothing to gain with cluster.device=cpu", "leave it at false"),
    ),
    "sleep alone": (
        "cluster.device=cuda engine.sleep=true recipe=grpo kl=null cluster.pools.b=[2] actor.placement.pool=b",
        ("every role has a pool of its own",),
    ),
    "offload to where it is": (
        "engine.activations=offload",
        ("engine.activations='offload' has nothing to gain with cluster.device=cpu", "checkpoint or keep"),
    ),
    "offload the optimizer to where it is": (
        "engine.offload=optimizer",
        ("engine.offload='optimizer' has nothing to gain with cluster.device=cpu", "expected nothing"),
    ),
    "offload what a rank has a part of": (
        "cluster.device=cuda engine.offload=optimizer_and_gradients cluster.pools.main=[2] actor.mesh.dp_shard=2",
        ("engine.offload='optimizer_and_gradients' with actor.mesh.dp_shard=2", "expected optimizer, or actor.mesh"),
    ),
    "cluster: etcd where": ("cluster.rendezvous=etcd", ("cluster.rendezvous='etcd'", "URL of an etcd server")),
    "cluster: labels": ("cluster.labels=[west]", ("cluster.labels", "such as {zone: west}")),
    "cluster: one and a half GPUs": (
        "cluster.device=cuda cluster.num_gpus_per_process=1.5",
        ("cluster.num_gpus_per_process=1.5", "a fraction below 1"),
    ),
    "cluster: several ranks of a role on one GPU": (
        "cluster.device=cuda cluster.num_gpus_per_process=0.5",
        ("num_gpus_per_process=0.5 puts several of the 2 ranks of actor on one GPU", "NCCL", "pools.main=[1]"),
    ),
    "cluster: threads on one GPU": (
        "cluster.device=cuda cluster.runtime=inline",
        ("cluster.runtime=inline with cluster.device=cuda: the 2 processes", "use cluster.runtime=ray, or one process"),
    ),
    "cluster: one device by its number": ("cluster.device=cuda:1", ("'cuda:1'", "the kind alone, such as cuda")),
    "cluster: a hasty heartbeat": ("cluster.heartbeat_timeout_s=1", ("heartbeat_timeout_s=1", "at least 5", "(s)")),
    "fit: no node": ("cluster.pools.main=[]", ("cluster.pools.main=[]", "such as [2]")),
    "fit: mini-batches and rows": ("actor.num_mini_batches=33", ("num_mini_batches=33", "more than the 32 rows")),
    "fit: token cap": ("engine.max_tokens_per_micro_batch=15", ("micro_batch=15", "expected at least 16")),
    "fit: rows decoded together": ("rollout.max_batch_rows=3", ("rollout.max_batch_rows=3", "rollout.group_size=4")),
    "fit: cache and a row": ("rollout.cache_tokens=64", ("rollout.cache_tokens=64", "one row", "at least 96")),
    "fit: cache and this machine": ("rollout.cache_tokens=1000000000000", ("take 488,281,250 MiB, but this machine",)),
    "no effect: cache of an engine without one": (
        "rollout.engine=hf rollout.cache_tokens=4096",
        ("rollout.cache_tokens=4096 has no effect", "rollout.engine='hf'"),
    ),
    "fit: group of one": ("recipe=grpo rollout.group_size=1", ("rollout.group_size=1", "expected at least 2")),
    "fit: k1 in the loss": ("kl.estimator=k1", ("kl.estimator='k1'", "expected k2 or k3, or kl.placement=reward")),
    "fit: k3 in the reward": ("kl.placement=reward", ("kl.estimator='k3'", "expected k1, or kl.placement=loss")),
    "fit: correction of a reward": (
        "kl.placement=reward kl.estimator=k1 kl.importance_corrected=true",
        ("kl.importance_corrected=true", "expected kl.importance_corrected=false, or kl.placement=loss"),
    ),
    "fit: correction of k2": (
        "kl.estimator=k2 kl.importance_corrected=true",
        ("kl.estimator='k2'", "expected k1 or k3, or kl.importance_corrected=false"),
    ),
    "fit: horizon below a step": (
        "kl.adaptive.horizon=31",
        ("kl.adaptive.horizon=31", "the 32 rollouts of a step", "expected at least 32"),
    ),
    "fit: refresh after the end": (
        "reference.refresh_every_steps=21",
        ("refresh_every_steps=21", "trainer.num_steps=20", "expected less, or null"),
    ),
    "no effect: refresh without a reference": (
        "kl=null reference.refresh_every_steps=5",
        ("reference.refresh_every_steps=5 has no effect", "kl=null"),
    ),
    "no effect: the best of no validation": (
        "recipe=grpo data.generate=null data.train=t.jsonl critic=null checkpoint.keep_best=true",
        ("checkpoint.keep_best=true has no effect without a validation", "set data.validation"),
    ),
    "steps to profile: none": ("trainer.profile=5:3", ("trainer.profile='5:3'", "as FIRST:LAST, such as 3:5")),
    "steps to profile: no numbers": (
        "trainer.profile=some",
        ("trainer.profile='some'", "expected at most 20 steps from 1 to"),
    ),
    "steps to profile: of another run": (
        "trainer.num_steps=4 trainer.profile=3:5",
        ("from 1 to 4 as FIRST:LAST",),
    ),
    "steps to profile: too many": ("trainer.profile=1:21", ("at most 20 steps",)),
    "no effect: arguments of no template": (
        "data.template.thinking=false",
        ("data.template={thinking: false} has no effect with model.create",),
    ),
    "fit: heads": ("model.create.num_heads=5", ("num_heads=5", "expected one of 1, 2, 4, 8, 16, 32")),
    "fit: heads of odd width": ("model.create.num_heads=64", ("num_heads=64", "even width")),
    "fit: odd width": ("model.create.hidden_size=65", ("hidden_size=65", "expected 64 or 66")),
    "fit: key/value heads": ("model.create.num_key_value_heads=3", ("heads=3", "expected one of 1, 2, 4")),
    "range: rank of an adapter": ("model.lora.rank=0", ("model.lora.rank=0", "from 1 to 65536")),
    "fit: inline beyond sense": (
        "cluster.pools.main=[1000000] cluster.runtime=inline",
        ("all 1000000 processes", "at most 256"),
    ),
    "range: rows beyond all memory": ("rollout.num_prompts=1000000000000", ("num_prompts=", "from 1 to 1048576")),
    "type: digits without end": ("rollout.stop=[" + "1" * 5000 + "]", ("rollout.stop (command line): ", "digits")),
    "unknown: dropout": ("model.lora.dropout=0.1", ("model.lora.dropout=0.1", "the keys rank, alpha")),
    "fit: adapters of experts of a dense model": (
        "model.lora.target_parameters=[mlp.experts.down_proj]",
        ("models of type 'llama' have no experts", "qwen3_moe", "Linear layers are target_modules"),
    ),
    "fit: an adapter of experts and a dense model": (
        "model.lora.path=of_experts",
        ("model.lora.path='of_experts': models of type 'llama' have no experts", "qwen3_moe"),
    ),
    "fit: misspelt experts": (
        "model.create.architecture=qwen3_moe model.lora.target_parameters=[mlp.experts.gate_up_proj,experts.down]",
        ("'qwen3_moe' have no 'experts.down'; expected mlp.experts.gate_up_proj or mlp.experts.down_proj",),
    ),
    "fit: vllm and adapters of experts": (
        "model.create.architecture=qwen3_moe rollout.engine=vllm cluster.device=cuda "
        "model.lora.target_parameters=[mlp.experts.down_proj]",
        ("rollout.engine='vllm' takes adapters of linear layers only", "use rollout.engine=native"),
    ),
    "fit: nothing to adapt": ("model.lora.target_modules=[]", ("target_modules is empty", "[q_proj, v_proj]")),
    "fit: two ranks": (
        "model.lora.path=adapter model.lora.rank=8",
        ("model.lora.rank=8 contradicts model.lora.path='adapter'",),
    ),
    "fit: an adapter of another family": (
        "model.create=null model.path=mixture model.lora.path=of_cohere",
        ("'of_cohere' was made for 'cohere', of type 'cohere', but model.path='mixture' is of type 'qwen3_moe'",),
    ),
    "file: no adapter": ("model.lora.path=nowhere", ("model.lora.path='nowhere'", "no such folder")),
    "file: not an adapter": ("model.lora.path=model", ("lacks adapter_config.json and adapter_model.safetensors",)),
    "file: model is an adapter": (
        "model.create=null model.path=adapter",
        ("model.path='adapter' is an adapter, not a model", "model.lora.path"),
    ),
    "range: warmup": ("actor.optimizer.warmup_ratio=20", ("warmup_ratio=20", "from 0 to 0.9")),
    "fit: two models": ("model.path=model", ("model.path='model'", "add model.create=null", "base.yaml:3")),
    "fit: no model": ("model.create=null", ("model.path: required", "Hugging Face folder")),
    "fit: two data sets": ("data.train=good.jsonl", ("data.train='good.jsonl'", "add data.generate=null")),
    "fit: two validation sets": ("data.validation=good.jsonl", ("data.validation='good.jsonl'", "data.generate=null")),
    "fit: no data": ("data.generate=null", ("data.train: required", "expected files, folders or names on the hub")),
    "fit: digits without digits": (
        "data.generate=null data.train=good.jsonl",
        ("reward.function='digits'", "expected file.py:function"),
    ),
    "fit: the same response eight times": (
        "validation.num_samples=8 validation.temperature=0",
        ("validation.num_samples=8", "all of them are the same", "temperature such as 0.6"),
    ),
    "fit: key of another advantage": (
        "advantage.token_discount=0.5",
        ("advantage.token_discount=0.5", "advantage.name=gae has the keys", "one of advantage.name=grpo or dr_grpo"),
    ),
    "fit: rewards by token and by turn": (
        "recipe=grpo advantage.name=turn_grpo advantage.token_discount=0.5",
        ("advantage.token_discount=0.5", "advantage.name=turn_grpo has the keys"),
    ),
    "fit: advantage of another recipe": (
        "advantage.name=rloo",
        ("advantage.name='rloo' is not computed by recipe=ppo", "recipe=grpo"),
    ),
    "fit: no such advantage": ("advantage.name=rlo", ("advantage.name='rlo'", "did you mean rloo?")),
    "fit: no such loss": ("loss.name=gpso", ("loss.name='gpso'", "did you mean gspo?")),
    "fit: key of another loss": ("loss.tau_positive=2", ("loss.name=clip has the keys", "loss.name=sapo")),
    "fit: more than a group has": (
        'recipe=grpo advantage={"name":"pass_at_k","k":9}',
        ("advantage.k=9", "rollout.group_size"),
    ),
    "fit: right answers and a KL": (
        "recipe=grpo advantage.name=pass_at_k kl.placement=reward",
        ("kl.placement=reward has no effect with advantage.name=pass_at_k", "expected kl.placement=loss"),
    ),
    "fit: right answers and their length": (
        "recipe=grpo advantage.name=pass_at_k reward.overlong={}",
        ("reward.overlong has no effect with advantage.name=pass_at_k", "a wrong one of a right one; expected null"),
    ),
    "fit: a pass rate and a KL": (
        "recipe=grpo advantage.name=max_rl kl.placement=reward",
        ("kl.placement=reward is divided by the mean score", "expected kl.placement=loss"),
    ),
    "fit: a pass rate and penalties": (
        "recipe=grpo advantage.name=max_rl reward.overlong={}",
        ("reward.overlong makes scores negative, for which advantage.name=max_rl has no meaning", "expected null"),
    ),
    "fit: penalties of a student without rewards": (
        "recipe=opd teacher.path=model reward.overlong={}",
        ("reward.overlong={} has no effect: with teacher.reward_coef=0 nothing reads it",),
    ),
    "fit: two weights": (
        'correction=[{"name":"tis"},{"name":"icepop"}]',
        ("tis and icepop", "counts the gap twice"),
    ),
    "fit: a weight and a loss with one": (
        'loss.name=decoupled correction=[{"name":"tis"}]',
        ("loss.name=decoupled is weighed back", "masks only, or loss.name=clip"),
    ),
    "fit: a token's mask in a loss by row": (
        'recipe=grpo loss.name=gspo correction=[{"name":"icepop"}]',
        ("correction has icepop by token, but loss.name=gspo has one ratio a row", "{name: mask, level: geometric}"),
    ),
    "fit: another token's mask in a loss by row": (
        'recipe=grpo loss.name=gmpo correction=[{"name":"mask","level":"token"}]',
        ("correction has mask by token, but loss.name=gmpo", "or loss.name=clip"),
    ),
    "fit: bounds that leave nothing": (
        'correction=[{"name":"mask","low":2,"high":1}]',
        ("low=2 and high=1", "expected low below high"),
    ),
    "fit: bounds above a ratio of 1": (
        'correction=[{"name":"mask","low":1.5,"high":2}]',
        ("mask has low=1.5 and high=2", "expected low of at most 1 and high of at least 1"),
    ),
    "fit: bounds below a ratio of 1": (
        'correction=[{"name":"icepop","low":0.2,"high":0.9}]',
        ("icepop has low=0.2 and high=0.9, which leaves out what sampler and trainer agree on", "high of at least 1"),
    ),
    "fit: a cap that shrinks all weights": ('correction=[{"name":"tis","cap":0.5}]', ("tis has cap=0.5", "at least 1")),
    "fit: no such key of a correction": (
        'correction=[{"name":"tis","low":1}]',
        ("tis has no key low", "a list of sections"),
    ),
    "fit: no such correction": ('correction=[{"name":"tiss"}]', ("correction=", "a list of sections")),
    "fit: a pull to where the policy still is": (
        "loss.name=kl_cov actor.num_mini_batches=1",
        ("loss.name=kl_cov penalises moving away", "actor.num_mini_batches above 1"),
    ),
    "fit: covariances between no bounds": (
        "loss.name=clip_cov loss.covariance_low=5",
        ("loss.covariance_low=5", "so no token is between them"),
    ),
    "fit: covariances without rewards": (
        "recipe=opd teacher.path=t loss.name=clip_cov",
        ("loss.name=clip_cov chooses tokens by the rewards", "recipe=opd learns from a teacher"),
    ),
    "no effect: entropy beside a teacher": (
        "recipe=opd teacher.path=t actor.entropy_coef=0.5",
        ("actor.entropy_coef=0.5 has no effect: with teacher.reward_coef=0 nothing reads it; leave it out",),
    ),
    "no effect: an advantage and an aggregation beside a teacher": (
        "recipe=opd teacher.path=t aggregation=sequence advantage.name=rloo",
        ("aggregation='sequence' has no effect", "advantage.name='rloo' has no effect"),
    ),
    "no effect: a policy loss beside a divergence": (
        "recipe=opd teacher.path=t teacher.loss=forward loss.clip_low=0.1",
        ("loss.clip_low=0.1 has no effect: with teacher.loss=forward nothing",),
    ),
    "no effect: what is asked of no server": (
        "recipe=opd teacher.path=t teacher.served.timeout_s=5",
        ("teacher.served.timeout_s=5.0 has no effect: with teacher.path='t' nothing",),
    ),
    "no effect: a mesh of teachers that others serve": (
        "recipe=opd teacher.by_source.math=http://host/v1 teacher.mesh.tp=2",
        ("teacher.mesh.tp=2 has no effect: with teacher.by_source={math: 'http://host/v1'} nothing",),
    ),
    "no effect: an empty section": (
        "recipe=opd teacher.path=t kl={}",
        ("kl={} has no effect: with recipe=opd nothing reads it; leave it out, or set recipe=ppo or grpo",),
    ),
    "no effect: a name inside of a key": (
        "recipe=grpo teacher.by_source.math=t",
        ("teacher.by_source={math: 't'} has no effect", "or set recipe=opd"),
    ),
    "no effect: columns of other data": (
        "recipe=grpo data.columns.chosen=better",
        ("data.columns.chosen='better' has no effect", "or set recipe=reward_model or dpo"),
    ),
    "no effect: what a reader of other keys has": (
        "recipe=sft data.generate=null data.train=good.jsonl actor.entropy_coef=0.1",
        ("actor.entropy_coef=0.1 has no effect: with recipe=sft nothing reads it; leave it out, or set recipe=ppo or",),
    ),
    "fit: policy gradient of many updates": (
        "loss.name=policy_gradient actor.num_mini_batches=2",
        ("first optimizer step", "loss.name=clip"),
    ),
    "fit: critic of a recipe without": (
        "recipe=grpo critic.num_epochs=2",
        ("critic.num_epochs=2 has no", "recipe=grpo", "nothing reads it; leave it out, or set recipe=ppo"),
    ),
    "fit: reference of nothing": (
        "kl=null reference.placement.pool=main",
        ("reference.placement.pool='main'", "kl=null"),
    ),
    "fit: short prompts": ("data.max_prompt_tokens=7", ("max_prompt_tokens=7", "expected at least 8")),
    "fit: short answers": ("rollout.max_response_tokens=5", ("max_response_tokens=5", "expected at least 6")),
    "fit: carry of a sum": (
        "data.generate.task=sum data.max_prompt_tokens=15 rollout.max_response_tokens=6",
        ("rollout.max_response_tokens=6", "expected at least 7"),
    ),
    "fit: more prompts than there are": (
        "data.generate.num_digits=2 data.generate.num_validation_prompts=100",
        ("num_validation_prompts=100", "expected at most 99"),
    ),
    # Files.
    "file: no model": ("model.create=null model.path=modle", ("model.path='modle'", "no such folder")),
    "file: model is a file": ("model.create=null model.path=good.jsonl", ("'good.jsonl' is a file", "a folder")),
    "file: a run in place of a model": (
        "model.create=null model.path=tuned",
        ("'tuned': the folder of a run; its newest model is tuned/checkpoints/step_000020",),
    ),
    "file: a run of adapters in place of a model": (
        "model.create=null model.path=adapted",
        ("rally export adapted merged", "model.lora.path=adapted/checkpoints/step_000020"),
    ),
    "file: a run without a checkpoint": (
        "model.create=null model.path=begun",
        ("'begun': the folder of a run, which has no checkpoint yet",),
    ),
    "file: not a model": ("model.create=null model.path=no_config", ("'no_config'", "config.json is missing")),
    "file: model without a type": ("model.create=null model.path=no_type", ("'no_type'", "no model_type")),
    "file: torn model": ("model.create=null model.path=torn", ("'torn'", "not valid JSON")),
    "file: model without weights": ("model.create=null model.path=no_weights", ("'no_weights'", "*.safetensors")),
    "file: rows longer than the model": (
        f"{' '.join(OWN)} rollout.max_response_tokens=30",
        ("rollout.max_response_tokens=30", "expected at most 32", "model.path='model'"),
    ),
    "file: no critic": ("critic.path=critic", ("critic.path='critic'", "no such folder")),
    "file: no data": (f"{DATA} data.train=god.jsonl", ("data.train: god.jsonl", "mean 'good.jsonl'?")),
    "file: data is a folder": (
        f"{DATA} data.train=sub",
        ("data.train: sub is a folder", "that holds no .parquet, .arrow, .jsonl or .csv file"),
    ),
    "file: a table of names alone": (f"{DATA} data.train=good.csv", ("good.csv", "no rows")),
    "data: key of a set": (
        f'{DATA} data.train=[{{"path":"good.jsonl","wieght":2}}]',
        ("object has no key wieght", "keys path, weight, subset"),
    ),
    "data: set without a path": (f'{DATA} data.train=[{{"weight":2}}]', ("path: field required", "weight: 2")),
    "data: weight of nothing": (
        f'{DATA} data.train=[{{"path":"good.jsonl","weight":0}}]',
        ("weight: input should be gr",),
    ),
    "data: weight of one alone": (
        f'{DATA} data.train=[good.jsonl,{{"path":"sub","weight":2}}]',
        ("good.jsonl has no weight, and others have", "expected one for each, or for none"),
    ),
    "data: weight of validation": (
        f'{DATA} data.validation=[{{"path":"sub","weight":2}}]',
        ("data.validation has weights",),
    ),
    "data: unknown file system": (f"{DATA} data.train=s4://a/b.jsonl", ("s4 is not a file system that fsspec knows",)),
    "columns: unknown": (f"{DATA} data.columns.promt=q", ("did you mean data.columns.prompt?",)),
    "file: data of 0 bytes": (f"{DATA} data.train=zero.jsonl", ("zero.jsonl is empty (0 bytes)",)),
    "file: parquet of 0 bytes": (f"{DATA} data.train=zero.parquet", ("zero.parquet is empty (0 bytes)",)),
    "file: parquet of 0 rows": (f"{DATA} data.train=no_rows.parquet", ("no_rows.parquet", "no rows")),
    "file: blank lines": (f"{DATA} data.train=blank.jsonl", ("blank.jsonl", "no rows")),
    "file: torn parquet": (f"{DATA} data.train=torn.parquet", ("torn.parquet cannot be read",)),
    "file: one of several": (f"{DATA} data.train=[good.jsonl,no.jsonl]", ("data.train: no.jsonl",)),
    "file: no validation data": (f"{' '.join(OWN)} data.validation=no.jsonl", ("data.validation: no.jsonl",)),
    "file: no reward": (
        "reward.function=reward.py:f",
        ("'reward.py:f'", "does not exist", "did you mean 'rewards.py'?"),
    ),
    "file: reward without a function": ("reward.function=rewards.py:score", ("'rewards.py:score'", "compute_score")),
    "file: reward without a colon": ("reward.function=rewards.py", ("'rewards.py'", "rewards.py:compute_score")),
    "file: shipped reward misspelt": ("reward.function=digit", ("'digit'", "did you mean 'digits'?")),
    "file: torn reward": ("reward.function=torn.py:compute_score", ("torn.py:compute_score", "line 1")),
    "file: reward of two": ("reward.function=rewards.py:two_arguments", ("(data_source, text)", "ground_truth")),
    "file: runs below a file": ("trainer.runs_dir=good.jsonl", ("runs_dir='good.jsonl' is a file", "a folder")),
    "file: name of two lines": ('trainer.name="a\\nb"', ("trainer.name='a\\nb'", "plain folder name")),
    "file: name with a slash": ("trainer.name=a/b", ("trainer.name='a/b'", "plain folder name")),
    # Overrides that are none.
    "override: no value": ("seed=", ("'seed='", "seed=null")),
    "override: no equals sign": ("seed", ("'seed'", "expected key=value")),
    "override: no key": ("=3", ("'=3'", "expected key=value")),
    "override: two dots": ("actor..num_epochs=3", ("'actor..num_epochs=3'", "expected key=value")),
    "override: torn list": ("data.train=[a", ("'data.train=[a'", "not valid YAML", "expected ',' or ']'")),
    # Sources that are none; they stand first, in the place of the recipe.
    "source: no such recipe": ("@digts", ("'digts'", "did you mean `digits`?")),
    "source: nothing near": ("@xyzzy", ("'xyzzy'", "digits, dpo, dr_grpo, games, grpo, gsm8k-grpo, gsm8k-ppo, gspo")),
    "source: no such file": ("@bas.yaml", ("bas.yaml: no such file",)),
    "source: folder without a run": ("@sub", ("sub is a folder without config.yaml", "name a recipe or a .yaml file")),
    "source: broken YAML": ("@broken.yaml", ("broken.yaml:3: not valid YAML", "expected ',' or ']'")),
    "source: nested too deeply": ("@deep.yaml", ("deep.yaml:1: not valid YAML", "too deeply")),
    "source: aliases of aliases": ("@aliases.yaml", ("aliases.yaml:1: not valid YAML: its aliases make", "100,000")),
    "source: no text": ("@binary.yaml", ("binary.yaml", "cannot be read")),
    "source: empty": ("@empty.yaml", ("empty.yaml: the file is empty", "`recipe:`")),
    "source: list": ("@list.yaml", ("list.yaml", "found a list")),
    "source: keys twice": (
        "@twice.yaml",
        ("actor.num_epochs is set twice: in twice.yaml:3", "seed is set twice: in twice.yaml:2 and in twice.yaml:4"),
    ),
    "source: key that is a list": ("@keys.yaml", ("keys.yaml:2", "expected a name, found a list")),
    "source: contains itself": ("@itself.yaml", ("actor.optimizer (itself.yaml:2) contains itself",)),
    "source: base leads back": ("@loop.yaml", ("leads back to itself: loop.yaml -> loop2.yaml -> loop.yaml",)),
    "source: base is lost": ("@lost.yaml", ("base='bse.yaml' (lost.yaml:2)", "no such file")),
    "source: base is a number": ("@number.yaml", ("base=3 (number.yaml:1)", "a shipped recipe or a .yaml file")),
    "source: section without keys": ("@out.yaml", ("actor=null (out.yaml:2)", "leave it out for its defaults")),
    "source: no pool": ("@no_pools.yaml", ("cluster.pools is empty", "{main: [1]}")),
    "source: required keys": (
        "@nothing.yaml",
        ("reward.function: required", "file.py:compute_score", "model.path: required", "data.train: required"),
    ),
}


def arguments(case: str) -> list[str]:
    first, *rest = WRONG[case][0].split(" ")
    return [first[1:], *rest] if first.startswith("@") else ["base.yaml", first, *rest]


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_config_is_refused_with_key_value_and_remedy(files: Path, case: str):
    name, *overrides = arguments(case)
    with pytest.raises(ConfigError) as raised:
        load_checked(name, overrides)
    message = str(raised.value)
    for part in WRONG[case][1]:
        assert part in message
    assert all("\n" not in problem for problem in raised.value.problems)
    assert "runs" not in os.listdir(files)


def test_the_right_configs_beside_them_are_accepted(files: Path):
    assert load_checked("base.yaml").config.seed == 0
    assert load_checked("base.yaml", OWN).config.model.path == "model"
    ahead = load_checked("base.yaml", ["recipe=grpo", "rollout.dynamic_sampling=5", *AHEAD.split(" ")])
    assert ahead.config.rollout.max_staleness == 1


SPLIT = ("cluster.pools={main:[1],sampling:[1]}", "rollout.placement.pool=sampling", "rollout.max_staleness=4")
TAUGHT = ("recipe=opd", "teacher.path=model")


@pytest.mark.parametrize(
    "own",
    [
        (),
        ("loss.name=dppo",),
        ("loss.name=cispo", "loss.anchor=rollout"),
        ("loss.name=importance_sampling", "loss.anchor=rollout", "correction=[{name: mask, high: 10}]"),
        ("loss.max_weight=null", "correction=[{name: mask, high: 100}]"),
        ("loss.name=clip", "correction=[{name: icepop}]"),
        ("loss.name=clip", "correction=[{name: mask, level: geometric}]", "kl.placement=reward", "kl.estimator=k1"),
        ("loss.name=clip", "correction=[{name: kl_mask}]", "kl=null"),
        ("loss.name=gspo", "correction=[{name: off_policy_mask}, {name: tis}]"),
        TAUGHT,
        (*TAUGHT, "teacher.loss=reverse", "correction=[{name: tis}]"),
        (*TAUGHT, "teacher.loss=forward", "correction=[{name: icepop}, {name: mask}]"),
        (*TAUGHT, "teacher.loss=mixed", "teacher.top_k=4"),
        (*TAUGHT, "teacher.loss=mixed", "teacher.top_k=4", "teacher.reward_coef=1", "advantage.name=grpo"),
        (*TAUGHT, "teacher.loss=reverse", "teacher.reward_coef=1", "loss.name=clip", "correction=[{name: tis}]",
         "advantage.name=grpo"),
    ],
)  # fmt: skip
def test_losses_that_are_weighed_back_to_an_older_sampler_within_bounds_are_accepted(files: Path, own: tuple[str, ...]):
    assert load_checked("base.yaml", [*SPLIT, *own]).config.rollout.max_staleness == 4


@pytest.mark.parametrize(
    ("recipe", "columns"),
    [
        ("sft", ("messages=talk",)),
        ("sft", ("prompt=instruction", "completion=output")),
        ("reward_model", ("chosen=better", "rejected=worse")),
        ("dpo", ("prompt=question", "chosen=better", "rejected=worse")),
        ("grpo", ("prompt=question", "ground_truth=answer")),
    ],
)
def test_the_columns_of_every_kind_of_data_can_be_named_on_the_command_line(recipe: str, columns: tuple[str, ...]):
    found = load_config(recipe, [f"data.columns.{column}" for column in columns], draft=True).config.data.columns
    assert found is not None
    assert found.named == dict(column.split("=") for column in columns)


def test_all_the_problems_of_a_config_are_reported_together(files: Path):
    wrong = ("actor.num_epochs=0", "rollout.temprature=1", "data.shuffle=2", "kl.estimator=k1", "critic.path=nowhere")
    with pytest.raises(ConfigError) as raised:
        load_checked("base.yaml", wrong)
    assert len(raised.value.problems) == len(wrong)
    assert str(raised.value).startswith("5 problems in the config:\n  - ")
    for override in wrong:
        assert override.split("=")[0] in str(raised.value)


def test_a_key_with_a_wrong_value_is_reported_once_and_not_again_as_a_contradiction(files: Path):
    with pytest.raises(ConfigError) as raised:
        load_checked("base.yaml", ["rollout.group_size=-1", "recipe=grpo", "cluster.pools.main=[a,b]"])
    assert len(raised.value.problems) == 2


def test_a_long_value_is_cut_in_the_message(files: Path):
    with pytest.raises(ConfigError) as raised:
        load_checked("base.yaml", ["seed=" + "x" * 5000])
    assert len(str(raised.value)) < 400


REPRESENTATIVE = (
    ("unknown: leaf",),
    ("type: text for a number",),
    ("fit: ranks and bundles",),
    ("file: no data",),
    ("file: parquet of 0 rows",),
    ("file: torn reward",),
    ("source: no such recipe",),
    ("source: broken YAML",),
)
"""One of each way in which a config can be wrong; that all are refused with these words is tested in this process."""


@pytest.mark.parametrize(
    "case", thinned(REPRESENTATIVE, ("unknown: leaf",), ("file: parquet of 0 rows",), ("source: broken YAML",))
)
def test_the_command_ends_with_status_2_before_anything_is_started_or_made(files: Path, case: str):
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "rallypoint.cli.main", "train", *arguments(case)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=files,
        check=False,
    )
    print(f"{case}: {time.monotonic() - began:.2f} s")
    imports = [line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    said = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("import time:"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert said.startswith("error: 1 problem in the config:\n  - ")
    for part in WRONG[case][1]:
        assert part in said
    assert "Traceback" not in said
    assert "rallypoint.config" in imports
    heavy = {"torch", "ray", "transformers", "huggingface_hub", "pyarrow", "numpy", "matplotlib"}
    needed = {"pyarrow", "numpy"} if "parquet" in case else set()
    assert {name.split(".")[0] for name in imports} & heavy <= needed
    assert not (files / "runs").exists()


def test_there_are_at_least_forty_wrong_configs():
    assert len(WRONG) >= 40


def test_a_model_folder_that_is_complete_is_not_looked_into_further(files: Path):
    assert load_checked("base.yaml", [*OWN, "critic.path=model"]).config.critic.path == "model"
