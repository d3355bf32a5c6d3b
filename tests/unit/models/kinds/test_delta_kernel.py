"""When the kernel of flash-linear-attention scans, and with which arguments; a stand-in computes here."""

import logging

import pytest
import stand_in_fla
import torch

from rallypoint.models import SharedPrefixes
from rallypoint.models.kinds.delta_kernel import RowScan, checked_kernel, find_kernel, is_right
from rallypoint.models.kinds.linear_attention import DeltaHeads, DeltaInputs, Recurrence

HEADS = DeltaHeads(num_keys=2, num_values=4, key_dim=8, value_dim=6)
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_that_computes_what_our_scan_does_is_used_and_that_is_said(caplog, dtype):
    caplog.set_level(logging.INFO)
    assert checked_kernel(CPU, dtype, HEADS, "stand_in_fla") is stand_in_fla.chunk_gated_delta_rule
    assert "flash-linear-attention scans rows" in caplog.text


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("no_such_module", "it is not installed (pip install flash-linear-attention)"),
        ("stand_in_fla.nothing", "it is not installed"),
        ("logging", "AttributeError"),
    ],
)
def test_what_is_missing_is_said_and_our_scan_does_all(caplog, module, said):
    assert checked_kernel(CPU, torch.float32, HEADS, module) is None
    assert said in caplog.text


def test_a_kernel_with_other_numbers_or_gradients_is_not_right():
    def wrong(*states, **options):
        out, _ = stand_in_fla.chunk_gated_delta_rule(*states, **options)
        return out * 1.1, None

    def without_gradient(*states, **options):
        out, _ = stand_in_fla.chunk_gated_delta_rule(states[0].detach(), *states[1:], **options)
        return out, None

    assert not is_right(wrong, CPU, torch.float32, HEADS)
    assert not is_right(without_gradient, CPU, torch.float32, HEADS)


def test_it_is_for_gpus_and_half_precision_only():
    assert find_kernel(torch.zeros(1, dtype=torch.bfloat16), HEADS) is None
    assert find_kernel(torch.zeros(1, dtype=torch.float32, device="meta"), HEADS) is None


def test_rows_that_share_a_prompt_are_scanned_whole_and_filler_reads_nothing():
    offsets = torch.tensor([0, 5, 5, 12])  # the second row is empty; the third begins with three tokens of the first
    place = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 8])
    shared = SharedPrefixes(kept=torch.tensor([0, 1, 2, 3, 4, 8, 9, 10, 11]), place=place)
    generator = torch.Generator().manual_seed(0)
    sizes = (11, 2 * sum(HEADS.widths)), (2 * sum(HEADS.widths), 4), (11, 4), (11, 4)
    mixed, taps, decay, strength = (torch.rand(*size, generator=generator, dtype=torch.float64) for size in sizes)
    inputs = DeltaInputs(mixed, taps, -decay, strength, HEADS)  # two tokens are filler
    recurrence = Recurrence(offsets, CPU, shared)
    wanted, _ = recurrence.run(inputs, recurrence.blank(inputs))
    got = RowScan(offsets, CPU, shared).run(stand_in_fla.chunk_gated_delta_rule, inputs, recurrence)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    call = stand_in_fla.calls[-1]
    assert [tuple(call[name].shape) for name in ("q", "k", "v", "g", "beta")] == [
        *[(1, 12, 4, 8)] * 2,
        (1, 12, 4, 6),
        *[(1, 12, 4)] * 2,
    ]
    assert call["cu_seqlens"].tolist() == [0, 5, 12]
    assert (call["scale"], call["output_final_state"]) == (8**-0.5, False)
