"""What checks found, for the tests: whether its remedies can be followed."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterable
from typing import Any

import yaml

from hdserve.config import ModelConfig, ServeConfig
from hdserve.doctor.finding import Finding, Verdict


def verdicts(findings: Iterable[Finding]) -> list[str]:
    found = list(findings)
    for finding in found:
        assert bool(finding.remedy) == (finding.verdict is not Verdict.OK), finding
        assert not finding.remedy or can_be_pasted(finding.remedy), finding
    return [finding.verdict.value for finding in found]


COMMANDS = {"cd", "export", "hdserve", "hf", "make", "nano", "python", "ray", "serve", "sudo"}
COMMANDS |= {"chmod", "unset"}
FIELDS = {*ServeConfig.model_fields, *ModelConfig.model_fields}


def can_be_pasted(remedy: str) -> bool:
    """Into a shell, or into a configuration; what else there is to do is a comment in both."""
    line = remedy.partition("  # ")[0]
    found = None
    with contextlib.suppress(yaml.YAMLError):
        found = yaml.safe_load(line)
    if isinstance(found, dict):
        return set(found) <= FIELDS
    parsed = subprocess.run(["bash", "-n", "-c", line], capture_output=True)
    return parsed.returncode == 0 and re.findall(r"\w+", line.removeprefix("(umask 077; "))[0] in (
        COMMANDS | {"echo", "openssl"}
    )


def configured(**model: Any) -> ModelConfig:
    return ModelConfig.model_validate({"name": "m", "model": "hdserve-mini", **model})
