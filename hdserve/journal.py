"""The progress of a long job, kept next to its result until that is written.

One JSON object per line; a line that an interruption cut short is removed when the job continues::

    {"settings": {"model": "hdserve-tiny", ...}}     what the results depend on
    {"unit": "batch 1, round 0", "result": ...}      a finished part of the job
    {"interruptions": 1}                             here it was continued
    {"unit": "batch 1, round 1", "result": ...}
    {"unfinished": "batch 1, round 2", "note": ...}  for when that part is started again
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from hdserve.errors import ConfigError

logger = logging.getLogger(__name__)

SUFFIX = ".unfinished"


class Journal:
    """The finished units of a job.

    Args:
        result_path: where the job writes its result; the journal is next to it, with ``SUFFIX``
            appended.  ``None`` keeps nothing.
        settings: what the results depend on, as JSON values.

    Attributes:
        num_restored: units that an interrupted job had finished.
        num_interruptions: how often the job was continued.
        notes: of parts that were interrupted, the last :meth:`note`.

        A journal with other settings in which nothing is finished is replaced.  As long as a
        ``Journal`` exists, no other process can have one of the same file, unless this process
        opens and closes the file elsewhere.

    Raises:
        ConfigError: there is a journal with other settings, another process is writing to it, or
            none can be read and written there.
    """

    def __init__(self, result_path: Path | None, settings: Mapping[str, Any]) -> None:
        self.path = result_path and result_path.with_name(result_path.name + SUFFIX)
        self._file: FileIO | None = None
        self._results: dict[str, Any] = {}
        self.num_interruptions = 0
        self.notes: dict[str, Any] = {}
        try:
            self._open(json.loads(json.dumps(settings)))
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read and written: {error}") from error
        self.num_restored = len(self._results)

    def __contains__(self, unit: str) -> bool:
        return unit in self._results

    def __getitem__(self, unit: str) -> Any:
        """The result of ``unit``, which is finished."""
        return self._results[unit]

    def once(self, unit: str, work: Callable[[], Any]) -> Any:
        """The result of ``unit``: what ``work`` returns, as JSON values, now or before.

        A result is the same whether it was restored or not: tuples become lists, keys strings.

        Raises:
            ConfigError: it cannot be kept, for example on a full disk; earlier results are kept.
        """
        if unit not in self._results:
            line = json.dumps({"unit": unit, "result": work()}, ensure_ascii=False)
            self._append(line)
            self._results[unit] = json.loads(line)["result"]
        return self._results[unit]

    def note(self, unit: str, note: Any) -> None:
        """Keep a note on ``unit``, which is not finished, for when it is started again.

        Raises:
            ConfigError: it cannot be kept.
        """
        self._append(json.dumps({"unfinished": unit, "note": note}, ensure_ascii=False))

    def finish(self) -> None:
        """Delete it: the result is written."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _open(self, settings: dict[str, Any]) -> None:
        if self.path is None:
            return
        self._file = file = _held(self.path)
        weakref.finalize(self, file.close)
        lines = self._lines(file)
        if not lines or self._can_give_way(lines, settings):
            file.truncate(0)
            self._append(json.dumps({"settings": settings}, ensure_ascii=False))
            return
        self._check(lines[0].get("settings"), settings)
        for line in lines[1:]:
            if "unit" in line:
                self._results[line["unit"]] = line["result"]
            if "unfinished" in line:
                self.notes[line["unfinished"]] = line["note"]
            self.num_interruptions = line.get("interruptions", self.num_interruptions)
        self.num_interruptions += 1
        self._append(json.dumps({"interruptions": self.num_interruptions}))

    def _lines(self, file: FileIO) -> list[dict[str, Any]]:
        """All lines of the file; anything after the last newline is removed."""
        file.seek(0)
        data = file.readall()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            file.truncate(len(whole))
        try:
            return [dict(json.loads(line)) for line in whole.splitlines()]
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{self.path}: an unfinished job cannot be resumed; delete it: {error}"
            ) from error

    @staticmethod
    def _can_give_way(lines: list[dict[str, Any]], wanted: dict[str, Any]) -> bool:
        kept = lines[0].get("settings")
        is_other = isinstance(kept, dict) and any(_differences(kept, wanted))
        return is_other and not any("unit" in line for line in lines)

    def _check(self, kept: Any, wanted: dict[str, Any]) -> None:
        if other := ", ".join(_differences(kept if isinstance(kept, dict) else {}, wanted)):
            raise ConfigError(
                f"{self.path}: an unfinished job of other settings ({other}); finish or delete it"
            )

    def _append(self, line: str) -> None:
        if self._file is None:
            return
        data = f"{line}\n".encode(errors="surrogatepass")  # of file names that are not UTF-8
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be written: {error}") from error


def _held(path: Path) -> FileIO:
    """The file, opened for reading and appending by this process only, as far as the file system
    supports locks.

    Raises:
        ConfigError: another process has it.
    """
    file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666), "r+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.close()
        raise ConfigError(
            f"{path}: another process is doing this job: wait until it has ended, or stop it"
        ) from error
    except OSError as error:
        logger.debug("%s: no lock: %s", path, error)
    return file


def digest_of_list(values: Iterable[Any]) -> str:
    """Return a short digest of a list of JSON values, for the settings; the text of one at a time
    is in memory."""
    found = hashlib.sha256(b"[")
    for index, value in enumerate(values):
        found.update(f"{', ' if index else ''}{json.dumps(value)}".encode())
    found.update(b"]")
    return found.hexdigest()[:16]


def check_can_be_read_again(path: Path) -> None:
    """
    Raises:
        ConfigError: it is a pipe or a device, and would be empty the next time.
    """
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise ConfigError(
            f"{path}: is no file: pipes and devices cannot be read twice; write what they say to a "
            "file"
        )


def file_digest(path: Path | None) -> str | None:
    """Return a short digest of a file's content, for the settings.

    Raises:
        ConfigError: it cannot be read, or would be empty the next time, as a pipe is.
    """
    if path is None:
        return None
    check_can_be_read_again(path)
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _differences(kept: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    for name in {**kept, **wanted}:
        old, new = kept.get(name), wanted.get(name)
        if old != new:
            yield f"{name} was {json.dumps(old)}, is {json.dumps(new)}"
