"""A reward function of a file of one's own, as users have them: it is called in processes."""


def score(data_source, solution_str, ground_truth, extra_info=None):
    """Return the share of characters that are right."""
    pairs = zip(solution_str, ground_truth, strict=False)
    return sum(said == right for said, right in pairs) / max(len(ground_truth), len(solution_str), 1)
