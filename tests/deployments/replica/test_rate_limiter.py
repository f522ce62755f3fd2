"""Each name is let through once in an interval, and none of long ago is kept."""

from __future__ import annotations

from deployments.replica.rate_limiter import RateLimiter


def test_a_name_is_let_through_once_in_an_interval() -> None:
    """The first one at once, whatever others had."""
    limiter = RateLimiter(10.0)
    taken = [
        limiter.take(name, now_s)
        for name, now_s in zip("aabaab", (0, 1, 2, 9, 10, 11), strict=True)
    ]
    assert taken == [True, False, True, False, True, False]


def test_names_are_forgotten_when_their_interval_is_over() -> None:
    """A replica serves more tenants than it should remember."""
    limiter = RateLimiter(10.0)
    for second in range(1000):
        assert limiter.take(f"tenant-{second}", float(second))
    assert len(limiter._given_s) == 10
