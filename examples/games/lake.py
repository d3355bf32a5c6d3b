"""Cross a frozen lake of 3 x 3 fields around its holes; every move is answered with the lake as it is then."""

MOVES = {"u": (-1, 0), "d": (1, 0), "l": (0, -1), "r": (0, 1)}


class Lake:
    max_tokens = 2  # of an answer: a move, and the end

    def reset(self, example):
        self.fields = [list(line) for line in example.prompt[-1].content.split("/")]
        self.row, self.column = next(
            (y, x) for y, line in enumerate(self.fields) for x, field in enumerate(line) if field == "P"
        )
        self.fields[self.row][self.column] = "."
        self.num_moves = 0

    def step(self, message):
        down, right = MOVES.get(message["content"], (0, 0))
        self.row, self.column = min(2, max(0, self.row + down)), min(2, max(0, self.column + right))
        self.num_moves += 1
        field = self.fields[self.row][self.column]
        if field in "GO":
            return [], float(field == "G"), True, {"crossed": field == "G"}
        is_over = self.num_moves == 6
        return {"role": "user", "content": self.shown()}, -0.05, is_over, {"crossed": False}

    def shown(self):
        fields = [line.copy() for line in self.fields]
        fields[self.row][self.column] = "P"
        return "/".join(map("".join, fields))
