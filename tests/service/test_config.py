"""Configuration: precedence of the sources, profiles, refusals by name."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from megamoe import Path as MoePath
from megamoe import RowFormat
from megamoe.errors import ConfigError
from service.config import MIB, PROFILES, ServiceConfig, default_text, load_config


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("MEGAMOE_"):
            monkeypatch.delenv(name)


def capacities(config: ServiceConfig) -> dict[str, tuple[int, ...]]:
    return {str(path): config.bundle.capacities(path) for path in MoePath}


def test_demo_profile_is_the_default_and_serves_all_paths() -> None:
    config = load_config()
    assert capacities(config) == {
        "small_m": (16, 32),
        "fixed_slot": (64,),
        "large_m": (512,),
        "compact": (512,),
    }
    assert config.large_m_min_tokens == 128
    assert config.small_m_enabled
    assert config.large_m_enabled
    assert config.label == "demo"


def test_other_profiles() -> None:
    emulated = load_config(overrides={"profile": "emulated"})
    assert capacities(emulated) == {
        "small_m": (8, 16),
        "fixed_slot": (32,),
        "large_m": (64,),
        "compact": (64,),
    }
    real = load_config(overrides={"profile": "deepseek-v4-pro-ep8"})
    assert capacities(real)["compact"] == (8192,)
    assert real.moe_shape.num_layers == 61
    assert real.message_bytes == 4 * 8192 * (2 * 7168 + 48) + 65536


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("profile: emulated\nport: 1111\nhttp_port: 2222\nstep_timeout_s: 3.5\nbackend: cpu\n")
    monkeypatch.setenv("MEGAMOE_PORT", "3333")
    monkeypatch.setenv("MEGAMOE_HTTP_PORT", "4444")
    config = load_config(file, {"port": 5555, "host": None})
    assert (config.port, config.http_port, config.step_timeout_s) == (5555, 4444, 3.5)
    assert config.max_tokens_per_rank == 64, "the profile that the file names"
    assert config.backend == "cpu", "the file overrides the profile"
    assert config.host == "127.0.0.1"


def test_toml_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "service.toml"
    file.write_text(
        'combine_row_format = "fp8"\nmax_tokens_per_rank = 64\nlarge_m_capacity = 128\n'
        "[shape]\nhidden = 64\nintermediate = 32\nnum_experts = 16\nnum_topk = 2\nname = 'mine'\n"
    )
    monkeypatch.setenv("MEGAMOE_SMALL_M_CAPACITIES", "[8]")
    monkeypatch.setenv("MEGAMOE_NUM_LAYERS", "3")
    config = load_config(file)
    assert config.moe_shape.name == "mine"
    assert config.moe_shape.num_layers == 3
    assert config.combine_row_format is RowFormat.FP8
    assert config.small_m_capacities == (8,)
    assert "at least 128, got 64" in config.bundle.reasons[MoePath.LARGE_M]


def test_shape_preset_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_SHAPE", "kimi-k2")
    assert load_config().moe_shape.hidden == 7168
    monkeypatch.setenv("MEGAMOE_SHAPE", json.dumps({"hidden": 64}))
    with pytest.raises(ConfigError, match="shape must be a preset or a full table"):
        load_config()


SMALL = {"hidden": 64, "intermediate": 32, "num_experts": 8, "num_topk": 2}


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"profile": "huge"}, "profile must be one of demo, .*, got 'huge'"),
        ({"shape": "huge"}, "shape preset must be one of .*, got 'huge'"),
        ({"shape": {"hiden": 3}}, r"shape must be a table of hidden, .*, got \['hiden'\]"),
        ({"num_ranks": 3}, "num_ranks must be 1, 2, 4 or 8"),
        ({"step_timeout_s": float("inf")}, "step_timeout_s must .* less than or equal to 86400, got inf"),
        ({"lease_timeout_s": 1e300}, "lease_timeout_s must .* less than or equal to 86400"),
        ({"stop_timeout_s": float("nan")}, "stop_timeout_s must "),
        ({"rank_cpus": float("inf")}, "rank_cpus must .* finite"),
        ({"large_m_min_tokens": 2**32}, "large_m_min_tokens must be at most 2147483647, got 4294967296"),
        ({"torch_threads": 10**23}, "torch_threads must .* less than or equal to 1024"),
        ({"rank_cpus": 1e30}, "rank_cpus must .* less than or equal to 1024"),
        ({"max_step_rows": 2**31}, "max_step_rows must .* less than or equal to 2147483647"),
        ({"max_message_bytes": 100}, "max_message_bytes must be at least 66096, one row, got 100"),
        ({"max_message_bytes": 2**31}, "max_message_bytes must .* less than or equal to 2147483647"),
        ({"host": ""}, "host must "),
        ({"host": "a b"}, "host must "),
        ({"shape": SMALL | {"hidden": "64"}}, "hidden must be a whole number, got '64'"),
        ({"shape": SMALL | {"hidden": 64.0}}, "hidden must be a whole number, got 64.0"),
        ({"shape": SMALL | {"num_topk": True}}, "num_topk must be a whole number, got True"),
        ({"shape": SMALL | {"swiglu_limit": "10"}}, "swiglu_limit must be a number, got '10'"),
        (
            {"shape": SMALL | {"fused_shared_expert": "no"}},
            "fused_shared_expert must be true or false, got 'no'",
        ),
        ({"shape": SMALL | {"name": "x" * 101}}, "name must be a name of 1 to 100 characters"),
        ({"port": 70000}, "^port must be less than or equal to 65535, got 70000$"),
        ({"port": "abc"}, "^port must be a valid integer, .*, got 'abc'$"),
        ({"launcher": "slurm"}, "^launcher must be 'ray' or 'local', got 'slurm'$"),
        ({"shape": {"hidden": 64, "num_topk": 2}}, "a full table, got .* without intermediate, num_experts$"),
        ({"small_m_capacities": [3]}, "^small_m_capacities must be powers of two, got 3"),
        ({"large_m_capacity": 3}, "^large_m_capacity must be a power of two, got 3"),
        ({"max_tokens_per_rank": 100}, "max_tokens_per_rank must be a power of two"),
        ({"batch_invariant": True, "combine_row_format": "auto"}, "combine_row_format must be bf16 or fp8"),
        ({"checkpoint": "/nowhere/at/all"}, "checkpoint must be a folder"),
        ({"rank_port": 65535}, "rank_port must be below 65536 for every rank"),
        ({"prot": 3}, r"^prot must be a known setting \(perhaps port\), got 3$"),
        ({"colour": 3}, r"^colour must be a known setting, got 3$"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refusals_name_the_field(overrides: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config(overrides=overrides)


def test_misspelled_variables_and_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="config file must be a readable file"):
        load_config(tmp_path / "no.yaml")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ConfigError, match="must be a .yaml, .yml or .toml, got a.json"):
        load_config(tmp_path / "a.json")
    (tmp_path / "b.toml").write_text("port = = 3")
    with pytest.raises(ConfigError, match=r"b.toml cannot be read"):
        load_config(tmp_path / "b.toml")
    (tmp_path / "c.yaml").write_text("portt: 3")
    with pytest.raises(ConfigError, match="portt must be a known setting"):
        load_config(tmp_path / "c.yaml")
    (tmp_path / "d.yaml").write_text("- 1\n- 2\n")
    with pytest.raises(ConfigError, match="d.yaml must be a table of settings, got a list"):
        load_config(tmp_path / "d.yaml")
    (tmp_path / "e.yaml").write_text("num_ranks: [8\n")
    with pytest.raises(ConfigError, match="e.yaml cannot be read: .*line 1"):
        load_config(tmp_path / "e.yaml")
    (tmp_path / "f.yaml").write_text("# nothing chosen\n")
    assert load_config(tmp_path / "f.yaml") == load_config()
    monkeypatch.setenv("MEGAMOE_PROT", "3")
    with pytest.raises(ConfigError, match=r"\(perhaps MEGAMOE_PORT\), got MEGAMOE_PROT"):
        load_config()


@pytest.mark.parametrize("written", ["8,16", "[8, 16]", " 8, 16 "])
def test_lists_in_the_environment_are_written_as_on_the_command_line(
    written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAMOE_SMALL_M_CAPACITIES", written)
    assert load_config().small_m_capacities == (8, 16)


@pytest.mark.parametrize(
    ("name", "written", "sentence"),
    [
        ("SMALL_M_CAPACITIES", "8;16", "small_m_capacities must be numbers with commas between, got '8;16'"),
        (
            "SMALL_M_CAPACITIES",
            "[8,16",
            r"small_m_capacities must be numbers with commas between, got '\[8,16'",
        ),
        ("SHAPE", "{hidden", "shape must be a preset or a JSON table"),
        ("BATCH_INVARIANT", "maybe", "batch_invariant must be a valid boolean"),
    ],
)
def test_values_in_the_environment_are_refused_by_name(
    name: str, written: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAMOE_" + name, written)
    with pytest.raises(ConfigError, match=sentence):
        load_config()


def test_defaults_are_told_with_what_profiles_set_instead() -> None:
    assert default_text("max_tokens_per_rank") == "8192; demo: 512; emulated: 64"
    assert default_text("small_m_capacities") == "256,512; demo: 16,32; emulated: 8,16"
    assert default_text("restart") == "true"
    assert default_text("checkpoint") == ""


def test_config_travels_to_rank_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(overrides={"port": 7, "small_m_capacities": [8, 16]})
    monkeypatch.setenv("MEGAMOE_PORT", "9")
    as_json = ServiceConfig(**json.loads(config.model_dump_json()))
    assert as_json == config
    assert as_json.port == 7
    assert pickle.loads(pickle.dumps(config)) == config


def test_message_limit_follows_the_step() -> None:
    assert load_config().message_bytes == 4 * MIB, "gRPC's own default is the least"
    assert load_config(overrides={"max_message_bytes": 5 * MIB}).message_bytes == 5 * MIB


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_every_profile_stands(name: str) -> None:
    assert load_config(overrides={"profile": name}).profile == name
