"""What headrace.toml may say of tenants, and that every other word is named at the start."""

from pathlib import Path

import pytest

from headrace import settings
from headrace.settings import BadSetting, ConfigFile, load_config
from headrace.tenant_settings import JwtSettings, MtlsSettings, Tenancy
from schemas.tenant import Tenant, Tier

DIGEST = "ab" * 32
WHOLE = f"""
port = 9000
[[tiers]]
name = "gold"
requests_per_minute = 600
weight = 3
[[tenants]]
name = "acme"
tier = "gold"
requests_per_minute = 60
tokens_per_minute = 100000
burst = 10
concurrent_requests = 8
queued_requests = 0
max_input_tokens = 4096
max_output_tokens = 1024
models = ["a", "b"]
weight = 2
priority_class = "interactive"
deadline_s = 30
share_prefixes = true
on_revoke = "end"
[[keys]]
tenant = "acme"
sha256 = "{DIGEST}"
[jwt]
algorithms = ["RS256"]
jwks_file = "keys.json"
audience = ["headrace"]
issuer = "https://id.example"
tenant_claim = "org"
[mtls]
header = "x-client-dn"
proxies = ["10.0.0.0/8"]
"""


def read(tmp_path: Path, text: str) -> ConfigFile:
    file = tmp_path / "headrace.toml"
    file.write_text(text)
    return load_config(file)


def test_every_table_is_read(tmp_path: Path) -> None:
    found = read(tmp_path, WHOLE)
    acme = Tenant(
        name="acme",
        tier="gold",
        requests_per_minute=60,
        tokens_per_minute=100_000,
        burst=10,
        concurrent_requests=8,
        queued_requests=0,
        max_input_tokens=4096,
        max_output_tokens=1024,
        models=("a", "b"),
        weight=2,
        priority_class="interactive",
        deadline_s=30.0,
        share_prefixes=True,
        on_revoke="end",
    )
    gold = Tier(name="gold", requests_per_minute=600, weight=3)
    jwt = JwtSettings(
        algorithms=("RS256",),
        jwks_file=str(tmp_path / "keys.json"),
        audience=("headrace",),
        issuer="https://id.example",
        tenant_claim="org",
    )
    mtls = MtlsSettings(header="x-client-dn", proxies=("10.0.0.0/8",))
    assert found.tenancy == Tenancy({"acme": acme}, {"gold": gold}, jwt, mtls)
    assert found.options == {"port": 9000}
    assert [key.tenant for key in found.keys.keys] == ["acme"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            '[[tenants]]\nname="a"\nrequests_per_minut=1',
            "'requests_per_minut' in [[tenants]] is no",
        ),
        ('[[tenants]]\nname="a"\nrequests_per_minut=1', "did you mean 'requests_per_minute'?"),
        ('[[tiers]]\nname="a"\ntier="b"', "'tier' in [[tiers]] is no setting"),
        ('[[tenants]]\nname="a"\nmodel="b"', "'model' in [[tenants]]"),
        ("[[tenants]]\nweight=1", "missing required field `name`"),
        ('[[tenants]]\nname=""', "name"),
        ('[[tenants]]\nname="a\\n"', "name"),
        ('[[tenants]]\nname="a"\nweight=0', "'a': Expected `int` >= 1 - at `$.weight`"),
        ('[[tenants]]\nname="a"\nweight="2"', "weight"),
        ('[[tenants]]\nname="a"\nburst=1.5', "burst"),
        ('[[tenants]]\nname="a"\nrequests_per_minute=-1', "requests_per_minute"),
        ('[[tenants]]\nname="a"\nmodels="b"', "models"),
        ('[[tenants]]\nname="a"\npriority_class="urgent"', "priority_class"),
        ('[[tenants]]\nname="a"\ndeadline_s=841', "deadline_s"),
        ('[[tenants]]\nname="a"\non_revoke="kill"', "on_revoke"),
        ('[[tenants]]\nname="a"\ntier="gone"', "tenant 'a': there is no tier 'gone'"),
        ('[[tenants]]\nname="a"\n[[tenants]]\nname="a"', "'a' stands in [[tenants]] twice"),
        ('[tenants]\nname="a"', "tenants are tables: write [[tenants]]"),
        ("tenants = 3", "tenants are tables"),
        ('[[jwt]]\nkey="a"', "[jwt] is a table"),
        ('[jwt]\nkey="a"\nsecret="b"', "'secret' in [jwt] is no setting"),
        ("[jwt]\naudience='x'", "[jwt] needs one of key, jwks_file and jwks_url"),
        ('[jwt]\nkey="k"\nalgorithms=["none"]', "algorithms"),
        ('[jwt]\nkey="k"\nalgorithms=["HS512"]', "algorithms"),
        ('[jwt]\njwks_url="http://id.example/k"', "jwks_url must be https"),
        ('[mtls]\nheader="x-dn"', "missing required field `proxies`"),
        ('[mtls]\nheader="x-dn"\nproxies=["nginx"]', "nginx"),
        ('[mtls]\nheader="x-dn"\nproxies=["10.0.0.1"]\nca="f"', "'ca' in [mtls] is no setting"),
        (f'[[keys]]\ntenant="a\\u0000"\nsha256="{DIGEST}"', "each of [[keys]] needs a tenant"),
    ],
)
def test_what_cannot_be_so_is_named(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(BadSetting) as refused:
        read(tmp_path, text)
    assert reason in str(refused.value)
    assert "headrace.toml" in str(refused.value)


@pytest.mark.parametrize(
    "text",
    ['[[tenants]]\nname="a"', '[jwt]\nkey="k"', '[mtls]\nheader="x"\nproxies=["10.0.0.1"]'],
)
def test_tenants_tokens_and_certificates_each_turn_authentication_on(
    tmp_path: Path, text: str
) -> None:
    found = read(tmp_path, text)
    assert settings.api_keys(found, {})
    assert settings.api_keys(found, {"HEADRACE_API_KEY": "k"})
    settings.guard_address(settings.api_keys(found, {}), "0.0.0.0")  # is refused to the keyless


def test_tiers_alone_do_not(tmp_path: Path) -> None:
    assert not settings.api_keys(read(tmp_path, '[[tiers]]\nname="a"'), {})


@pytest.mark.parametrize("name", ["a\\u001b[31m", "a\\u009b31m", "a\\u202eb", "a\\u2028b", ""])
def test_a_name_that_would_command_a_terminal_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadSetting, match="name"):
        read(tmp_path, f'[[tenants]]\nname = "{name}"\n')
