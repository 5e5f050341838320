"""The config file: one schema, errors that name the key, the same file for Serve's own tools."""

from __future__ import annotations

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from paceline.demo import DIFFUSION_DIR, DRAFTER_DIR, TARGET_DIR, TRANSLATION_DIR
from paceline.deployments import drafter as drafter_replica
from paceline.deployments.app import DRAFTER, GATEWAY, TARGET, build
from paceline.deployments.config import CONFIGS_DIR, parse_config, read_config_file
from paceline.drafters.diffuspec import DiffuSpec
from paceline.drafters.head import HeadDrafter
from paceline.drafters.non_autoregressive import NonAutoregressive
from paceline.errors import InvalidArgument, ModelNotFound

SHIPPED = sorted(CONFIGS_DIR.glob("*.yaml"))
POLICY = "applications[0].autoscaling_policy"


def _names(application: Any) -> set[str]:
    """The deployments of an application that is not deployed yet."""
    bound = application._bound_deployment
    inner = [
        a
        for a in (*bound.init_args, *bound.init_kwargs.values())
        if hasattr(a, "_bound_deployment")
    ]
    return {bound.name}.union(*(_names(each) for each in inner))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_files_serve_all_three_commands(path: Path) -> None:
    file = read_config_file(path)  # paceline up
    schema = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))  # serve deploy, run
    (application,) = schema.applications
    assert application.import_path == "paceline.deployments.app:build"
    assert application.args == file.args
    assert parse_config(application.args) == file.config
    names = _names(build(application.args))
    assert names == {TARGET, GATEWAY} | ({DRAFTER} if file.config.topology == "actors" else set())


def test_threads_may_build_applications_at_once() -> None:
    was = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # without the lock, some of them fail
    try:
        with ThreadPoolExecutor(4) as pool:
            applications = list(pool.map(build, [{}] * 120))
    finally:
        sys.setswitchinterval(was)
    assert len(applications) == 120


def test_defaults_are_the_demo_pair_as_actors() -> None:
    config = parse_config({})
    assert config.topology == "actors"
    assert config.target_folder == str(TARGET_DIR)
    assert config.drafter_folder == str(DRAFTER_DIR)
    assert config.gateway.host == "127.0.0.1"
    assert config.gateway.grpc_port == 50051
    assert config.data_plane == "loopback"
    assert config.num_threads(num_cpus=8) == 1  # small


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({"topologi": "actors"}, "topologi"),
        ({"topology": "device"}, "topology"),
        ({"model": {"dtyp": "float32"}}, "model.dtyp"),
        ({"model": {"dtype": "float8"}}, "model.dtype"),
        ({"model": {"dtype": "q8_0"}, "engine": "vllm"}, "model.dtype"),
        ({"model": {"threads": 0}}, "model.threads"),
        ({"target": {"num_cpus": 0}}, "target.num_cpus"),
        ({"target": {"num_replicas": 0}}, "target.num_replicas"),
        ({"target": {"limits": {"max_session": 1}}}, "target.limits.max_session"),
        ({"target": None}, "target"),
        ({"target": {"numerics": "exact"}}, "target.numerics"),
        ({"target": {"numerics_mismatch": "ask"}}, "target.numerics_mismatch"),
        (
            {
                "engine": "vllm",
                "speculation": {"method": "prompt_lookup"},
                "target": {"numerics": "portable"},
            },
            "target.numerics",
        ),
        ({"drafter": {"deadline_s": float("nan")}}, "drafter.deadline_s"),
        ({"gateway": {"grpc_port": 70000}}, "gateway.grpc_port"),
        ({"gateway": {"port": 1}}, "gateway.port"),
        ({"speculation": {"method": "magic"}}, "speculation.method"),
        ({"speculation": {"methods": "ar"}}, "speculation.methods"),
        ({"speculation": {"method": "ar", "ngram_max": 3}}, "speculation.ngram_max"),
        ({"speculation": {"num_speculative_tokens": 1000}}, "speculation.num_speculative_tokens"),
        ({"model": {"target": str(TARGET_DIR)}}, "model.drafter"),
        (
            {
                "model": {"target": str(TARGET_DIR)},
                "topology": "colocated",
                "speculation": {"method": "draft_model"},
            },
            "speculation.method",
        ),
    ],
)
def test_wrong_values_are_named(args: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_config(args)
    assert caught.value.field == field
    with pytest.raises(InvalidArgument):
        build(args)  # the way of `serve run`


def test_unknown_keys_and_methods_list_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match="kv_tokens"):
        parse_config({"model": {"kv_size": 1}})
    with pytest.raises(InvalidArgument, match=r"draft_model.*prompt_lookup"):
        parse_config({"speculation": {"method": "magic"}})


def test_model_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound, match=r"model\.drafter"):
        parse_config({"model": {"target": str(TARGET_DIR), "drafter": str(tmp_path / "none")}})
    monkeypatch.chdir(TARGET_DIR.parent)  # relative folders count from where the command runs
    config = parse_config({"model": {"target": "target", "drafter": "drafter"}})
    assert config.target_folder == str(TARGET_DIR)
    own = {"model": {"target": "target"}, "topology": "colocated", "speculation": {"method": "ar"}}
    assert parse_config(own).drafter_folder is None


def test_a_masked_model_as_drafter_drafts_for_diffuspec() -> None:
    model = {"target": str(TARGET_DIR), "drafter": str(DIFFUSION_DIR)}
    for topology in ("actors", "colocated"):
        speculation = {"method": "diffuspec"}
        config = parse_config({"model": model, "topology": topology, "speculation": speculation})
        assert config.hosted_drafter == "diffuspec"
    drafter, vocab_size, context_length = drafter_replica._load(config)
    assert isinstance(drafter, DiffuSpec)
    assert (vocab_size, context_length) == (4096, drafter.runner.context_length)
    for method in ("draft_model", "copyspec_draft_model"):
        with pytest.raises(InvalidArgument, match=r"speculation\.method.*diffuspec"):
            parse_config({"model": model, "speculation": {"method": method}})


def test_a_model_without_order_as_drafter_drafts_for_generalized_aggressive() -> None:
    model = {name: str(TRANSLATION_DIR / name) for name in ("target", "drafter")}
    speculation = {"method": "generalized_aggressive"}
    config = parse_config({"model": model, "topology": "actors", "speculation": speculation})
    assert config.hosted_drafter == "non_autoregressive"
    drafter, vocab_size, context_length = drafter_replica._load(config)
    assert isinstance(drafter, NonAutoregressive)
    assert (vocab_size, context_length) == (drafter.vocab_size, drafter.context_length)
    with pytest.raises(InvalidArgument, match=r"speculation\.method.*non_autoregressive"):
        parse_config({"model": model, "speculation": {"method": "draft_model"}})


def test_a_head_in_drafter_replicas() -> None:
    head = {"model": {"target": str(TARGET_DIR)}, "drafter": {"method": "moa"}}
    config = parse_config({**head, "speculation": {"method": "moa"}})
    assert (config.hosted_drafter, config.hosts_head) == ("moa", True)
    assert config.drafter.states == "int8"
    drafter, vocab_size, context_length = drafter_replica._load(config)
    assert isinstance(drafter, HeadDrafter)
    assert (vocab_size, context_length) == (4096, drafter.target.context_length)
    assert not parse_config({}).hosts_head
    for name in ("longspec", "layer_skip", "suffix_decoding_eagle3", "token_recycling", "forced"):
        with pytest.raises(InvalidArgument, match=r"drafter\.method.*eagle3"):
            parse_config({**head, "drafter": {"method": name}})
    with pytest.raises(InvalidArgument, match=r"drafter\.states"):
        parse_config({**head, "drafter": {"method": "moa", "states": "int4"}})


def test_names_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo, commit = tmp_path / "hub" / "models--org--name", "0" * 40
    shutil.copytree(TARGET_DIR, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    model = {"target": "org/name", "drafter": "demo-drafter"}
    config = parse_config({"model": model})
    # Every replica resolves the same commit on its node.
    assert config.model.target == f"hf:org/name@{commit}"
    assert config.model.drafter == "demo-drafter"
    assert config.num_threads(num_cpus=8) == 1
    local = config.with_local_models()
    assert local.target_folder == str(repo / "snapshots" / commit)
    assert local.drafter_folder == str(DRAFTER_DIR)
    assert local.with_local_models() == local

    data = yaml.safe_load((CONFIGS_DIR / "demo.yaml").read_text())
    data["applications"][0]["args"] = {"model": model}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(data))
    assert read_config_file(path).args["model"]["target"] == f"hf:org/name@{commit}"

    for wrong, said in (("smollm", "did you mean smollm2"), ("org/none", "HF_HUB_OFFLINE")):
        with pytest.raises(ModelNotFound, match=rf"model\.target: .*{said}"):
            parse_config({"model": {**model, "target": wrong}})
    # The machine that builds the application need not have the models.
    elsewhere = parse_config({"model": {**model, "target": "org/none@v1"}}, models_here=False)
    assert elsewhere.model.target == "hf:org/none@v1"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"applications": []}, "applications"),
        ({"application": 1}, "application"),
        ({"http_options": {}}, "http_options"),
    ],
)
def test_wrong_file_keys_are_named(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    data = yaml.safe_load((CONFIGS_DIR / "demo.yaml").read_text())
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**data, **change}))
    with pytest.raises(InvalidArgument) as caught:
        read_config_file(path)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"import_path": "other:app"}, "applications[0].import_path"),
        ({"arg": {}}, "applications[0].arg"),
        ({"args": [1]}, "applications[0].args"),
        ({"args": {"topologi": 1}}, "topologi"),
        ({"args": {"target": {"standby": 1}}}, "target.standby"),
        ({"args": {"target": {"num_replicas": 2, "standby": 2}}}, "target.standby"),
        (
            {"args": {"target": {"standby": 1, "num_replicas": 2, "autoscaling": {}}}},
            "target.standby",
        ),
        ({"autoscaling_policy": {"policy_function": "os:system"}}, f"{POLICY}.policy_function"),
        ({"autoscaling_policy": {"function": 1}}, f"{POLICY}.function"),
        (
            {"autoscaling_policy": {"policy_function": "paceline.cluster.autoscaling:Policy"}},
            POLICY,
        ),
        (
            {
                "args": {"target": {"autoscaling": {}}},
                "autoscaling_policy": {
                    "policy_function": "paceline.cluster.autoscaling:Policy",
                    "policy_kwargs": {"round_ms": 0},
                },
            },
            f"{POLICY}.policy_kwargs.round_ms",
        ),
    ],
)
def test_wrong_application_keys_are_named(
    tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    data = yaml.safe_load((CONFIGS_DIR / "demo.yaml").read_text())
    data["applications"][0].update(change)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(InvalidArgument) as caught:
        read_config_file(path)
    assert caught.value.field == field


@pytest.mark.parametrize("text", [None, "", "just words", "a: [", "applications: 3"])
def test_files_that_are_none(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidArgument):
        read_config_file(path)


@pytest.mark.parametrize(
    ("args", "field", "match"),
    [
        ({"gateway": {"host": "0.0.0.0"}}, "gateway.tls", "gateway.insecure: true"),
        ({"gateway": {"host": "gateway.example.org"}}, "gateway.tls", "paceline certs"),
        ({"data_plane": "node_ip"}, "data_plane_tls", "data_plane_insecure: true"),
        (
            {"gateway": {"tls": {"cert": "a", "key": "b", "require_client_cert": True}}},
            "gateway.tls.client_ca",
            "a file",
        ),
        ({"gateway": {"tls": {"cert": "a", "kee": "b"}}}, "gateway.tls.key", "Field required"),
        (
            {"gateway": {"tls": {"cert": "a", "key": "b", "kee": "c"}}},
            "gateway.tls.kee",
            "client_ca",
        ),
        ({"target": {"limits": {"max_nodes": 1000}}}, "target.limits.max_nodes", "256"),
        ({"experience": "{"}, "experience", "expected a JSON document"),
        ({"experience": '{"version": 1}'}, "experience", "a document of version"),
        (
            {"target": {"autoscaling": {"min_replicas": 9}}},
            "target.autoscaling",
            "expected max_rep",
        ),
    ],
)
def test_values_that_are_refused(args: dict[str, Any], field: str, match: str) -> None:
    with pytest.raises(InvalidArgument, match=match) as caught:
        parse_config(args)
    assert caught.value.field == field


def test_plain_text_beyond_loopback_needs_a_flag() -> None:
    config = parse_config({"gateway": {"host": "0.0.0.0", "insecure": True}})
    assert config.gateway.tls is None
    config = parse_config({"data_plane": "node_ip", "data_plane_insecure": True})
    assert config.data_plane_tls is None
    config = parse_config({"gateway": {"host": "0.0.0.0", "tls": {"cert": "a", "key": "b"}}})
    assert config.gateway.tls is not None
    assert Path(config.gateway.tls.cert).is_absolute()  # replicas have other working folders


@pytest.mark.parametrize(
    "gateway",
    [
        {"tenants": {"alice": "TOPSECRET"}}, {"token": "TOPSECRET"}, {"api_key": "TOPSECRET"},
        {"auth_token": "TOPSECRET"}, {"password": "TOPSECRET"},
    ],
)  # fmt: skip
def test_a_secret_in_the_wrong_place_is_not_shown(gateway: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_config({"gateway": gateway})
    assert "TOPSECRET" not in str(caught.value)
    assert caught.value.field == f"gateway.{next(iter(gateway))}"


def test_the_tenants_file_can_be_named_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PACELINE_TENANTS", str(tmp_path / "tenants.yaml"))
    assert parse_config({}).gateway.tenants == str(tmp_path / "tenants.yaml")
    given = parse_config({"gateway": {"tenants": "/etc/other.yaml"}})
    assert given.gateway.tenants == "/etc/other.yaml"
