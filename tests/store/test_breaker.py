"""When a server that failed is asked again."""

from __future__ import annotations

from proxy.store.breaker import FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker, Ticket

CALL, PROBE = Ticket(probe=False), Ticket(probe=True)


def test_a_closed_breaker_lets_all_ask() -> None:
    breaker = Breaker()
    assert [breaker.enter(0.0) for _ in range(3)] == [CALL] * 3
    breaker.answered(CALL)
    assert not breaker.is_open


def test_after_a_failure_nobody_asks_for_a_pause_then_one_probes() -> None:
    breaker = Breaker()
    assert breaker.failed(CALL, 10.0)
    assert breaker.is_open
    assert breaker.enter(10.0 + FIRST_PAUSE_S - 0.01) is None
    assert breaker.enter(10.0 + FIRST_PAUSE_S) == PROBE
    assert breaker.enter(10.0 + FIRST_PAUSE_S) is None
    breaker.answered(PROBE)
    assert breaker.enter(10.0 + FIRST_PAUSE_S) == CALL


def test_the_pause_doubles_up_to_its_limit_and_starts_again_after_an_answer() -> None:
    breaker, now, pauses = Breaker(), 0.0, []
    assert breaker.failed(CALL, now)
    for _ in range(7):
        start = now
        while breaker.enter(now) is None:
            now += 0.25
        pauses.append(now - start)
        assert not breaker.failed(PROBE, now)
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    assert breaker.enter(now + LONGEST_PAUSE_S) == PROBE
    breaker.answered(PROBE)
    assert breaker.failed(CALL, now)
    assert breaker.enter(now + FIRST_PAUSE_S) == PROBE


def test_calls_that_fail_together_count_as_one_failure() -> None:
    breaker = Breaker()
    assert [breaker.failed(CALL, 0.0) for _ in range(5)] == [True, False, False, False, False]
    assert breaker.enter(FIRST_PAUSE_S) == PROBE


def test_an_answer_to_an_older_question_proves_nothing() -> None:
    breaker = Breaker()
    breaker.failed(CALL, 0.0)
    breaker.answered(CALL)
    assert breaker.is_open


def test_a_probe_whose_caller_left_makes_room_for_the_next() -> None:
    breaker = Breaker()
    breaker.failed(CALL, 0.0)
    assert breaker.enter(1.0) == PROBE
    breaker.abandoned(PROBE)
    assert breaker.enter(1.0) == PROBE
