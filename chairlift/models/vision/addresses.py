"""Reads images from addresses that a request contains. The addresses are untrusted.

A host must be in the operator's list, and must have only public IP addresses, so that no request can reach the
operator's own network through the server. The connection uses exactly the IP address that was checked. Redirects are
checked in the same way as the first address. Size, time and number of redirects are limited. A file must be in the
folder that the operator has set.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.client
import ipaddress
import os
import socket
import ssl
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from chairlift.base.timed_socket import TimedSocket
from chairlift.errors import RequestError
from chairlift.models.vision.decode import MAX_BYTES

__all__ = ["MediaSource", "is_public"]

_SECONDS: Final = 10.0
"""Maximum time in seconds to read all images of a request, including redirects."""
_PER_HOST: Final = 4
"""Maximum number of images that are read from one host at the same time, so that a slow host does not delay others."""
_MOST_HOSTS: Final = 8
"""Number of hosts that have all their threads at the same time."""
_GRACE: Final = 0.1
"""Seconds after the time limit of reading, in which the thread reports that the limit has passed."""
_REDIRECTS: Final = 3
_PIECE: Final = 1 << 16
_LONGEST: Final = 2048
"""Maximum number of characters in an address."""
_PORTS: Final = {"http": 80, "https": 443}
_MOVED: Final = (301, 302, 303, 307, 308)
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")

Resolve = Callable[[str, int], list[str]]
"""Function from (host, port) to the host's IP addresses."""


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet. IPv6 addresses that embed an IPv4 address are not accepted,
    because they may lead to a private one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo and ip.teredo[1])
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner:
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


class MediaSource:
    """Reads images from the hosts in ``domains`` and the files in ``folder``. ``read(where, url)`` returns the file at
    an address.

    ``resolve`` replaces the name service, and ``public`` replaces :func:`is_public`. Any thread may call ``read``, and
    one event loop :meth:`fetch`.
    """

    def __init__(
        self,
        domains: Sequence[str],
        folder: str | None,
        *,
        seconds: float = _SECONDS,
        resolve: Resolve | None = None,
        public: Callable[[str], bool] = is_public,
    ) -> None:
        self._domains = {each.lower().rstrip(".") for each in domains}
        self._folder = None if folder is None else Path(folder).resolve()
        self.seconds = seconds
        self._resolve = resolve or _addresses
        self._public = public
        self._places = {host: asyncio.Semaphore(_PER_HOST) for host in ("", *self._domains)}
        """Host in the list -> its places on the threads. The empty name is for files."""
        # These threads are separate from the server's threads, which must not wait for other machines.
        self._threads = concurrent.futures.ThreadPoolExecutor(
            _PER_HOST * min(len(self._places), _MOST_HOSTS), thread_name_prefix="chairlift-images"
        )

    def reads(self, url: str) -> bool:
        """Whether this object reads addresses of this kind: ``http:``, ``https:`` or ``file:``."""
        scheme = url[:6].lower().partition(":")[0]
        return (bool(self._domains) and scheme in _PORTS) or (self._folder is not None and scheme == "file")

    async def fetch(self, where: str, url: str, seconds: float) -> tuple[bytes, float]:
        """Read the file at an address as :meth:`read` does, on a thread of this object, in at most ``seconds``.
        Returns (the file, seconds that reading took). It first waits for one of the places of the address's host, for
        as long as it takes. A redirect to another host keeps the place."""
        host = (_split(where, url).hostname or "").rstrip(".")
        places = self._places.get(host) or self._places[""]
        loop = asyncio.get_running_loop()
        begun = asyncio.Event()

        def call(function: Callable[[], object]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(function)

        def work() -> tuple[bytes, float]:
            call(begun.set)
            start = time.monotonic()
            return self.read(where, url, start + seconds), time.monotonic() - start

        await places.acquire()
        # The place is free when the thread is. If the request is cancelled or late, that is later.
        reading = self._threads.submit(work)
        reading.add_done_callback(lambda _: call(places.release))
        found = asyncio.wrap_future(reading)
        found.add_done_callback(lambda each: each.cancelled() or each.exception())  # the caller may have left
        try:
            await begun.wait()
            # The name service has no time limit, so a thread that waits for it is left alone.
            await asyncio.wait({found}, timeout=seconds + _GRACE)
        except asyncio.CancelledError:
            found.cancel()
            raise
        if not found.done():
            raise self._late(where)
        return found.result()

    def read(self, where: str, url: str, end: float | None = None) -> bytes:
        """Return the file at an address. ``where`` names the image in errors. ``end`` is the deadline, a time of the
        monotonic clock. Raises RequestError."""
        parts = _split(where, url)
        end = time.monotonic() + self.seconds if end is None else end
        return self._file(where, parts) if parts.scheme == "file" else self._fetch(where, url, end)

    def _file(self, where: str, parts: SplitResult) -> bytes:
        folder = self._folder
        if folder is None or parts.netloc not in ("", "localhost"):
            raise RequestError(f"{where} names a file of another machine; send the image itself")
        missing = f"{where} names no image file in the server's folder for images; send the image itself"
        try:
            path = Path(unquote(parts.path, errors="strict")).resolve(strict=True)
            if not path.is_relative_to(folder):
                raise RequestError(missing)
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise RequestError(missing)
                data = file.read(MAX_BYTES + 1)
        except (OSError, ValueError, RuntimeError):
            raise RequestError(missing) from None
        return data

    def _fetch(self, where: str, url: str, end: float) -> bytes:
        secure = False
        for _ in range(_REDIRECTS + 1):
            parts = _split(where, url)
            if parts.scheme not in _PORTS or (secure and parts.scheme != "https"):
                raise RequestError(f"{where} leads to an address of {parts.scheme!r:.20}; send the image itself")
            secure = parts.scheme == "https"
            found = self._get(where, parts, end)
            if isinstance(found, bytes):
                return found
            try:
                url = urljoin(url, found)
            except ValueError:
                raise RequestError(f"{where} was redirected to what is no address; send the image itself") from None
        raise RequestError(f"{where} was redirected more than {_REDIRECTS} times; send the last address")

    def _get(self, where: str, parts: SplitResult, end: float) -> bytes | str:
        """Content at one address (bytes), or the address to which it redirects (str)."""
        host = (parts.hostname or "").rstrip(".")
        port = parts.port or _PORTS[parts.scheme]
        if host not in self._domains:
            named = ", ".join(sorted(self._domains))
            raise RequestError(f"{where} is on {host!r:.80}, but images are read from {named} only; send it itself")
        try:
            addresses = self._resolve(host, port)
        except OSError:
            raise RequestError(f"{where}: the host {host!r:.80} is not found; check its spelling") from None
        if not addresses or not all(map(self._public, addresses)):
            raise RequestError(f"{where}: the host {host!r:.80} has a private address, which is not read")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            with _connected(host, port, addresses[0], parts.scheme == "https", end) as sock:
                connection = http.client.HTTPConnection(host, port)
                connection.sock = TimedSocket(sock, end)
                connection.request("GET", path, headers={"User-Agent": "chairlift", "Accept": "image/*"})
                with connection.getresponse() as response:
                    return _content(where, response)
        except RequestError:
            raise
        except TimeoutError:
            raise self._late(where) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RequestError(f"{where} cannot be read ({type(error).__name__}); send the image itself") from None

    def _late(self, where: str) -> RequestError:
        return RequestError(f"{where} took longer than {self.seconds:g} s; send the image itself")


def _connected(host: str, port: int, address: str, secure: bool, end: float) -> socket.socket:
    """A connection to one IP address of a host. Raises TimeoutError at ``end``, a time of the monotonic clock."""
    if (left := end - time.monotonic()) <= 0:
        raise TimeoutError
    sock = socket.create_connection((address, port), left)
    if not secure:
        return sock
    try:
        sock.settimeout(max(end - time.monotonic(), 0.001))
        return ssl.create_default_context().wrap_socket(sock, server_hostname=host)
    except BaseException:
        sock.close()
        raise


def _content(where: str, response: http.client.HTTPResponse) -> bytes | str:
    if response.status in _MOVED and (location := response.headers.get("Location")):
        return location
    if response.status != 200:
        raise RequestError(f"{where} answers {response.status}; send the address of an image, or the image itself")
    data = bytearray()
    while piece := response.read(_PIECE):
        data += piece
        if len(data) > MAX_BYTES:
            raise RequestError(f"{where} is larger than {MAX_BYTES:,} bytes, the limit for an image file")
    if response.length:  # the connection ended before
        raise http.client.IncompleteRead(b"")
    return bytes(data)


def _split(where: str, url: str) -> SplitResult:
    wrong = f"{where} is no address of an image"
    if len(url) > _LONGEST or not url.isascii() or any(each <= " " or each == "\x7f" for each in url):
        raise RequestError(f"{wrong}: up to {_LONGEST:,} printable ASCII characters are read; encode others")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise RequestError(f"{wrong}; send one such as https://example.com/cat.png") from None
    if parts.username is not None or parts.password is not None or port == 0:
        raise RequestError(f"{wrong}: names of users, passwords and port 0 are refused")
    return parts


def _addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))
