"""Sampling: for the rollouts of a step, and for validation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Discriminator, Strict, Tag

from rallypoint.config.fields import Section, Texts, key, section
from rallypoint.config.limits import MAX_TOP_K, MIN_TEMPERATURE
from rallypoint.config.sections.places import PlacementConfig, RolloutMeshConfig
from rallypoint.transport_kinds import WantedTransport


class ToolConfig(Section):
    """A tool that the policy may call."""

    function: str = key(help="python, calculator, search or mcp, which ship (docs/tools.md), or `file.py:function`.")
    parameters: dict[str, Any] = key({}, help="Parameters of one that ships, by name.")


def _objects(value: object) -> object:
    """Let the name of a tool stand for it, and one tool for a list of one."""
    entries = cast("list[object]", value) if isinstance(value, list | tuple) else [value]
    return tuple({"function": one} if isinstance(one, str) else one for one in entries)


class ToolUseConfig(Section):
    """Rollouts in which the policy may call tools until it answers without a call."""

    tools: Annotated[tuple[ToolConfig, ...], Strict(False), BeforeValidator(_objects)] = key(
        help="python, calculator, search, mcp (docs/tools.md) or `file.py:function`; an object has parameters."
    )
    max_turns: int | None = key(
        None, at_least=1, unit="turns", help="Answers at most; null: what the row has room for."
    )
    system: str | None = key(None, help="Message of the system before each prompt, such as how to answer.")


def _kind(value: object) -> str:
    return "object" if isinstance(value, dict | ToolUseConfig) else "text"


SHIPPED_EPISODES = {"frozen_lake": "FrozenLake", "wordle": "Wordle"}
"""Class of each game that ships, by its name."""
_GAMES = Path(__file__).parents[2] / "environments" / "shipped" / "games.py"
EpisodeConfig = Annotated[
    Annotated[str, Tag("text")] | Annotated[ToolUseConfig, Tag("object")],
    Discriminator(_kind),
]
"""A function of the user's, a game that ships, or the episode with tools."""


class RolloutConfig(Section):
    """Rollouts of a step."""

    num_prompts: int = key(64, at_least=1, at_most=2**20, unit="prompts", help="P: prompts per training step.")
    group_size: int = key(8, at_least=1, at_most=2**16, unit="rollouts", help="G: rollouts per prompt.")
    max_response_tokens: int = key(
        256, at_least=1, at_most=2**31, unit="tokens", help="A rollout ends here at the latest."
    )
    temperature: float = key(
        1.0,
        at_least=MIN_TEMPERATURE,
        at_most=10,
        help="Sampling temperature; the policy that is trained is the one at it.",
    )
    top_k: int | None = key(
        None, at_least=1, at_most=MAX_TOP_K, help="Only the k likeliest tokens are drawn; null for all."
    )
    top_p: float = key(
        1.0, above=0, at_most=1, help="Only the fewest likeliest tokens with at least this probability are drawn."
    )
    min_p: float = key(
        0.0, at_least=0, at_most=1, help="Only tokens with at least this part of the likeliest one's probability."
    )
    repetition_penalty: float = key(
        1.0, at_least=0.01, at_most=100, help="Divides the logits of tokens that prompt or response have; 1 is none."
    )
    stop: Texts = key((), help="A rollout ends with the token that completes one of these texts.")
    min_response_tokens: int = key(0, at_least=0, unit="tokens", help="No rollout ends before, by stop token or text.")
    engine: Literal["native", "hf", "vllm"] = key(
        "native",
        automatic=True,
        help="What samples: our own engine, transformers' generate (slow), or a vLLM server; null: what suits it.",
    )
    serve: int | None = key(
        None, at_least=0, at_most=65535, help="Port of this machine at which the run answers OpenAI's API (0: any)."
    )
    exact: bool = key(
        False,
        help="Whether logits are bit-identical whatever else is in the batch (docs/rollouts.md); several times slower.",
    )
    quantization: Literal["fp8"] | None = key(
        None,
        hidden=True,
        help="A vLLM server keeps what is published in 8 bits, and computes its products in them (docs/rollouts.md).",
    )
    router_replay: bool = key(
        False,
        hidden=True,
        help="Training sends the tokens of a mixture to the experts that they were sampled with (docs/rollouts.md).",
    )
    max_batch_rows: int = key(
        1024,
        at_least=1,
        at_most=2**20,
        unit="rows",
        help="Rows that one process decodes together; bounds the KV cache.",
    )
    cache_tokens: int | None = key(
        None,
        at_least=64,
        at_most=2**40,
        unit="tokens",
        help="Size of the KV cache of a process; null: all rows at their longest, on GPUs as far as free memory goes.",
    )
    weights: WantedTransport = key(
        "auto",
        help="Transport of published weights to ranks with a model of their own; auto: what fits their placement.",
    )
    mask_truncated: bool = key(
        False, help="Rollouts cut off at max_response_tokens do not train; their scores count in baselines."
    )
    dynamic_sampling: int | None = key(
        None,
        at_least=0,
        at_most=1000,
        unit="batches",
        help="Replace groups of equal scores, up to so many batches of them (DAPO); 0: they do not train; null: kept.",
    )
    over_sampling: int | None = key(
        None,
        at_least=2,
        at_most=2**20,
        unit="prompts",
        help="Sample so many for a step, which trains on the first num_prompts that end; the rest get a step later.",
    )
    max_staleness: int = key(
        0,
        at_least=0,
        at_most=64,
        unit="steps",
        help="How many steps older than the actor's weights a rollout may be; 0 samples and trains in turns.",
    )
    window: int = key(
        1,
        at_least=1,
        unit="prompts",
        help="A step takes what is ready of so many of the oldest prompts; 1: in order. The bound stays.",
    )
    on_load: Literal["recompute", "keep"] = key(
        "recompute",
        help="Whether new weights have the keys and values of responses under way computed again (docs/async.md).",
    )
    schedule: str | None = key(
        None, help="journal.jsonl of a run with max_staleness, to be repeated to the bit; null for none."
    )
    episode: EpisodeConfig | None = key(
        None,
        help="Episode or agent, file.py:function, or a game; or {tools: [python, ...], max_turns: 8}; null: one turn.",
    )
    turn_timeout_s: float = key(
        600.0, above=0, unit="s", help="Time an episode may take between two responses, its tools included."
    )
    episode_timeout_s: float = key(
        3600.0, above=0, unit="s", help="Time an episode may take for all turns together, sampling not included."
    )
    thinking: Literal["keep", "strip"] = key(
        "keep",
        help="Earlier reasoning at a new question: keep; or strip, if the chat template does, which begins a sequence.",
    )
    max_failed: float = key(
        0.5,
        at_least=0,
        at_most=1,
        help="Share of a step's rollouts that may fail or lack a score; with more the run stops.",
    )
    placement: PlacementConfig = section(PlacementConfig, help="Where rollouts are sampled.")
    mesh: RolloutMeshConfig = section(
        RolloutMeshConfig, help="How ranks, or devices of a server, divide the model that is sampled from."
    )

    @property
    def own_episode(self) -> str | None:
        """The function or class that makes a rollout, as file.py:NAME; None if a rollout has one turn, or tools."""
        if not isinstance(self.episode, str):
            return None
        return f"{_GAMES}:{SHIPPED_EPISODES[self.episode]}" if self.episode in SHIPPED_EPISODES else self.episode

    @property
    def tool_use(self) -> ToolUseConfig | None:
        """How the policy may call tools; None if the episode is a function, or there is none."""
        return self.episode if isinstance(self.episode, ToolUseConfig) else None

    @property
    def tools(self) -> tuple[ToolConfig, ...]:
        """The tools that the policy may call."""
        return () if self.tool_use is None else self.tool_use.tools

    @property
    def named_functions(self) -> dict[str, str]:
        """Code and tools that take part in a rollout, by the key that names each."""
        if self.own_episode is not None:
            return {} if self.episode in SHIPPED_EPISODES else {"rollout.episode": self.own_episode}
        return {f"rollout.episode.tools[{at}]": one.function for at, one in enumerate(self.tools)}


class ValidationConfig(Section):
    """Scores on prompts that are never trained on."""

    every_steps: int = key(20, at_least=1, unit="steps", help="Also before the first and after the last step.")
    max_prompts: int | None = key(None, at_least=1, unit="prompts", help="Use the first so many; null for all.")
    num_samples: int = key(
        1, at_least=1, at_most=1024, unit="rollouts", help="Rollouts of each prompt; more give pass@k and majority@n."
    )
    temperature: float = key(1.0, at_least=0, at_most=10, help="0 is greedy; from 0.001 on it is drawn as in training.")
