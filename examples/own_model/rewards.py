# The prompt is a word, the right answer the word reversed. Every letter in its place earns a share.
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = sum(said == true for said, true in zip(solution_str, ground_truth, strict=False))
    return right / max(len(solution_str), len(ground_truth))
