"""Access control: API keys, and the host names of the server.

All paths need a key, except a few paths without data (``OPEN_PATHS``). An open path is recognised by the path exactly
as it was sent: the server does not decode, fold or join it first. So no other spelling can make a protected path look
open.

The Host header is compared with a list of allowed names. Otherwise a web page could reach the server through a domain
name that points at this machine (DNS rebinding). Without keys, requests from web pages of another origin are refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from starlette.requests import Request

from chairlift.base.cache_key import cache_key
from chairlift.config import ServerConfig
from chairlift.errors import ConfigError
from chairlift.server.http.errors import ApiError

__all__ = [
    "ADMIN",
    "INTERNAL_CALLER",
    "OPEN_PATHS",
    "Auth",
    "Caller",
    "HostCheck",
    "caller_of",
    "check_admin",
    "check_exposure",
    "check_origin",
    "check_sees_all",
    "is_loopback",
    "load_keys",
    "salt_for",
]

OPEN_PATHS: Final = frozenset({"/health", "/ready", "/", "/live", "/live/"})
"""Paths that need no API key: two health probes, and pages without data."""

PAGES: Final = OPEN_PATHS | {"/docs"}
"""Paths that a page of another origin may link to, embed or request. These paths do no work and use no queue slot."""

INTERNAL_CALLER: Final = "chairlift.inside"
"""Key in an ASGI scope that marks a request made by this process. Its value is added to the scope's state; it has the
:class:`Caller` to use, so the access checks are skipped."""

ADMIN: Final = "admin"
"""Name of the API keys that may see the requests of every tenant: times, lengths and counts, never texts."""

_LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
_HOST: Final = re.compile(r"(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9_-][A-Za-z0-9._-]{0,252})(?::[0-9]{1,5})?")
_HOST_PORT: Final = re.compile(rb":[0-9]{1,5}$")
_KEY: Final = re.compile(r"[!-~]{1,512}")
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


def load_keys(config: ServerConfig) -> dict[str, str]:
    """API key -> tenant, from the settings and the key file. Raises ConfigError.

    In the key file, each line may have a name before the key, and several keys may have the same name. A key without a
    name has the tenant ``key-`` and twelve hexadecimal digits of the key's hash. The key cannot be recovered from these
    digits.
    """
    lines = []
    if config.api_key_file is not None:
        try:
            lines = Path(config.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"cannot read the API key file {config.api_key_file}: {reason}") from None
        lines = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
        if not lines:
            raise ConfigError(f"the API key file {config.api_key_file} has no key; write one key per line")
    names: dict[str, str] = {}
    for number, line in enumerate([*config.api_key, *lines], start=1):
        name, key = _named_key(line) if number > len(config.api_key) else ("", line)
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"API key number {number} has {len(key)} characters, or others than visible ASCII; "
                "a key is 1 to 512 visible ASCII characters without spaces, and in a file a name and a space may stand "
                "before it"
            )
        before = names.get(key, "")
        if name and before and name != before:
            raise ConfigError(f"API key number {number} is there as {before!r} and as {name!r}; give each key one name")
        names[key] = name or before
    return {key: name or f"key-{_digest(b'tenant ' + key.encode()).hex()[:12]}" for key, name in names.items()}


def _named_key(line: str) -> tuple[str, str]:
    """(name, key) of a line of the key file. A malformed line is returned whole as the key, and a later check rejects
    it."""
    name, *rest = line.split()
    return (name, rest[0]) if len(rest) == 1 and _NAME.fullmatch(name) else ("", line)


def is_loopback(address: str) -> bool:
    """Whether a socket bound to this numeric address can be reached only from this machine."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def check_exposure(address: str, keys: Collection[str], insecure: bool) -> None:
    """Raise ConfigError when a socket on this numeric address would be open to other machines without a key."""
    if not keys and not insecure and not is_loopback(address):
        raise ConfigError(
            f"listening on {address} lets other machines in, and there is no API key; give --api-key-file FILE "
            "(or --api-key KEY), listen on 127.0.0.1, or say --insecure if the network itself is trusted"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """The client that sent a request."""

    holder: str = ""
    """Owner of the request's prefix-cache entries: derived from the API key if there are several keys, otherwise
    empty."""
    tenant: str = ""
    """Tenant that is charged for the request: the name of its API key. Without keys: the request's ``user`` field. For
    a trusted router, its id of the tenant counts (:mod:`chairlift.server.http.routers`)."""
    vouched: str = ""
    """Tenant that an API key or a trusted router names; empty if only the client names it. It pays for leases."""
    session: str = ""
    """Conversation that the request belongs to; see :mod:`chairlift.server.caching.sessions`."""
    request_id: str = ""
    """The X-Request-Id of the request."""
    arrived: float | None = None
    """Time at which the last byte of the request arrived, on the monotonic clock."""

    def sees(self, tenant: str) -> bool:
        """Whether this caller may see the tenant's requests. A caller sees its own requests. A router sees the requests
        of its tenants (``KEY/ID``). It sees all requests if its key is named ``admin``, or if all callers have the same
        key or no key."""
        return not self.holder or self.tenant in (tenant, tenant.partition("/")[0], ADMIN)


def caller_of(keys: Mapping[str, str], tenant: str) -> Caller | None:
    """A caller for requests that the server itself sends for ``tenant``, as if with one of the tenant's keys. None if
    the tenant has no key any more. ``keys`` maps each API key of the server to its tenant."""
    if not keys:
        return Caller()
    for key, name in keys.items():
        if name == tenant:
            return Caller(_digest(key.encode()).hex() if len(keys) > 1 else "", tenant)
    return None


def check_admin(request: Request) -> None:
    """Raise ApiError 403 unless the request came with an API key that is named ``admin``."""
    caller: Caller = getattr(request.state, "caller", Caller())
    if caller.tenant != ADMIN:
        message = f"this takes an API key that is named {ADMIN}: a line '{ADMIN} KEY' in the file of --api-key-file"
        raise ApiError(403, message, code="admin_key_needed")


def check_sees_all(request: Request, what: str) -> None:
    """Raise ApiError 403 if keys distinguish callers, and the request's key is not named ``admin``. ``what`` shows the
    requests of all keys."""
    caller: Caller = getattr(request.state, "caller", Caller())
    if caller.holder and caller.tenant != ADMIN:
        message = f"{what} shows the requests of all keys; it needs a key that is named {ADMIN} in the key file"
        raise ApiError(403, message, code="admin_key_needed")


class Auth:
    """Checks bearer tokens against the API keys. Without keys every request is allowed."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._tenants = {_digest(key.encode()): tenant for key, tenant in keys.items()}

    def check(
        self, path: str, raw_path: bytes, authorization: Sequence[bytes], x_api_key: Sequence[bytes] = ()
    ) -> Caller:
        """The caller of a request; an anonymous caller on open paths. Raises ApiError 401 if the path needs a key and
        no valid key was sent.

        ``path`` is the decoded and ``raw_path`` the raw path. ``authorization`` and ``x_api_key`` are the values of
        all headers with these names. If a request has both headers, they must contain the same key. The time of the
        check does not reveal which key matched, or how many characters of a wrong key are right.
        """
        if not self._tenants or (path in OPEN_PATHS and raw_path == path.encode()):
            return Caller()
        for name, values in (("Authorization", authorization), ("x-api-key", x_api_key)):
            if len(values) > 1:
                raise _unauthorized(f"several {name} headers were sent")
        if not authorization and not x_api_key:
            raise _unauthorized("no API key was sent")
        scheme, _, token = (authorization[0] if authorization else b"Bearer " + x_api_key[0]).partition(b" ")
        sent = _digest(token.strip())
        if authorization and x_api_key and not hmac.compare_digest(sent, _digest(x_api_key[0].strip())):
            raise _unauthorized("the headers Authorization and x-api-key have different keys")
        matches = 0
        for digest in self._tenants:
            matches += hmac.compare_digest(digest, sent)
        if scheme.lower() != b"bearer" or not matches:
            raise _unauthorized("the API key that was sent is not one of this server's")
        return Caller(sent.hex() if len(self._tenants) > 1 else "", self._tenants[sent])


def salt_for(holder: str, salt: str) -> str:
    """Salt for the prefix cache, different for each API key. Without it a client could measure response times to find
    out which prompts another key has cached. ``holder`` is ``Caller.holder``, ``salt`` the request's own
    ``cache_salt``."""
    return cache_key("holder", salt, holder.encode()).hex() if holder else salt


class HostCheck:
    """Checks names and addresses in Host headers.

    Allowed are the loopback names, the listening address, the name of this machine, and names from the settings. A
    server that listens on all addresses also allows any numeric address, because DNS rebinding needs a name. With keys
    and no names in the settings, all names are allowed: a page that reaches the server by DNS rebinding has no key.
    """

    def __init__(self, host: str, allowed: Sequence[str], has_keys: bool) -> None:
        self._wildcard = host in ("", "0.0.0.0", "::", "*")
        self._any = self._wildcard and has_keys and not allowed
        names = [*_LOOPBACK_NAMES, host, f"[{host}]", socket.gethostname(), *allowed]
        self._names = {name.lower().rstrip(".") for name in names}

    def check(self, hosts: Sequence[bytes]) -> None:
        """Raise ApiError unless there is exactly one Host header (400) with an allowed name (421)."""
        if len(hosts) != 1:
            raise ApiError(400, f"a request must have exactly one Host header, got {len(hosts)}", code="invalid_host")
        match = _HOST.fullmatch(hosts[0].decode("latin-1"))
        if match is None:
            raise ApiError(400, "the Host header is not a host name with or without a port", code="invalid_host")
        name = match[1].lower().rstrip(".")
        if not (self._any or name in self._names or (self._wildcard and _is_address(name))):
            raise ApiError(
                421,
                "this server does not answer under the name in the Host header; start it with --allowed-host NAME",
                code="host_not_allowed",
            )


def check_origin(path: str, host: bytes, sites: Sequence[bytes], origins: Sequence[bytes]) -> None:
    """Raise ApiError 403 for a request that a browser sends on behalf of a page of another origin.

    ``sites`` and ``origins`` are the values of all Sec-Fetch-Site and Origin headers, ``host`` is the value of the
    Host header. The browser sets Sec-Fetch-Site and Origin, and pages cannot change them. A client that sends neither
    header is not a browser. With keys this check is not needed, because a browser does not add a key by itself.
    """
    if path in PAGES:
        return
    if sites:
        foreign = any(site.strip().lower() not in (b"same-origin", b"none") for site in sites)
    else:
        foreign = any(not _same_origin(origin, host) for origin in origins)
    if foreign:
        name = host.decode("latin-1")
        given = ", ".join(origin.decode("latin-1") for origin in origins)
        whose = f"{given!a:.100}" if given else "another site"
        message = (
            f"a browser sent this request for a page of {whose}, but without an API key this server answers "
            f"only its own pages; open {name} itself, ask from a program, or start the server with --api-key-file"
        )
        raise ApiError(403, message, code="cross_origin")


def _same_origin(origin: bytes, host: bytes) -> bool:
    """Whether the Origin and Host headers name the same server. The port may be missing in Host, because a reverse
    proxy may remove it."""
    scheme, _, place = origin.strip().lower().partition(b"://")
    name = host.strip().lower()
    if _HOST_PORT.search(name) is None:
        place = _HOST_PORT.sub(b"", place)
    return scheme in (b"http", b"https") and place == name


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _unauthorized(reason: str) -> ApiError:
    message = f"{reason}; send the header Authorization: Bearer YOUR_KEY"
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
