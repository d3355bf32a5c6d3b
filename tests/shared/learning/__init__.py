"""The learning suite: every algorithm trains small tasks whose optimum is known, and none may have stopped learning."""
