"""Several tokens of each row, one after the other, without Python in between.

What Python does between two steps of a small model takes as long as half a step: it calls, waits for the other lanes,
and looks at every token. None of that changes the next token, unless what it is drawn from depends on those before.
"""

import torch
from torch import Tensor

from rallypoint.generation.native.cpu.bags import Bags, Moves, advance
from rallypoint.generation.native.plain import Linear, Network, decode, linear
from rallypoint.generation.sampler import Rules, draw


def draw_ahead(
    network: Network, head: Linear, bags: Bags, moves: Moves, num_moves: int, rules: Rules, numbers: Tensor
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Draw some tokens of each row; return them as the fields of `Draws`, for each step.

    Args:
        network: without its head.
        head: the layer behind it.
        bags: what rows look at now, filled up with the last row. They are moved on, except after the last step that
            there are moves for.
        moves: of the bags.
        num_moves: how many of them have been made.
        rules: of drawing.
        numbers: [steps, B] float64 in [0, 1).
    """
    tokens: list[Tensor] = []
    logprobs: list[Tensor] = []
    sampled_logprobs: list[Tensor] = []
    num_rows = numbers.shape[1]
    num_filler = bags.tokens.shape[0] - num_rows
    for step in range(numbers.shape[0]):
        logits = linear(head, decode(network, bags))[:num_rows]
        drawn, logprob, sampled_logprob = draw(logits, rules, numbers[step], None)
        tokens.append(drawn)
        logprobs.append(logprob)
        sampled_logprobs.append(sampled_logprob)
        if num_moves + step < moves.distances[0].shape[0]:
            advance(bags, moves, num_moves + step, torch.cat([drawn, drawn[-1:].expand(num_filler)]))
    return tokens, logprobs, sampled_logprobs
