"""TLS of the listening socket: a context whose certificate follows its files, so that renewing needs no restart."""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from gateway.errors import SettingsError

_log = logging.getLogger(__name__)
_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}

Mark = tuple[tuple[int, int, int], ...]
"""What tells that a file is another one, or another text: inode, size and time of each."""


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """See ``gateway.settings.TlsSettings``."""

    certificate: Path
    key: Path
    minimum: str = "1.2"
    look_s: float = 10.0


class Certificate:
    """A server's context. New connections get what the files held when they were last looked at and were whole."""

    def __init__(self, options: TlsOptions) -> None:
        """Raises ``SettingsError`` for files that are no certificate with its key."""
        self._options = options
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = _VERSIONS[options.minimum]
        self.context.set_alpn_protocols(["http/1.1"])
        self._mark = self._look()
        try:
            self._load()
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(f"server.tls: {options.certificate}, {options.key}: {error}") from None

    def _load(self) -> None:
        # A key with a passphrase would ask for it on the terminal: it is refused instead.
        self.context.load_cert_chain(self._options.certificate, self._options.key, password=lambda: b"")

    def _look(self) -> Mark | None:
        try:
            found = [path.stat() for path in (self._options.certificate, self._options.key)]
        except OSError:
            return None
        return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in found)

    def refresh(self) -> bool:
        """Load the files if they changed; return whether that was so. Files that do not fit leave what there was."""
        mark = self._look()
        if mark is None or mark == self._mark:
            return False
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                self._options.certificate, self._options.key, password=lambda: b""
            )  # elsewhere first: a context that failed half-way would serve a certificate without its key
            self._load()
        except (OSError, ssl.SSLError) as error:
            _log.error("the new certificate is not used: %s", error)
            self._mark = mark
            return False
        self._mark = mark
        _log.info("the certificate was read again")
        return True

    async def run(self) -> None:
        """Look now and then, for ever."""
        while True:
            await asyncio.sleep(self._options.look_s)
            self.refresh()  # here, not in a thread: handshakes use the context meanwhile
