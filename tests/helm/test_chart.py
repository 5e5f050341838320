"""The chart renders, what it renders is valid, and wrong values are refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python.chart import Chart, dependency_list, lint, package
from helm_python.errors import HelmError

from paceline.deployments.config import DeploymentConfig, read_config_file
from paceline.model_cache import model_source, parser
from paceline.model_names import PACKAGED_MODELS
from tests.helm.conftest import CHART, only, render, serve_config
from tests.helm.schemas import crd_folder, custom_schemas, problems
from tests.helm.value_sets import BEST, VALUE_SETS

Objects = list[dict[str, Any]]
Pods = dict[str, dict[str, Any]]


def pods(objects: Objects) -> Pods:
    """The pod template of each role, and of the sweep's."""
    templates = {}
    for thing in objects:
        spec = thing.get("spec", {})
        cluster = spec.get("rayClusterConfig") or spec.get("rayClusterSpec")
        if cluster:
            groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
            for template in [group["template"] for group in groups]:
                templates[template["metadata"]["labels"]["app.kubernetes.io/component"]] = template
        if thing["kind"] == "RayJob":
            templates["submitter"] = spec["submitterPodTemplate"]
        if thing["kind"] == "Pod":
            templates["test"] = thing
    return templates


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", VALUE_SETS)
def test_lints_strictly(chart_folder: Path, name: str) -> None:
    report = lint(chart_folder, VALUE_SETS[name], strict=True, kube_version="v1.34.0")
    assert report["errors"] == []
    assert [m for m in report["messages"] if m["severity"] > 1] == []


def test_only_the_dependency_is_missing_in_a_checkout() -> None:
    (dependency,) = dependency_list(CHART)
    if dependency["status"] == "missing":
        (error,) = lint(CHART, {}, strict=True)["errors"]
        assert "missing these dependencies: kuberay-operator" in error


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", VALUE_SETS)
def test_every_object_is_valid(chart: Chart, name: str) -> None:
    objects = render(chart, VALUE_SETS[name])
    assert {o["kind"] for o in objects} >= {"RayService", "Service"}
    wrong = [
        f"{thing['kind']} {thing['metadata']['name']}: {problem}"
        for thing in objects
        for problem in problems(thing)
    ]
    assert wrong == []
    names = [(o["kind"], o["metadata"]["name"]) for o in objects]
    assert len(names) == len(set(names))


@pytest.mark.skipif(
    crd_folder() is None, reason="KUBERAY_CRDS names no folder with KubeRay's definitions"
)
def test_custom_resources_are_checked() -> None:
    """The checks above would see a wrong field, a missing one, and a wrong type."""
    assert custom_schemas().keys() >= {("ray.io/v1", "RayService"), ("ray.io/v1", "RayJob")}
    head = {"template": {"spec": {"containers": [{"name": "ray-head"}]}}}
    service: dict[str, Any] = {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": "x"},
        "spec": {"rayClusterConfig": {"headGroupSpec": head}},
    }
    assert problems(service) == []
    for change in (
        {"rayClusterConfig": {}},
        {"rayClusterConfig": {"headGroupSpec": head, "typo": 1}},
        {"rayClusterConfig": {"headGroupSpec": {**head, "rayStartParams": {"num-cpus": 0}}}},
    ):
        assert problems({**service, "spec": change})


@pytest.mark.one_of(1, slow=3)
@pytest.mark.parametrize("name", VALUE_SETS)
def test_the_served_configuration_is_one(chart: Chart, tmp_path: Path, name: str) -> None:
    """serveConfigV2 is a file that the project's own reader takes, but for models not here."""
    config = serve_config(render(chart, VALUE_SETS[name]))
    (application,) = config["applications"]
    args = application["args"]
    for role in ("target", "drafter", "heads"):
        folder = args["model"].pop(role, None)
        assert folder is None or folder.startswith(("/models/", "/volume/"))
    if args["topology"] == "colocated":
        args.pop("drafter")
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    read = read_config_file(file)
    parsed, policy = read.config, read.autoscaling_policy
    roles = (parsed.target, parsed.drafter, parsed.gateway)
    scales = any(role.autoscaling is not None for role in roles)
    assert (policy is not None) == (scales and name.startswith("autoscaling"))
    assert parsed.data_plane == "node_ip"
    if name == "defaults":
        assert parsed.speculation.method == "auto"


def test_a_first_install_is_secure(chart: Chart) -> None:
    objects = render(chart, {})
    config = serve_config(objects)["applications"][0]["args"]
    spec = only(objects, "RayService")["spec"]
    assert spec["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    assert "insecure" not in config["gateway"]
    assert "data_plane_insecure" not in config
    mounted = {
        v["secret"]["secretName"]
        for template in pods(objects).values()
        for v in template["spec"]["volumes"]
        if "secret" in v
    }
    made = {o["metadata"]["name"] for o in objects if o["kind"] == "Secret"}
    assert mounted == made == {"paceline-gateway-tls", "paceline-replica-tls"}
    assert only(objects, "Service", "paceline")["spec"]["type"] == "ClusterIP"


def test_generated_certificates_serve_grpc(chart: Chart, tmp_path: Path) -> None:
    """Those of the Secrets, in real handshakes: a client with the gateway, and among replicas."""
    import base64

    import grpc

    from paceline.rpc.tls import ClientTls, ServerTls

    objects = render(chart, {"tls": {"hosts": ["127.0.0.1"]}})
    for kind in ("gateway", "replica"):
        data = only(objects, "Secret", f"paceline-{kind}-tls")["data"]
        (tmp_path / kind).mkdir()
        for name, text in data.items():
            (tmp_path / kind / name).write_bytes(base64.b64decode(text))
    ca = only(objects, "ConfigMap", "paceline-ca")["data"]["ca.crt"]
    assert ca.strip() == (tmp_path / "gateway" / "ca.crt").read_text().strip()

    def path(name: str) -> str:
        return str(tmp_path / name)

    def connects(server: ServerTls, client: ClientTls) -> bool:
        from concurrent.futures import ThreadPoolExecutor

        listening = grpc.server(ThreadPoolExecutor(1))
        port = listening.add_secure_port("127.0.0.1:0", server.credentials())
        listening.start()
        try:
            with grpc.secure_channel(
                f"127.0.0.1:{port}", client.credentials(), options=client.options
            ) as channel:
                grpc.channel_ready_future(channel).result(timeout=3)
                return True
        except grpc.FutureTimeoutError:
            return False
        finally:
            listening.stop(None)

    gateway = ServerTls(cert=path("gateway/tls.crt"), key=path("gateway/tls.key"))
    assert connects(gateway, ClientTls(ca=path("gateway/ca.crt")))
    assert connects(
        gateway, ClientTls(ca=path("gateway/ca.crt"), server_name="paceline.models.svc")
    )
    replica = {"cert": path("replica/tls.crt"), "key": path("replica/tls.key")}
    server = ServerTls(**replica, client_ca=path("replica/ca.crt"), require_client_cert=True)
    name = "paceline-replica"
    assert connects(server, ClientTls(**replica, ca=path("replica/ca.crt"), server_name=name))
    assert not connects(server, ClientTls(ca=path("replica/ca.crt"), server_name=name))


@pytest.mark.parametrize("name", VALUE_SETS)
def test_containers_are_confined(chart: Chart, name: str) -> None:
    for role, template in pods(render(chart, VALUE_SETS[name])).items():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, role
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            writable = [m["mountPath"] for m in container["volumeMounts"] if "readOnly" not in m]
            assert set(writable) <= {"/tmp", "/models", "/cache", "/results", "/dev/shm"}
            mounts = {m["name"] for m in container["volumeMounts"]}
            assert mounts <= {v["name"] for v in spec["volumes"]}
            assert container["resources"]["limits"]


def test_clients_reach_the_gateway_only(chart: Chart) -> None:
    """Each pod's ingress rules, as a network plugin reads them."""
    objects = render(chart, {"sweep": {"enabled": True}})
    policies = [o["spec"] for o in objects if o["kind"] == "NetworkPolicy"]

    def selected(labels: dict[str, str], selector: dict[str, Any]) -> bool:
        return all(labels.get(k) == v for k, v in selector.get("matchLabels", {}).items()) and all(
            labels.get(e["key"]) in e["values"] for e in selector.get("matchExpressions", [])
        )

    def open_to_all(labels: dict[str, str]) -> set[Any]:
        ports: set[Any] = set()
        for policy in policies:
            if selected(labels, policy["podSelector"]):
                for rule in policy["ingress"]:
                    if not rule.get("from"):
                        ports |= {p["port"] for p in rule.get("ports", [{"port": "any"}])}
        return ports

    for role, template in pods(objects).items():
        labels = template["metadata"]["labels"]
        assert any(selected(labels, p["podSelector"]) for p in policies), role
        assert open_to_all(labels) <= ({"grpc", "http"} if role == "gateway" else set()), role


def test_devices_reach_targets_where_they_may(chart: Chart) -> None:
    values = VALUE_SETS["direct"]
    objects = render(chart, values)
    args = serve_config(objects)["applications"][0]["args"]
    assert args["direct"] == {
        "enabled": True, "host": "0.0.0.0", "port": 50070, "ticket_s": 60, "ticket_tokens": 2000,
    }  # fmt: skip
    for role, template in pods(objects).items():
        (container,) = template["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert ports.get("direct") == (50070 if role == "target" else None), role
        shows = role in ("target", "gateway")  # the same certificate
        assert mounts.get("gateway-tls") == ("/etc/paceline/gateway-tls" if shows else None), role
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        assert ("gateway-tls" in volumes) == shows
    policy = only(objects, "NetworkPolicy", "paceline-direct")["spec"]
    target = pods(objects)["target"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= target.items()
    assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "target"
    assert policy["ingress"] == [
        {
            "ports": [{"protocol": "TCP", "port": "direct"}],
            "from": values["networkPolicy"]["clients"],
        }
    ]
    without = render(chart, {})
    assert "paceline-direct" not in {thing["metadata"]["name"] for thing in without}
    (container,) = pods(without)["target"]["spec"]["containers"]
    assert [port["name"] for port in container["ports"]] == ["metrics"]
    assert "gateway-tls" not in {mount["name"] for mount in container["volumeMounts"]}


def test_roles_have_their_own_pools(chart: Chart) -> None:
    values = VALUE_SETS["gpu"]
    objects = render(chart, values)
    cluster = only(objects, "RayService")["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    (application,) = serve_config(objects)["applications"]
    args = application["args"]
    numbers = {each["name"]: each["num_replicas"] for each in application["deployments"]}
    assert set(groups) == {"gateway", "target", "drafter"}
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for role, group in groups.items():
        # One replica a pod, and no other role's.
        assert group["resources"] == {f"paceline_{role}": "1"}
        assert args[role]["resources"] == {f"paceline_{role}": 1}
        assert group["replicas"] == numbers[role]
    spec = groups["target"]["template"]["spec"]
    assert spec["runtimeClassName"] == "nvidia"
    assert spec["nodeSelector"] == values["pods"]["target"]["nodeSelector"]
    assert spec["containers"][0]["image"].endswith("-cuda")
    assert (args["target"]["num_cpus"], args["target"]["num_gpus"]) == (8, 1)
    assert args["gateway"]["num_cpus"] == 1
    # The gateway loads no model, a drafter of its target only what says how it writes text.
    assert "initContainers" not in groups["gateway"]["template"]["spec"]
    for role, shortened in (("target", False), ("drafter", True)):
        (init,) = (
            c
            for c in groups[role]["template"]["spec"]["initContainers"]
            if c["name"] == "target-model"
        )
        assert ("--no-weights" in init["command"]) == shortened


def test_the_learner_shares_a_pod_with_the_draft_model(chart: Chart) -> None:
    cpus = {"resources": {"limits": {"cpu": "3"}}}
    for topology, role in (("actors", "drafter"), ("colocated", "target")):
        online = {"enabled": True, "num_cpus": 0.5}
        values = {"topology": topology, "online": online, "pods": {role: cpus}}
        (application,) = serve_config(render(chart, values))["applications"]
        config = application["args"]
        assert config[role]["num_cpus"] + config["online"]["num_cpus"] == 3


def test_models_are_named_as_everywhere(chart: Chart) -> None:
    def command(models: dict[str, Any]) -> list[str]:
        values = {"topology": "colocated", "speculation": {"method": "ar"}, "models": models}
        cluster = only(render(chart, values), "RayService")["spec"]["rayClusterConfig"]
        (group,) = (g for g in cluster["workerGroupSpecs"] if g["groupName"] == "target")
        (init,) = group["template"]["spec"]["initContainers"]
        found: list[str] = init["command"]
        return found

    def parse(words: list[str]) -> tuple[str, str, list[str]]:
        assert words[:3] == ["python", "-m", "paceline.model_cache"]
        given = parser().parse_args(words[3:])
        return given.name, str(given.link), given.include

    for name in ("Qwen/Qwen3-8B", "hf:Qwen/Qwen3-8B@v1", "hf:gpt2", "s3://bucket/a/b"):
        assert parse(command({"target": name})) == (name, "/models/target", [])
    assert parse(command({"target": "smollm2"}))[:2] == ("smollm2", "/models/target.gguf")
    words = command({"target": "a/b", "include": {"target": ["*.json", "m-*"]}})
    assert parse(words)[2] == ["*.json", "m-*"]


def test_models_of_the_chart_are_those_of_the_package(chart: Chart) -> None:
    """Each has a source of its own, and the downloader takes every name that the chart does."""
    for name in (*PACKAGED_MODELS, "a/b", "hf:a/b@c", "s3://a/b"):
        values = {"topology": "colocated", "speculation": {"method": "ar"}}
        render(chart, {**values, "models": {"target": name}})
        assert name in PACKAGED_MODELS or model_source(name)


def test_releases_may_share_a_cache(chart: Chart) -> None:
    """What two releases share is the cache; the links to their models are each pod's own."""
    objects = render(chart, VALUE_SETS["mixed-sources"])
    claim = only(objects, "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    for role in ("target", "drafter"):
        spec = pods(objects)[role]["spec"]
        volumes = {v["name"]: v for v in spec["volumes"]}
        cache = volumes["cache"]["persistentVolumeClaim"]
        assert cache == {"claimName": claim["metadata"]["name"]}
        assert "emptyDir" in volumes["models"]
        assert volumes["volume"]["persistentVolumeClaim"]["claimName"] == "trained"
        names = [c["name"] for c in spec["initContainers"]]
        assert names == (["heads-model", "target-model"] if role == "target" else ["target-model"])
    model = serve_config(objects)["applications"][0]["args"]["model"]
    assert model["drafter"] == "/volume/trained/drafter"
    heads, target = pods(objects)["target"]["spec"]["initContainers"]
    assert "--include=*" in heads["command"]
    assert "--ca=/etc/paceline/download-ca/bundle.pem" in target["command"]


def test_pods_follow_the_autoscaling(chart: Chart) -> None:
    def sizes(name: str) -> dict[str, tuple[int, int, int]]:
        cluster = only(render(chart, VALUE_SETS[name]), "RayService")["spec"]["rayClusterConfig"]
        assert bool(cluster.get("enableInTreeAutoscaling")) == (not name.startswith("serve"))
        return {
            g["groupName"]: (g["minReplicas"], g["replicas"], g["maxReplicas"])
            for g in cluster["workerGroupSpecs"]
        }

    assert sizes("autoscaling") == {"gateway": (2, 2, 2), "target": (2, 2, 8), "drafter": (1, 1, 4)}
    gateways = sizes("autoscaling-gateways")
    assert gateways == {"gateway": (2, 2, 6), "target": (1, 1, 1), "drafter": (1, 1, 1)}
    fixed = sizes("serve-autoscaling-on-fixed-pods")
    assert fixed == {"gateway": (1, 1, 1), "target": (3, 3, 3), "drafter": (1, 1, 1)}


def test_other_numbers_replace_no_replica(chart: Chart) -> None:
    """Serve starts all of them anew when args change."""

    def args(values: dict[str, Any]) -> dict[str, Any]:
        (application,) = serve_config(render(chart, values))["applications"]
        found: dict[str, Any] = application["args"]
        return found

    more = {role: {"num_replicas": 3} for role in ("target", "drafter", "gateway")}
    assert args(more) == args({})
    assert args({"speculation": {"method": "ar"}}) != args({})


def test_the_best_of_a_sweep_goes_in_unchanged(chart: Chart) -> None:
    objects = render(chart, BEST)
    (application,) = serve_config(objects)["applications"]
    args, best = application["args"], BEST["applications"][0]["args"]
    assert args["speculation"] == best["speculation"]
    assert args["topology"] == "colocated"
    assert args["model"]["dtype"] == "bfloat16"
    groups = only(objects, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert [group["groupName"] for group in groups] == ["gateway", "target"]


def test_a_sweep_with_models_of_its_own(chart: Chart) -> None:
    job = only(render(chart, VALUE_SETS["sweep-own-space"]), "RayJob")["spec"]
    for part in ("model.target=/models/target", "resources.gpus=1", "search.trials=4"):
        assert f"--set '{part}'" in job["entrypoint"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"targets": {}}, "additional properties 'targets' not allowed"),
        ({"target": {"replicas": 2}}, "'/target': additional properties 'replicas' not allowed"),
        ({"target": {"num_replicas": 0}}, "'/target/num_replicas': minimum: got 0, want 1"),
        ({"speculation": {"metod": "ar"}}, "'/speculation': additional properties 'metod'"),
        ({"speculation": {"num_speculative_tokens": -1}}, "'/speculation/num_speculative_tokens'"),
        ({"topology": "device"}, "'/topology': value must be one of 'colocated', 'actors'"),
        ({"model": {"dtype": "float8"}}, "'/model/dtype': value must be one of"),
        ({"tls": {"mode": "off"}}, "'/tls/mode': value must be one of"),
        ({"gateway": {"grpc_port": 70000}}, "'/gateway/grpc_port': maximum: got 70,000"),
        ({"pods": {"target": {"resources": {"limits": {"cpu": "two"}}}}}, "limits/cpu"),
        ({"tenants": {"inline": {"a": {"token": "s" * 16}}}}, "'/tenants/inline/a'"),
        ({"models": {"source": "pvc"}}, "'/models': additional properties 'source' not allowed"),
        ({"sweep": {"set": ["a'b"]}}, "'/sweep/set/0'"),
        ({"kuberay-operator": {"enabled": "no"}}, "'/kuberay-operator/enabled'"),
        # What no schema can say is said by the templates.
        (
            {"online": {"enabled": True, "num_cpus": 64}},
            "online.num_cpus: got 64, expected less than",
        ),
        ({"models": {"target": "llama"}}, 'models.target: got "llama", expected ORG/NAME or hf:'),
        ({"models": {"drafter": "a/b"}}, "models.target: name the target of models.drafter"),
        ({"models": {"target": "pvc:a", "drafter": "pvc:b"}}, "models.pvc.claimName: name the"),
        ({"models": {"target": "a/b"}}, "models.drafter: name a drafter, or a drafter.method"),
        ({"tls": {"mode": "secret"}}, "tls.secret.gateway: name the Secret"),
        (
            {"gatewayApi": {"enabled": True}, "tenants": {"secretName": "t"}},
            "gatewayApi.parentRefs: name the Gateway",
        ),
        (
            {"upgrade": {"strategy": "NewClusterWithIncrementalUpgrade"}},
            "upgrade.incremental.gatewayClassName",
        ),
        (
            {"applications": [{**BEST["applications"][0], "args": {"model": {"target": "/m"}}}]},
            "say where the cluster gets that model",
        ),
    ],
)
def test_wrong_values_are_refused(chart: Chart, values: dict[str, Any], message: str) -> None:
    with pytest.raises(HelmError) as caught:
        chart.render(values, name="paceline", namespace="models")
    assert message in str(caught.value)


def test_every_value_is_documented_and_checked() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())

    def walk(schema: dict[str, Any], value: Any, path: str) -> None:
        properties = schema.get("properties")
        if properties is None or not isinstance(value, dict):
            return
        # Helm adds `global`; an empty block is documented as a whole.
        missing = properties.keys() - value.keys() - {"global"}
        assert not missing or value == {}, (path, missing)
        assert not value.keys() - properties.keys() or schema.get("additionalProperties"), path
        for name, part in value.items():
            if name in properties:
                described = "description" in schema or "description" in properties[name]
                assert described or isinstance(part, dict), f"{path}.{name}"
                walk(properties[name], part, f"{path}.{name}")

    walk(schema, defaults, "")
    delay = schema["properties"]["upgrade"]["properties"]["deletionDelaySeconds"]
    assert "old cluster" in delay["description"], "each value has its own text"


def test_defaults_are_those_of_the_schema() -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    config = DeploymentConfig().model_dump(mode="json")
    differ = {}

    def walk(ours: dict[str, Any], theirs: dict[str, Any], path: str) -> None:
        for name, value in ours.items():
            if isinstance(value, dict):
                walk(value, theirs[name], f"{path}{name}.")
            elif value != theirs[name]:
                differ[f"{path}{name}"] = value

    blocks = ("model", "topology", "target", "drafter", "gateway", "online", "direct", "tracing")
    walk({name: defaults[name] for name in blocks}, config, "")
    # A pod that is removed has more time to drain than a command at a terminal; network policies
    # name ports.
    assert differ == {"target.drain_s": 30, "gateway.drain_s": 30, "direct.port": 50061}


def test_generated_files_are_fresh() -> None:
    generate = CHART.parent / "generate.py"
    done = subprocess.run(
        [sys.executable, str(generate), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_manifests_for_those_without_helm() -> None:
    folder = CHART.parents[1] / "k8s"
    for file in sorted(folder.glob("*.yaml")):
        text = file.read_text()
        assert "PRIVATE KEY" not in text
        for thing in yaml.safe_load_all(text):
            assert thing["kind"] != "Secret"  # k8s/README.md makes them
            assert problems(thing) == []


def test_packages(chart_folder: Path, tmp_path: Path) -> None:
    archive = package(chart_folder, destination=tmp_path)

    def operators(values: dict[str, Any]) -> int:
        with Chart.load(
            archive
        ) as packed:  # Helm drops a dependency that is off from what it loaded
            objects = render(packed, values)
        assert {o["kind"] for o in objects} >= {"RayService", "Service"}
        return len([o for o in objects if o["metadata"]["name"] == "operator"])

    assert operators({"kuberay-operator": {"enabled": True}}) == 1
    assert operators({}) == 0, "a cluster can have one only"


def test_a_stopping_pod_has_the_time_to_drain(chart: Chart) -> None:
    """Ray ends with its container, so `drain_s` has to pass before the container is stopped."""
    own: dict[str, Any] = {"target": {"drain_s": 90}, "gateway": {"drain_s": 12.5}}
    best = [{**BEST["applications"][0], "args": {"target": {"drain_s": 60}}}]
    for values, target in ((own, 90), ({**own, "applications": best}, 60)):
        templates = pods(render(chart, values))
        for role, drain in (("target", target), ("gateway", 13), ("drafter", 0)):
            spec = templates[role]["spec"]
            command = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
            assert command == ["sleep", str(10 + drain)]
            assert spec["terminationGracePeriodSeconds"] == 10 + drain + 20


def test_the_services_of_kuberay_find_the_head(chart: Chart) -> None:
    """The operator's Service RAYSERVICE-head-svc selects by labels that a template may override."""
    for template in pods(render(chart, {"sweep": {"enabled": True}})).values():
        labels = template["metadata"]["labels"]
        if labels["app.kubernetes.io/component"] != "test":
            assert labels.get("app.kubernetes.io/name", "kuberay") == "kuberay"
            assert labels.get("app.kubernetes.io/created-by") is None
            assert not [name for name in labels if name.startswith("ray.io/")]


def test_session_keys_are_mounted_in_gateways_alone(chart: Chart) -> None:
    objects = render(chart, VALUE_SETS["autoscaling-gateways"])
    args = serve_config(objects)["applications"][0]["args"]
    path = args["gateway"]["session_keys"]
    for name, template in pods(objects).items():
        secrets = [v["secret"]["secretName"] for v in template["spec"]["volumes"] if "secret" in v]
        assert ("keys" in secrets) == (name == "gateway")
        mounts = [m["mountPath"] for m in template["spec"]["containers"][0]["volumeMounts"]]
        assert (path.rpartition("/")[0] in mounts) == (name == "gateway")
    assert path.endswith("/file")
    assert (
        "session_keys" not in serve_config(render(chart, {}))["applications"][0]["args"]["gateway"]
    )


def test_the_test_shows_a_token_where_there_are_tenants(chart: Chart) -> None:
    def test(values: dict[str, Any]) -> dict[str, Any] | None:
        return pods(render(chart, values)).get("test")

    tenants = {"secretName": "tenants"}
    assert test({"tenants": tenants}) is None, "it could only fail"
    pod = test({"tenants": {**tenants, "testTokenSecret": "alice", "testTokenKey": "t"}})
    assert pod is not None
    (container,) = pod["spec"]["containers"]
    assert "--token-file=/etc/paceline/token/t" in container["command"]
    (volume,) = (v for v in pod["spec"]["volumes"] if v["name"] == "token")
    assert volume["secret"]["secretName"] == "alice"
    (plain,) = test({})["spec"]["containers"]  # type: ignore[index]
    assert not [word for word in plain["command"] if "token-file" in word]


def test_what_users_add(chart: Chart) -> None:
    objects = render(chart, VALUE_SETS["node-ports-and-more"])
    ports = only(objects, "Service", "paceline")["spec"]["ports"]
    assert [p["nodePort"] for p in ports] == [30051, 30080]
    assert only(objects, "ConfigMap", "paceline-extra")
    target = pods(objects)["target"]["spec"]
    assert "shm" in {v["name"] for v in target["volumes"]}
    assert "shm" in {m["name"] for m in target["containers"][0]["volumeMounts"]}
    assert target["containers"][0]["image"].endswith("paceline@sha256:" + "0" * 64)


def test_routes_of_two_kinds_may_have_listeners_of_their_own(chart: Chart) -> None:
    parents = {p: {"parentRefs": [{"name": "g", "sectionName": p}]} for p in ("grpc", "http")}
    values = {"gatewayApi": {"enabled": True, **parents}, "tenants": {"secretName": "t"}}
    objects = render(chart, values)
    for protocol, kind in (("grpc", "GRPCRoute"), ("http", "HTTPRoute")):
        (parent,) = only(objects, kind)["spec"]["parentRefs"]
        assert parent["sectionName"] == protocol


def test_notes_say_how_to_send_the_first_request(chart: Chart) -> None:
    notes = chart.render({}, name="paceline", namespace="models")["paceline/templates/NOTES.txt"]
    command = re.search(r"paceline generate .*", notes)
    assert command is not None
    assert command[0].endswith("--server localhost:50051 --ca ca.crt")
    assert "port-forward service/paceline 50051" in notes
