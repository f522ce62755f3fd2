"""The elements that calls consist of, as different families of models write them."""

from __future__ import annotations

import re
from typing import NamedTuple

from deployments.parsers.marks import without_part


class Elements(NamedTuple):
    """How a family of models writes a call.

    Attributes:
        head: what comes before the first argument; its one group is the name of the function.
        argument: what comes before the name of an argument.
        name_end: what comes behind that name.
        named: what comes between that name and the value, from ``name_end`` on.
        value_ends: what ends a value; the first always does, the others if the first was forgotten;
            a value may quote them within a line.
        function_end: what ends a call, if there is something other than the mark that closes all.
        has_lines: whether a value has lines of its own.
    """

    head: re.Pattern[str]
    argument: str
    name_end: str
    named: re.Pattern[str]
    value_ends: tuple[str, ...]
    function_end: str = ""
    has_lines: bool = False

    def without_end(self, text: str) -> str:
        """Return ``text`` without an ending that may belong to a mark that ends a value."""
        lines = ("", "\n") if self.has_lines else ("",)
        return without_part(text, *(f"{line}{mark}" for line in lines for mark in self.value_ends))


QWEN = Elements(
    head=re.compile(r"\s*<function=([\w.-]{1,128})>"),
    argument="<parameter=",
    name_end=">",
    named=re.compile(">"),
    value_ends=("</parameter>", "\n<parameter=", "\n</function>"),
    function_end="</function>",
    has_lines=True,
)
"""::

    <function=f>
    <parameter=city>
    San Jose
    </parameter>
    </function>
"""

GLM = Elements(
    head=re.compile(r"\s*([\w.-]{1,128})\s*(?=<arg_key>|</tool_call>)"),
    argument="<arg_key>",
    name_end="</arg_key>",
    named=re.compile(r"</arg_key>\s*<arg_value>"),
    value_ends=("</arg_value>",),
)
"""::

    f
    <arg_key>city</arg_key>
    <arg_value>San Jose</arg_value>
"""
