"""Facts about settings: the order, the file's keys, and what is refused."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace import settings
from headrace.settings import ApiKey, EngineKind, JsonObject


@dataclass(frozen=True, kw_only=True)
class Everything(
    settings.EngineSettings,
    settings.ListenSettings,
    settings.CorsSettings,
    settings.LineSettings,
    settings.WebSocketSettings,
    settings.NodeSettings,
):
    pass


def read(*flags: str, environ: dict[str, str] | None = None) -> Everything:
    found: list[Everything] = []
    result = CliRunner().invoke(
        settings.command(Everything, found.append), flags, env=environ, catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return found[0]


def refusal(*flags: str, environ: dict[str, str] | None = None) -> str:
    result = CliRunner().invoke(settings.command(Everything, lambda _: None), flags, env=environ)
    assert result.exit_code == 2
    return result.output


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str) -> str:
    Path("other.toml").write_text(text)
    return "other.toml"


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default() -> None:
    file = write("port = 3\nadmin_port = 3\ngrace_s = 3\n")
    found = read(
        "--config",
        file,
        "--port",
        "1",
        environ={"HEADRACE_PORT": "2", "HEADRACE_ADMIN_PORT": "2"},
    )
    assert (found.port, found.admin_port, found.grace_s) == (1, 2, 3)
    assert found.host == "127.0.0.1"


def test_the_file_in_the_working_directory_is_read_unnamed() -> None:
    Path("headrace.toml").write_text('engine = "vllm"\nworkers = 3\n')
    assert read().engine is EngineKind.VLLM


def test_an_unknown_key_is_named_with_the_nearest_known_one() -> None:
    output = refusal("--config", write("admn_port = 1\n"))
    assert "'admn_port' is no setting; did you mean 'admin_port'?" in output


def test_an_unknown_table_is_named() -> None:
    assert "'tenents' is no setting" in refusal("--config", write("[[tenents]]\nname = 'a'\n"))


def test_a_file_that_was_named_must_exist() -> None:
    assert "gone.toml cannot be read" in refusal("--config", "gone.toml")


def test_a_value_of_the_wrong_type_in_the_file_is_refused() -> None:
    assert "port" in refusal("--config", write('port = "http"\n'))


@pytest.mark.parametrize("figure", ["-1", "inf", "nan", "1e300"])
@pytest.mark.parametrize("name", ["grace_s", "port", "admin_port", "queue_patience_s"])
def test_a_figure_that_no_node_could_keep_is_refused_by_name(name: str, figure: str) -> None:
    assert name.replace("_", "-") in refusal("--config", write(f"{name} = {figure}\n"))


def test_json_options_come_from_flags_and_tables() -> None:
    file = write("engine_args = {block_size = 32}\nsim = {prefill_ms = 1.5}\n")
    found = read("--config", file, "--sim", '{"decode_ms": 2}')
    assert found.engine_args.values == {"block_size": 32}
    assert found.sim.values == {"decode_ms": 2}
    assert read().engine_args == JsonObject("{}")


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_json_options_that_are_no_object_are_refused(text: str) -> None:
    assert "is no JSON" in refusal("--engine-args", text)


def test_keys_come_from_the_file_and_the_environment() -> None:
    digest = "AB" * 32
    file = write(f'[[keys]]\ntenant = "acme"\nsha256 = "{digest}"\n')
    found = settings.api_keys(read("--config", file).config, {"HEADRACE_API_KEY": "secret"})
    assert found.keys == (
        ApiKey("default", hashlib.sha256(b"secret").hexdigest()),
        ApiKey("acme", digest.lower()),
    )
    assert not settings.api_keys(read().config, {})


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ('tenant = "a"', "needs sha256"),
        ('tenant = "a"\nsha256 = "abc"', "needs sha256"),
        (f'sha256 = "{"0" * 64}"', "needs a tenant"),
        ('tenant = "a"\nsecret = "b"', "'secret' in [[keys]] is no setting"),
    ],
)
def test_a_key_that_is_not_whole_is_refused(table: str, reason: str) -> None:
    assert reason in refusal("--config", write(f"[[keys]]\n{table}\n"))


def test_origins_may_be_repeated_joined_by_commas_or_listed_in_the_file() -> None:
    two = {"https://a.example", "http://b.example:3000"}
    assert read().cors_origins == set()
    flags = ("--cors-origin", "https://a.example", "--cors-origin", "http://B.example:3000")
    assert read(*flags).cors_origins == two
    joined = "https://a.example, http://b.example:3000"
    assert read("--cors-origin", joined).cors_origins == two
    assert read(environ={"HEADRACE_CORS_ORIGIN": joined.replace(" ", "")}).cors_origins == two
    name = write('cors_origin = ["https://a.example", "http://b.example:3000"]')
    assert read("--config", name).cors_origins == two
    assert read("--cors-origin", "*").cors_origins == {"*"}


@pytest.mark.parametrize("origin", ["a.example", "https://a.example/", "null"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    assert "is no origin" in refusal("--cors-origin", origin)
