"""A guard that keeps all tests from connecting to other machines."""

from __future__ import annotations

import ipaddress
import sys
from typing import Any

__all__ = ["OutboundConnection", "install", "may_reach"]

_GUARDED = {"socket.connect", "socket.sendto", "socket.sendmsg"}
_LOCAL_NAMES = {"localhost", ""}


class OutboundConnection(BaseException):
    """Error: an attempt to reach another machine. It is not a subclass of Exception, so that code with retries does not
    catch it."""


class _Guard:
    installed = False


def install() -> None:
    """Make every connection and name look-up to other machines fail, in this process and permanently.

    It uses an audit hook, which sees all of Python's sockets and cannot be removed. A second call has no effect.
    """
    if not _Guard.installed:
        _Guard.installed = True
        sys.addaudithook(_hook)


def may_reach(address: Any) -> bool:
    """Whether ``address``, in any form that ``socket.connect`` accepts, is on this machine: a Unix socket or a loopback
    address."""
    if not isinstance(address, tuple):
        return True  # a path, or an abstract name
    host = address[0]
    if not isinstance(host, (str, bytes)):
        return True  # netlink and similar
    name = host.decode("ascii", "replace") if isinstance(host, bytes) else host
    if name in _LOCAL_NAMES:
        return True
    try:
        found = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    # A connection to the unspecified address (0.0.0.0 or ::) reaches this machine.
    return (mapped or found).is_loopback or found.is_unspecified


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event in _GUARDED and len(args) > 1 and not may_reach(args[1]):
        raise OutboundConnection(f"{event} to {args[1]!r:.100}: tests stay on this machine")
    if event == "socket.getaddrinfo" and not may_reach((args[0] or "",)) and not _is_own_name(args[0]):
        raise OutboundConnection(f"look-up of {args[0]!r:.100}: tests stay on this machine")


def _is_own_name(host: Any) -> bool:
    import socket

    name = host.decode("ascii", "replace") if isinstance(host, bytes) else host
    return bool(name == socket.gethostname())
