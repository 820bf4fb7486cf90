"""The clock of tests that select kernels by time."""


class FakeClock:
    """A clock of times from a function (side, tokens) -> samples, which notes the arguments of its calls.

    Tokens are the rows of the argument at `place`.
    """

    def __init__(self, samples=lambda side, tokens: [1.0 if side == "plugin" else 2.0], place: int = 0):
        self.samples, self.place, self.asked = samples, place, []

    def times(self, calls, sets, replays):
        self.asked.append(sets)
        for call in calls.values():
            call(*sets[0])
        tokens = len(sets[0][self.place])
        return {side: self.samples(side, tokens) for side in calls}

    def finish(self):
        pass


def plugin_wins_up_to(most: int, place: int = 0) -> FakeClock:
    """Return a clock by which the plugin is faster with up to `most` tokens, and slower with more."""
    return FakeClock(lambda side, tokens: [2.0 if side == "baseline" else 1.0 if tokens <= most else 3.0], place)
