from rallypoint.display.theme import phase_colours


def test_no_two_phases_of_a_run_share_a_colour() -> None:
    known = ["rollout", "reward", "judge", "learn", "publish", "other"]
    for phases in (known[:3], known):
        names = [*phases, "wait", "reference", "critic"]
        assert len(set(phase_colours(names).values())) == len(names)
