"""Needs Python only. What a fresh engine is given after a crash: nobody lost, nobody given up unjustly, the guilty one found."""

import random

import pytest

from octavo.client.recovery import STRIKES_TO_GIVE_UP, Recovery


def crashed(recovery, ids):
    """Here a request is its id."""
    return recovery.crashed({id_: id_ for id_ in ids})


def test_nothing_is_held_while_nothing_happens():
    recovery = Recovery()
    assert not recovery.hold("a", "a")
    assert not recovery.active


def test_after_one_crash_all_are_resent_together_in_order():
    recovery = Recovery()
    assert crashed(recovery, ["a", "b", "c"]) is None
    assert recovery.restarted() == ["a", "b", "c"]
    assert recovery.active
    assert recovery.news(["c", "a", "b"]) == []
    assert not recovery.active


def test_requests_that_come_while_the_engine_restarts_wait_and_go_last():
    recovery = Recovery()
    crashed(recovery, ["a"])
    assert recovery.hold("new", "new")
    assert recovery.num_held == 2
    assert recovery.restarted() == ["a", "new"]
    assert recovery.num_held == 0
    assert not recovery.hold("newer", "newer")


def test_an_aborted_request_is_not_resent():
    recovery = Recovery()
    crashed(recovery, ["a", "b"])
    recovery.news(["a"])
    assert recovery.restarted() == ["b"]


def test_after_two_crashes_suspects_are_tried_one_by_one_and_others_wait():
    recovery = Recovery()
    crashed(recovery, ["a", "b"])
    recovery.hold("c", "c")
    recovery.restarted()
    crashed(recovery, ["a", "b", "c"])  # c has one strike only
    recovery.hold("d", "d")
    assert recovery.restarted() == ["a"]
    assert recovery.hold("e", "e")
    assert recovery.news(["a"]) == ["b"]
    assert recovery.news(["a"]) == []  # b's trial is not over
    assert recovery.news(["b"]) == ["c", "d", "e"]


def test_a_trial_ends_with_the_request():
    recovery = Recovery()
    for _ in range(2):
        crashed(recovery, ["a", "b"])
        first = recovery.restarted()
    assert first == ["a"]
    assert recovery.news(["a"]) == ["b"]  # aborted or finished: the same call


def test_only_a_request_that_was_alone_is_given_up():
    recovery = Recovery()
    verdicts = []
    for _ in range(2):
        verdicts.append(crashed(recovery, ["a", "b"]))
        recovery.restarted()
    recovery.news(["a"])  # a is cleared and runs on; b is being tried
    verdicts.append(crashed(recovery, ["a", "b"]))
    assert verdicts == [None, None, None]
    assert recovery.restarted() == ["b"]  # most strikes first, now really alone
    assert crashed(recovery, ["a", "b"]) == "b"
    assert recovery.restarted() == ["a"]


def test_a_request_that_brings_tokens_between_crashes_is_never_a_suspect():
    recovery = Recovery()
    for _ in range(50):
        assert crashed(recovery, ["a"]) is None
        assert recovery.restarted() == ["a"]
        recovery.news(["a"])


def test_a_lone_request_is_given_up_at_its_third_strike():
    recovery = Recovery()
    verdicts = []
    for _ in range(STRIKES_TO_GIVE_UP):
        verdicts.append(crashed(recovery, ["a"]))
        recovery.restarted()
    assert verdicts == [None] * (STRIKES_TO_GIVE_UP - 1) + ["a"]


class EngineModel:
    """An engine that dies `delay` outputs after it was given a poisonous request, in every life again."""

    def __init__(self, poison, total):
        self.poison, self.total = poison, total
        self.running = []

    def step(self):
        """The ids that had an output, or None for a death."""
        if any(id_ in self.poison for id_ in self.running):
            return None
        return list(self.running)


@pytest.mark.parametrize("seed", range(40))
def test_every_innocent_finishes_and_every_poison_is_found(seed):
    rng = random.Random(seed)
    ids = [f"r{i}" for i in range(rng.randint(1, 12))]
    poison = set(rng.sample(ids, rng.randint(0, min(3, len(ids)))))
    left = {id_: rng.randint(1, 6) for id_ in ids}
    recovery, given_up, crashes = Recovery(), [], 0
    arrivals = list(ids)
    engine = EngineModel(poison, left)
    while left or arrivals:
        if arrivals and rng.random() < 0.5:
            id_ = arrivals.pop(0)
            if not recovery.hold(id_, id_):
                engine.running.append(id_)
        known = [id_ for id_ in ids if id_ in left and id_ not in arrivals]
        outputs = engine.step()
        if outputs is None:
            crashes += 1
            guilty = crashed(recovery, known)
            if guilty:
                given_up.append(guilty)
                del left[guilty]
            engine.running = recovery.restarted()
            continue
        for id_ in outputs:
            left[id_] -= 1
            if not left[id_]:
                del left[id_]
                engine.running.remove(id_)
        engine.running += recovery.news(outputs)
        assert crashes < 100
    assert set(given_up) == poison
    assert crashes <= 5 * len(poison)
