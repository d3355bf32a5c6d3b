"""Weights and masks for a sampler that is not the trainer: those of verl and TRL as our list of corrections."""

from __future__ import annotations

from collections.abc import Iterator

from rallypoint.config.other_projects import other_projects
from rallypoint.config.translate.table import Ends, Translation

Correction = dict[str, object]


def set_verl_corrections(ends: Ends, found: Translation) -> None:
    """Set what `rollout_correction` asks for: a weight, and any number of masks."""
    if corrections := [*_weights(ends, found), *_masks(ends, found)]:
        found.keys["correction"] = corrections
    ends.get("rollout_correction.loss_type")  # of the bypass alone
    for key in other_projects().verl.no_corrections:
        if value := ends.get(f"rollout_correction.{key}"):
            found.unknown.append(f"rollout_correction.{key}={value}")


def _weights(ends: Ends, found: Translation) -> Iterator[Correction]:
    level, threshold = ends.get("rollout_is"), ends.get("rollout_is_threshold", 2.0)
    bounds = _bounds(threshold)
    if level is None:
        return
    if level not in {"token", "sequence"} or bounds is None:
        found.unknown.append(f"rollout_is={level}, rollout_is_threshold={threshold}")
    elif level == "token" and bounds[0] is not None:
        yield {"name": "icepop", "low": bounds[0], "high": bounds[1]}
    else:
        yield from _weight(str(level), *bounds)


def _masks(ends: Ends, found: Translation) -> Iterator[Correction]:
    masks, kl_masks = other_projects().verl.masks, other_projects().verl.kl_masks
    named, thresholds = ends.get("rollout_rs"), str(ends.get("rollout_rs_threshold"))
    lower = ends.get("rollout_rs_threshold_lower")
    names = [] if named is None else str(named).replace(" ", "").split(",")
    limits = thresholds.replace(" ", "").split(",")
    limits = limits * len(names) if len(limits) == 1 else limits
    for name, limit in zip(names, limits, strict=False):
        bounds = _bounds(limit)
        if bounds is None or (name not in masks and name not in kl_masks):
            found.unknown.append(f"rollout_rs={name}, rollout_rs_threshold={limit}")
        elif name in kl_masks:
            yield {"name": "kl_mask", "estimator": kl_masks[name], "max_kl": bounds[1]}
        else:
            low = bounds[0] if bounds[0] is not None else lower if lower is not None else 1.0 / bounds[1]
            yield {"name": "mask", "level": masks[name], "low": low, "high": bounds[1]}


def _weight(level: str, low: float | None, high: float) -> Iterator[Correction]:
    """Yield a capped weight; within two bounds, it goes with a mask of the rows beyond them."""
    yield {"name": "tis", "level": level, "cap": high}
    if low is not None:
        yield {"name": "mask", "level": "product", "low": low, "high": high}


def _bounds(written: object) -> tuple[float | None, float] | None:
    """Return (low, high) of `0.5_5.0`, or (None, high) of one number; None if it is neither.

    >>> _bounds("0.5_5.0"), _bounds(2), _bounds("null")
    ((0.5, 5.0), (None, 2.0), None)
    """
    try:  # float("0.5_5") would be 0.55
        numbers = [float(part) for part in str(written).split("_")]
    except ValueError:
        return None
    return (None if len(numbers) == 1 else numbers[0], numbers[-1]) if len(numbers) in {1, 2} else None


def set_trl_corrections(ends: Ends, found: Translation) -> None:
    """Set the weights of what vLLM has sampled, and the mask of rows that the policy has left."""
    corrections = list(_of_vllm(ends, found))
    if (delta := ends.get("off_policy_mask_threshold")) is not None:
        corrections.append({"name": "off_policy_mask", "delta": delta})
    if corrections:
        found.keys["correction"] = corrections


def _of_vllm(ends: Ends, found: Translation) -> Iterator[Correction]:
    keys = [f"vllm_importance_sampling_{key}" for key in ("correction", "mode", "clip_min", "clip_max", "cap")]
    given = {key: ends.get(key) for key in keys if ends.has(key)}
    is_on, mode, low, high, older = map(given.get, keys)
    if not ends.peek("use_vllm", False) or is_on is False:
        if not ends.peek("use_vllm", False):
            found.open |= {f"{key}={value}": "it says nothing without use_vllm" for key, value in given.items()}
        return
    high = high if older is None else older
    match mode:
        case "token_mask" if high is not None:
            yield {"name": "icepop", "low": low or 0.0, "high": high}
        case "sequence_mask" if high is not None:
            yield from _weight("sequence", low or 0.0, high)
        case "token_truncate" | "sequence_truncate" if low is None and high is not None:
            yield {"name": "tis", "level": str(mode).partition("_")[0], "cap": high}
        case _:
            found.unknown.append(f"vllm_importance_sampling_mode={mode}, with clip_min={low} and clip_max={high}")
