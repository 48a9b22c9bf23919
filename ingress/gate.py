"""The gate as configuration and bucket make it, and what keeps it current."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from headrace import tenants
from headrace.bus import BrokerAway, BrokerRefused, Bus
from headrace.lifecycle import Tasks
from headrace.settings import BadSetting, ConfigFile, api_keys, guard_address
from headrace.tenant_settings import JwtSettings
from ingress.auth import Gate
from ingress.certificate import Certificates
from ingress.inspection import inspection_of
from ingress.jwks import KeySet
from ingress.jwt import BadKeys, Verifier, read_jwks, static_keys

log = logging.getLogger(__name__)

AT_ONCE_MAX: Final = 2000
"""More entries than these are written while the node serves: it knows its configuration anyway."""
RETRY_S: Final = 1.0


class Entrance:
    """A node's gate. `open` it once the broker is there, and `start` its tasks."""

    def __init__(self, config: ConfigFile, *, host: str, log_prompts: bool = False) -> None:
        """Read the configuration; `host` is the address that is served. Raises BadSetting."""
        self.inspection = inspection_of(config, log_prompts=log_prompts)
        keys = api_keys(config)
        guard_address(keys, host)
        self._config = config
        self._directory = tenants.Directory(keys.keys, config.tenancy)
        self._bus: Bus | None = None
        self._followed: tenants.Followed | None = None
        self._unwritten: Sequence[tenants.Change] = ()
        self._keys: KeySet | None = None
        jwt, mtls = config.tenancy.jwt, config.tenancy.mtls
        verifier = None if jwt is None else self._verifier(jwt)
        self.gate = Gate(
            directory=self._directory,
            verifier=verifier,
            certificates=None if mtls is None else Certificates(mtls),
            refresh=self._refresh,
            unknown_tenants=jwt is None or jwt.unknown_tenants == "admit",
        )

    def _verifier(self, settings: JwtSettings) -> Verifier:
        try:
            if settings.key is not None:
                verifier = Verifier(settings, static_keys(settings))
                if verifier.weak:
                    log.warning("[jwt] key is shorter than 32 bytes: it can be guessed from tokens")
                return verifier
            if settings.jwks_file is not None:
                read_jwks(Path(settings.jwks_file).read_bytes(), settings.used)
        except (OSError, BadKeys) as error:
            raise BadSetting(f"{self._config.path}: [jwt]: {error}") from error
        verifier = Verifier(settings)
        self._keys = KeySet(settings, verifier, clock=time.monotonic)
        return verifier

    async def _refresh(self) -> bool:
        return self._keys is not None and await self._keys.refresh()

    async def _keep(self, bus: Bus, followed: tenants.Followed) -> None:
        while self._unwritten:
            try:
                await tenants.write(bus, self._unwritten)
                self._unwritten = ()
            except (BrokerAway, BrokerRefused) as error:
                log.warning("the configuration's tenants are not all in the bucket: %s", error)
                await asyncio.sleep(RETRY_S)
        await followed.follow()

    async def open(self, bus: Bus, *, on_change: Callable[[], None]) -> None:
        """Read the bucket and write what the configuration says.

        `on_change` is called when tenants or keys have changed. Raises BrokerAway, BrokerRefused.
        """
        if self._keys is not None:
            await self._keys.refresh()
        self._bus = bus
        self._followed = tenants.Followed(bus, self._directory, on_change=on_change)
        stored = await self._followed.start()
        # The key of HEADRACE_API_KEY is this process's own, and stays out of the bucket.
        keys, tenancy = self._config.keys.keys, self._config.tenancy
        self._unwritten = tenants.seeding(stored, keys, tenancy, now_s=time.time())
        if self._unwritten:
            log.info("entries of the bucket tenants to be written anew: %d", len(self._unwritten))
        if len(self._unwritten) <= AT_ONCE_MAX:
            await tenants.write(bus, self._unwritten)
            self._unwritten = ()

    def start(self, tasks: Tasks) -> None:
        """Keep the gate current for as long as the node lives."""
        assert self._followed is not None
        assert self._bus is not None
        tasks.start("tenants", self._keep(self._bus, self._followed))
        if self._keys is not None:
            tasks.start("signing keys", self._keys.follow())
