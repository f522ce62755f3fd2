"""API keys, each mapped to a namespace, and the key of the administrator.

Keys are compared by their SHA-256, all of them and in constant time; only digests are kept and
sent to other processes, and no key is ever logged or repeated in an error.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import shlex
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from hdserve.config import AccessConfig
from hdserve.core import DEFAULT_NAMESPACE
from hdserve.errors import ConfigError, Unauthorized

MIN_KEY_CHARACTERS = 16
NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NAMESPACE_RULE = "a namespace consists of 1 to 64 letters, digits, '_', '.' and '-'"
"""The names that a namespace of an API key may have."""

_ADMIN_KEY = "access.admin_key or HDSERVE_ADMIN_KEY"
_ADMIN_KEY_FILE = "access.admin_key_file or HDSERVE_ADMIN_KEY_FILE"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A client's key; ``digest`` is its SHA-256."""

    digest: bytes
    namespace: str


@dataclass(frozen=True, slots=True)
class Access:
    """Who may do what.

    Attributes:
        keys: if there are none, everybody may generate, in the default namespace.
        admin_digest: if there is none, nobody may administer.
        keys_file: the file that ``keys`` were read from; absolute.
        admin_key_file: the file that ``admin_digest`` was read from; absolute.
    """

    keys: tuple[ApiKey, ...] = ()
    admin_digest: bytes | None = None
    keys_file: Path | None = None
    admin_key_file: Path | None = None

    def identify(self, authorization: str) -> Identity:
        """Identify the sender of this ``authorization`` header.

        Raises:
            Unauthorized: a key is required, and this is not one.
        """
        scheme, _, key = authorization.partition(" ")
        presented = _digest(key.strip()) if scheme.lower() == "bearer" else b""
        namespaces = [
            item.namespace for item in self.keys if hmac.compare_digest(item.digest, presented)
        ]
        admin_digest = self.admin_digest
        is_admin = admin_digest is not None and hmac.compare_digest(admin_digest, presented)
        if namespaces or is_admin or not self.keys:
            return Identity(next(iter(namespaces), DEFAULT_NAMESPACE), is_admin)
        if not presented:
            reason = (
                "an API key is needed: send the header 'authorization: Bearer KEY', or "
                "'x-api-key: KEY'"
            )
            raise Unauthorized(reason)
        raise Unauthorized("the API key is wrong")

    def read_again(self) -> Access:
        """Return a copy with the present content of the files.

        Raises:
            ConfigError: a file cannot be read or is wrong; the message contains no key.
        """
        keys, admin = self.keys, self.admin_digest
        if self.keys_file is not None:
            keys = _read_keys(self.keys_file)
        if self.admin_key_file is not None:
            admin = _read_admin_key(self.admin_key_file)
        if any(key.digest == admin for key in keys):
            raise ConfigError("the key of the administrator is among the API keys")
        return replace(self, keys=keys, admin_digest=admin)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who sent a request.

    Attributes:
        namespace: of the generated text that the sender's requests read and feed.
    """

    namespace: str = DEFAULT_NAMESPACE
    is_admin: bool = False


def read_access(config: AccessConfig) -> Access:
    """Read the keys that ``config`` names.

    Raises:
        ConfigError: a file cannot be read or is wrong; the message contains no key.
    """
    admin = config.admin_key
    return Access(
        admin_digest=None if admin is None else _admin_digest(admin.get_secret_value(), _ADMIN_KEY),
        keys_file=config.api_keys_file and config.api_keys_file.absolute(),
        admin_key_file=config.admin_key_file and config.admin_key_file.absolute(),
    ).read_again()


class KeyFileWarning(NamedTuple):
    """A problem of a key file that does not keep the server from starting.

    Attributes:
        remedy: a command that fixes it.
    """

    text: str
    remedy: str


def key_file_warnings(config: AccessConfig) -> Iterator[KeyFileWarning]:
    """Describe problems of the files that ``config`` names.

    These are a missing file of the administrator's key, and files that every user of the machine
    can read.  What keeps :func:`read_access` from reading them is reported there.
    """
    for name in ("api_keys_file", "admin_key_file"):
        path: Path | None = getattr(config, name)
        if path is None:
            continue
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            if name == "admin_key_file":
                text = f"access.{name}: there is no file {path}, so /v1/speculation is closed"
                place = shlex.quote(str(path))
                yield KeyFileWarning(text, f"(umask 077; openssl rand -hex 24 > {place})")
            continue
        except OSError:
            continue
        if mode & stat.S_IROTH:
            text = f"access.{name}: every user of this machine can read {path}"
            yield KeyFileWarning(text, f"chmod o-rwx {shlex.quote(str(path))}")


def _read_keys(path: Path) -> tuple[ApiKey, ...]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys in {path}: {_fault(error)}") from error
    keys = [
        _parse_line(path, number, line.split())
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not keys:
        raise ConfigError(f"{path} holds no API key")
    if len({key.digest for key in keys}) < len(keys):
        raise ConfigError(f"{path} holds an API key twice")
    return tuple(keys)


def _parse_line(path: Path, number: int, words: list[str]) -> ApiKey:
    key, namespace = words[0], words[1] if len(words) > 1 else DEFAULT_NAMESPACE
    where = f"{path}, line {number}"
    if len(words) > 2:
        raise ConfigError(f"{where}: a key and its namespace are expected")
    _check_key(key, where)
    if not NAMESPACE.fullmatch(namespace):
        raise ConfigError(f"{where}: {NAMESPACE_RULE}")
    return ApiKey(_digest(key), namespace)


def _read_admin_key(path: Path) -> bytes | None:
    """Return the digest of a file's single line, or ``None`` if there is no file."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        reason = f"cannot read the administrator's key in {path}: {_fault(error)}"
        raise ConfigError(reason) from error
    if len(lines) != 1:
        raise ConfigError(f"{path}: one line is expected, the administrator's key")
    return _admin_digest(lines[0], _ADMIN_KEY_FILE)


def _fault(error: OSError | UnicodeDecodeError) -> str:
    """Say why a file cannot be read, without any of its content."""
    return str(error.strerror) if isinstance(error, OSError) else "not UTF-8 text"


def _admin_digest(key: str, where: str) -> bytes:
    key = key.strip()  # as what clients send
    _check_key(key, where)
    return _digest(key)


def _check_key(key: str, where: str) -> None:
    if len(key) < MIN_KEY_CHARACTERS:
        raise ConfigError(f"{where}: a key needs at least {MIN_KEY_CHARACTERS} characters")
    if not key.isascii():
        raise ConfigError(f"{where}: a key consists of ASCII characters, as headers do")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
