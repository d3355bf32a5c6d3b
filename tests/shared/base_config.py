"""A config of the tests' own: what the shipped recipes are tuned to must not matter."""

BASE = """\
recipe: ppo
model:
  create: {hidden_size: 64, num_heads: 4, num_key_value_heads: 2}
data:
  generate: {task: sort, num_digits: 6}
  max_prompt_tokens: 8
reward: {function: digits}
rollout: {num_prompts: 8, group_size: 4, max_response_tokens: 8}
actor:
  num_mini_batches: 4
  optimizer: {lr: 3e-4, warmup_ratio: 0.2}
critic: {num_mini_batches: 4}
kl: {coef: 1e-2, estimator: k3, placement: loss}
engine: {max_tokens_per_micro_batch: 64}
cluster: {pools: {main: [2]}}
trainer: {num_steps: 20}
"""
