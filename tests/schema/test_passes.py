"""The passes make of a schema what the package says that they make of it."""

from __future__ import annotations

import json
import re

from hdserve import schema
from hdserve.schema.closing import closed
from hdserve.schema.discriminators import told_apart
from hdserve.schema.holding import held

EXAMPLES = re.findall(r"::\n\n((?:    .*\n)+)", schema.__doc__ or "")


def test_each_pass_makes_the_next_example() -> None:
    sent, whole, told, shut = map(json.loads, EXAMPLES)
    assert held(sent) == (whole, ())
    assert told_apart(whole) == told
    assert closed(told) == shut
    assert schema.rewritten(sent) == shut
