"""Run by tests, with a device: prints a digest of the weights after each of three updates of a tiny policy.

Rows are ragged and share prompts, so that sums of many kinds happen: over rows, over heads of a group, over tokens.
"""

import hashlib
import sys
import tempfile
from pathlib import Path


def main() -> None:
    """Take the steps."""
    import torch
    from tiny_models import make_tiny_model

    from rallypoint.config import OptimizerConfig
    from rallypoint.engine import TrainingEngine, policy_outputs
    from rallypoint.engine.determinism import prepare_process
    from rallypoint.model_files import load_policy
    from rallypoint.types import Metrics, Sequences, offsets_from_lengths

    device = torch.device(sys.argv[1])
    if device.type != "cpu":
        prepare_process()
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    with tempfile.TemporaryDirectory() as folder:
        shard = load_policy(
            make_tiny_model(Path(folder) / "model", architecture="qwen3", max_positions=512), dtype=dtype, device=device
        )
    engine: TrainingEngine[Sequences] = TrainingEngine(
        shard, optimizer=OptimizerConfig(lr=1e-3), max_tokens_per_micro_batch=512
    )
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([200, 170, 65, 30, 12, 90, 200, 33])
    tokens = torch.randint(20, (int(lengths.sum()),), generator=generator)
    rows = Sequences(
        offsets=offsets_from_lengths(lengths),
        tokens=tokens,
        loss_mask=torch.cat([torch.arange(int(length)) >= 8 for length in lengths]),
        prompt_index=torch.arange(8) // 2,
        sample_index=torch.arange(8) % 2,
    )

    def loss(part: Sequences, at: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        return -policy_outputs(shard, part, at, 1.0).logprobs.sum(), Metrics()

    for step in range(1, 4):
        engine.train(rows, loss, denominator=rows.num_loss_tokens, step=step, num_steps=3)
        digest = hashlib.sha256()
        for _, weight in sorted(engine.weights.items()):
            digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy())
        print(digest.hexdigest())


if __name__ == "__main__":
    main()
