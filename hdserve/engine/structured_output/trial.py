"""Whether a grammar compiles in bounded time and memory, tried in a separate process.

A regular expression, or several in one schema that must hold together, can take hours and
gigabytes to compile.  Neither the size of the text nor any limit of the library predicts that, and
a compiling thread cannot be stopped.  A process ends at its limits.  The vocabulary makes no
difference, so the trial uses single bytes: starting takes about 0.07 s of processor time.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_CPU_S = 2
MAX_MEMORY_BYTES = 2**31
MAX_KEPT_BYTES = 2**28
"""The most memory of one compiled grammar."""

_MAX_WAIT_S = 60.0
"""How long a trial may take in wall-clock time: its two seconds of processor time can take that
long on a busy machine."""


def parser_limits(step_fuel: int) -> LLParserLimits:
    """The limits of following a grammar.

    Args:
        step_fuel: most work of the lexer for one token, in the library's unit of about 0.1 us.
    """
    return LLParserLimits(
        step_lexer_fuel=step_fuel, max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False
    )


_MAX_LEXER_STATES = 20_000
"""The most states of a lexer, each of 1 to 2 kB.  A schema of 200 alternatives needs 3,000 to
10,000."""

_ENDED_FROM_OUTSIDE = {-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP}
"""Statuses that say nothing of the grammar: the limits end a trial by other signals."""


def memory_bytes(grammar: str, step_fuel: int) -> int | None:
    """How much memory ``grammar``, valid or not, keeps when it is compiled; ``None`` if it is not
    compiled or refused within the limits.

    Raises:
        RuntimeError: the process failed for another reason.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", __file__, str(step_fuel)],
            input=grammar.encode(errors="surrogatepass"),
            capture_output=True,
            timeout=_MAX_WAIT_S,
            check=False,
            process_group=0,  # Ctrl-C is not for it: another thread may wait
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode > 0 or done.returncode in _ENDED_FROM_OUTSIDE:
        told = done.stderr.decode()[-500:] or f"status {done.returncode}"
        raise RuntimeError(f"a grammar could not be tried: {told}")
    return int(done.stdout) if done.returncode == 0 else None


def _resident_bytes() -> int:
    """Memory of this process; 0 where the system does not tell."""
    numbers = Path("/proc/self/statm")
    num_pages = int(numbers.read_text().split()[1]) if numbers.exists() else 0
    return num_pages * resource.getpagesize()


def _limit_this_process() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    _limit_this_process()
    text = sys.stdin.buffer.read().decode(errors="surrogatepass")
    limits = parser_limits(int(sys.argv[1]))
    tokenizer = LLTokenizer("byte")
    before_bytes = _resident_bytes()
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    print(max(0, _resident_bytes() - before_bytes))
