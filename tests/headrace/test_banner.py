"""The command that `headrace up` shows: what stands in its Authorization header."""

import json
import subprocess

import pytest

from headrace import banner, tenants, topology
from headrace.banner import curl
from headrace.bus import Bus
from headrace.settings import ConfigFile
from headrace.tenant_settings import ApiKeys, JwtSettings, MtlsSettings, Tenancy, key_of
from schemas.tenant import Entry, Key, Tenant
from tests.broker import with_bus
from tests.servers import NatsServer

JWT = JwtSettings(key="k" * 32)
MTLS = MtlsSettings(header="x-subject", proxies=("127.0.0.1",))
KEYS = (key_of("acme", "secret"),)
NONE = ConfigFile()


def config(*, keys: bool = False, **tenancy: object) -> ConfigFile:
    found = Tenancy(**tenancy)  # type: ignore[arg-type]
    return ConfigFile(keys=ApiKeys(KEYS if keys else (), found.guarded), tenancy=found)


@pytest.mark.parametrize(
    ("said", "environ", "expected"),
    [
        (NONE, {}, None),
        (NONE, {"HEADRACE_API_KEY": ""}, None),
        (NONE, {"HEADRACE_API_KEY": "s"}, "$HEADRACE_API_KEY"),
        (config(keys=True), {}, "KEY"),
        (config(keys=True), {"HEADRACE_API_KEY": "s"}, "$HEADRACE_API_KEY"),
        (config(tenants={"t": Tenant(name="t")}), {}, "KEY"),
        (config(jwt=JWT), {}, "TOKEN"),
        (config(jwt=JWT), {"HEADRACE_API_KEY": "s"}, "$HEADRACE_API_KEY"),
        (config(jwt=JWT, keys=True), {}, "KEY"),
        (config(mtls=MTLS), {}, None),
        (config(mtls=MTLS, jwt=JWT), {}, "TOKEN"),
    ],
)
def test_the_header_names_what_is_needed_and_the_variable_only_where_it_is_set(
    said: ConfigFile, environ: dict[str, str], expected: str | None
) -> None:
    directory = tenants.Directory(said.keys.keys, said.tenancy)
    assert banner.bearer_of(directory, said, environ) == expected


def test_keys_that_stand_in_the_bucket_alone_count_revoked_or_not(own_nats: NatsServer) -> None:
    key = Key(tenant="acme", sha256=KEYS[0].sha256)

    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        assert await banner.bearer(bus, NONE, {}) is None
        await tenants.put(bus, "key", key.id, Entry(value=key))
        assert await banner.bearer(bus, NONE, {}) == "KEY"
        assert await banner.bearer(bus, NONE, {"HEADRACE_API_KEY": "s"}) == "$HEADRACE_API_KEY"
        await tenants.put(bus, "key", key.id, Entry(value=key, gone_s=1.0))
        assert await banner.bearer(bus, NONE, {}) == "KEY"  # the gate stays closed

    with_bus(own_nats.url, test)


def test_the_curl_line_names_the_variable_of_the_key_not_the_key() -> None:
    line = curl("http://h", "it's", bearer="$HEADRACE_API_KEY")
    assert '-H "Authorization: Bearer $HEADRACE_API_KEY"' in line
    assert "\n" not in line
    probe = line.replace("curl -N", "printf '%s\\n'")
    said = subprocess.run(["sh", "-c", probe], capture_output=True, text=True).stdout.splitlines()
    assert json.loads(said[-1])["model"] == "it's"
