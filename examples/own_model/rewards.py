# The prompt is a word, the right answer is the word reversed. Each letter in the right place earns a share.
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = sum(said == true for said, true in zip(solution_str, ground_truth, strict=False))
    return right / max(len(solution_str), len(ground_truth))
