"""Values that would end in a pod that never serves are refused when they are rendered."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from helm_python.chart import Chart
from helm_python.errors import HelmError

from tests.helm.conftest import only, render, serve_config

GPU = {"limits": {"cpu": "8", "nvidia.com/gpu": 1}}
TENANTS = {"secretName": "tenants"}
MODELS = {"target": "a/b", "drafter": "a/c"}

# The values as a file would have them, and what the error says: the value and what is allowed.
WRONG = """
speculation: {method: eagle9} # '/speculation/method': value must be one of 'ar'
drafter: {method: longspec} # '/drafter/method'
target: {autoscaling: {min_replicas: 3, max_replicas: 2}} # target.autoscaling.max_replicas: got 2, expected at least min_replicas, 3
target: {autoscaling: {min_replicas: 5}} # target.autoscaling.max_replicas: got 4, expected at least min_replicas, 5
target: {standby: 1} # target.standby: got 1, expected fewer than target.num_replicas, 1
target: {num_replicas: 3, standby: 2, autoscaling: {min_replicas: 2}} # target.standby: got 2, expected fewer than target.autoscaling.min_replicas, 2
gateway: {autoscaling: {min_replicas: 3, max_replicas: 2}} # gateway.autoscaling.max_replicas: got 2
drafter: {autoscaling: {min_replicas: 2, max_replicas: 1}} # drafter.autoscaling.max_replicas: got 1
engine: vllm, vllm: {tensor_parallel_size: 2} # vllm.tensor_parallel_size: got 2, expected at most the GPUs
engine: vllm, vllm: {tensor_parallel_size: 2}, pods: {target: {resources: GPU}} # vllm.tensor_parallel_size: got 2, expected at most the GPUs of pods.target.resources.limits, 1
model: {device: cuda}, topology: colocated # model.device: got "cuda", expected a device of pods.target.resources.limits, which has 0 GPUs
model: {device: "cuda:1"}, topology: colocated, pods: {target: {resources: GPU}} # model.device: got "cuda:1"
model: {device: cuda}, pods: {target: {resources: GPU}} # model.device: got "cuda", expected a device of pods.drafter.resources.limits
model: {drafter_device: cuda} # model.drafter_device: got "cuda"
model: {device: gpu} # '/model/device'
gateway: {http_port: 50051} # gateway.http_port: got 50051, expected another port than gateway.grpc_port's
gateway: {http_port: 8080} # gateway.http_port: got 8080, expected a port that Ray does not take
direct: {port: 8080} # direct.port: got 8080, expected a port that Ray does not take
direct: {port: 0} # '/direct/port': minimum: got 0, want 1
direct: {enabled: true}, tls: {gateway: false} # direct.enabled: got true, expected false without TLS at the gateway
engine: vllm, direct: {enabled: true} # direct.enabled: got true, expected false with engine: vllm
gateway: {grpc_port: 0} # '/gateway/grpc_port': minimum: got 0, want 1
tls: {requireClientCert: true} # tls.requireClientCert: got true, expected tls.mode: secret
tls: {mode: secret, gateway: false, requireClientCert: true, secret: {replicas: r}} # tls.requireClientCert: got true
tls: {secret: {gateway: mine}} # tls.mode: got "generated", expected secret, as tls.secret.gateway is mine
tls: {certManager: {issuerRef: {name: x}}} # tls.mode: got "generated", expected certManager
tls: {mode: certManager, certManager: {issuerRef: {kind: Issuer}}} # tls.certManager.issuerRef.name: got ""
service: {type: LoadBalancer} # tenants.secretName: got "", expected a Secret with tenants, as service.type: LoadBalancer
service: {type: LoadBalancer}, tenants: TENANTS, tls: {gateway: false} # tls.gateway: got "false", expected TLS at the gateway
service: {type: NodePort}, tenants: TENANTS, tls: {mode: disabled} # tls.mode: got "disabled", expected TLS at the gateway
service: {loadBalancerClass: a/b} # service.type: got "ClusterIP", expected LoadBalancer, as service.loadBalancerClass is set
service: {type: LoadBalancer, loadBalancerSourceRanges: [10.0.0.1]}, tenants: TENANTS # '/service/loadBalancerSourceRanges/0'
ingress: {enabled: true, http: {host: a.org, tlsSecret: a}} # tenants.secretName: got "", expected a Secret with tenants, as ingress.enabled
ingress: {enabled: true, http: {host: a.org}}, tenants: TENANTS # ingress.http.tlsSecret: got "", expected a Secret with a certificate of a.org
ingress: {enabled: true}, tenants: TENANTS # ingress.grpc.host: got "", expected a host name
ingress: {enabled: true, http: {host: a.org, tlsSecret: a}, grpc: {host: a.org, tlsSecret: a}}, tenants: TENANTS # ingress.http.host: got "a.org", expected another host
engine: vllm, model: {dtype: q8_0} # model.dtype: got "q8_0", expected float32, bfloat16, float16 or auto
engine: vllm, target: {numerics: portable} # target.numerics: got "portable", expected fastest
engine: vllm, drafter: {method: suffix_decoding} # drafter.method: got "suffix_decoding", expected null
engine: vllm, speculation: {method: vllm_ngram} # speculation.method: got "vllm_ngram", expected one of Paceline's
speculation: {method: vllm_ngram} # speculation.method: got "vllm_ngram", expected a method of Paceline, or engine: vllm
engine: diffusion # topology: got "actors", expected colocated with engine: diffusion
engine: diffusion, topology: colocated, speculation: {method: suffix_decoding} # speculation.method: got "suffix_decoding", expected a schedule
engine: diffusion, topology: colocated, models: MODELS # models.drafter: got "a/c", expected none with engine: diffusion
engine: diffusion, topology: colocated, drafter: {method: suffix_decoding} # drafter.method: got "suffix_decoding", expected null
engine: diffusion, topology: colocated, model: {dtype: bfloat16} # model.dtype: got "bfloat16", expected float32
engine: diffusion, topology: colocated, model: {kv_tokens: 4096} # model.kv_tokens: got 4096, expected null
engine: diffusion, topology: colocated, model: {adapters: {a: /volume/a}} # model.adapters: got ["a"], expected none
model: {adapters: {a: /volume/a}, adapter_drafters: {a: /volume/d}} # model.adapter_drafters: got ["a"], expected none, or topology: colocated
topology: colocated, model: {adapter_drafters: {a: /volume/d}} # model.adapter_drafters.a: got "/volume/d", expected the name of one
engine: diffusion, topology: colocated, model: {device: cuda}, pods: {target: {resources: GPU}} # model.device: got "cuda", expected auto or cpu
engine: diffusion, topology: colocated, target: {numerics: portable} # target.numerics: got "portable", expected fastest
engine: diffusion, topology: colocated, direct: {enabled: true} # direct.enabled: got true, expected false with engine: diffusion
engine: diffusion, topology: colocated, online: {enabled: true} # online.enabled: got true, expected false with engine: diffusion
speculation: {method: freedave} # speculation.method: got "freedave", expected a method that writes in order, or engine: diffusion
models: MODELS, drafter: {method: suffix_decoding} # drafter.method: got "suffix_decoding", expected null where there is a models.drafter
models: {target: a/b}, topology: colocated, speculation: {num_speculative_tokens: 3} # speculation.method: got "draft_model", expected a method that needs no draft model
pods: {target: {resources: {limits: {cpu: 0}}}} # pods.target.resources.limits.cpu: got 0, expected more than 0
pods: {drafter: {resources: {requests: {cpu: 1500m}}}} # pods.drafter.resources.requests.cpu: got "1500m", expected at most its limit, 1
pods: {gateway: {resources: {requests: {memory: 4Gi}}}} # pods.gateway.resources.requests.memory: got "4Gi", expected at most its limit, 2Gi
pods: {target: {resources: {limits: {nvidia.com/gpu: 500m}}}} # pods.target.resources.limits.nvidia.com/gpu: got "500m", expected a whole number
pods: {target: {resources: {requests: {nvidia.com/gpu: 1}}}} # pods.target.resources.requests.nvidia.com/gpu: got 1, expected the same among the limits
pods: {target: {resources: {limits: {cpu: 1 core}}}} # '/pods/target/resources/limits/cpu'
pods: {target: {resources: {limits: {cpu: -1}}}} # limits/cpu': minimum: got -1
pods: {target: {resources: {limits: {amd.com/gpu: 1}}}} # pods.target.image.tag: name an image with ROCm
gatewayApi: {enabled: true, parentRefs: [{name: g}]}, tenants: TENANTS # gatewayApi.http.hostnames: got [], expected other names than gatewayApi.grpc.hostnames
gatewayApi: {enabled: true, parentRefs: [{name: g}], grpc: {hostnames: [a.org]}, http: {hostnames: [a.org]}}, tenants: TENANTS # gatewayApi.http.hostnames: got ["a.org"], expected other names
service: {nodePorts: {grpc: 30051}} # service.type: got "ClusterIP", expected NodePort or LoadBalancer, as service.nodePorts.grpc is 30051
tenants: {testTokenSecret: alice} # tenants.testTokenSecret: got "alice", expected nothing without tenants
image: {digest: abc} # '/image/digest'
ray: {faultTolerance: {passwordSecret: x}} # ray.faultTolerance.redisAddress: got "", expected HOST:PORT
ray: {faultTolerance: {redisAddress: redis}} # '/ray/faultTolerance/redisAddress'
tracing: {exporter: file} # tracing.exporter: got "file", expected otlp, console or none
models: {target: "s3://bucket"}, topology: colocated # models.target: got "s3://bucket", expected ORG/NAME
models: {target: "hf:a b"} # models.target: got "hf:a b"
models: {target: a/b, drafter: a/c, heads: smollm2} # models.heads: got "smollm2", a model; expected heads
models: {cache: {accessModes: [ReadOnlyMany]}} # '/models/cache/accessModes/0'
models: {huggingface: {endpoint: hub.local}} # '/models/huggingface/endpoint'
models: {target: a/b, drafter: a/c, ca: {configMapName: a, secretName: b}} # models.ca.configMapName and models.ca.secretName: give one of them
"""  # noqa: E501


def parsed(text: str) -> dict[str, Any]:
    """The values of a line; names in capitals are those above."""
    known = {"GPU": GPU, "TENANTS": TENANTS, "MODELS": MODELS}

    def filled(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: filled(value) for key, value in node.items()}
        return known.get(node, node) if isinstance(node, str) else node

    values: dict[str, Any] = filled(yaml.safe_load(f"{{{text}}}"))
    return values


@pytest.mark.slow
def test_wrong_values_name_themselves_and_what_is_allowed(chart: Chart) -> None:
    lines = [line.split(" # ") for line in WRONG.strip().splitlines()]
    accepted, unclear = [], {}
    for values, message in lines:
        try:
            chart.render(parsed(values), name="paceline", namespace="models")
        except HelmError as error:
            if message not in str(error):
                unclear[values] = str(error)
        else:
            accepted.append(values)
    assert accepted == []
    assert unclear == {}
    assert len(lines) >= 40


@pytest.mark.parametrize(
    "values",
    [
        "models: {target: a/b}, topology: colocated",
        "models: {target: a/b}, drafter: {method: suffix_decoding}, "
        "speculation: {method: suffix_decoding}",
        "service: {type: LoadBalancer, allowAnonymous: true}",
        "service: {type: LoadBalancer, allowPlainText: true}, tls: {gateway: false}, "
        "tenants: TENANTS",
        "model: {device: cuda, drafter_device: cpu}, pods: {target: {resources: GPU}}",
    ],
)
def test_right_values_are_accepted(chart: Chart, values: str) -> None:
    serve_config(render(chart, parsed(values)))


@pytest.mark.parametrize(
    ("quantity", "cpus"),
    [(".5", 0.5), ("1e3", 1000), ("500m", 0.5), (2, 2), (0.25, 0.25), ("2.", 2), ("1E0", 1)],
)
def test_quantities_of_kubernetes(chart: Chart, quantity: Any, cpus: float) -> None:
    values = {"pods": {"target": {"resources": {"limits": {"cpu": quantity}, "requests": None}}}}
    config = serve_config(render(chart, values))
    assert config["applications"][0]["args"]["target"]["num_cpus"] == cpus


@pytest.mark.parametrize(
    ("limits", "gpus", "tag"),
    [
        ({"nvidia.com/gpu": 2}, 2, "0.1.0-cuda"),
        ({"nvidia.com/mig-1g.10gb": 1}, 1, "0.1.0-cuda"),
        ({"amd.com/gpu": 1}, 1, "rocm"),
        ({}, 0, "0.1.0"),
    ],
)
def test_devices_of_all_kinds(chart: Chart, limits: dict[str, int], gpus: int, tag: str) -> None:
    pod: dict[str, Any] = {"resources": {"limits": {"cpu": "4", **limits}}}
    if tag == "rocm":
        pod["image"] = {"tag": tag}
    objects = render(chart, {"pods": {"drafter": pod}})
    assert serve_config(objects)["applications"][0]["args"]["drafter"]["num_gpus"] == gpus
    cluster = only(objects, "RayService")["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    assert groups["drafter"]["rayStartParams"] == ({"num-gpus": str(gpus)} if gpus else {})
    images = {
        role: group["template"]["spec"]["containers"][0]["image"].rpartition(":")[2]
        for role, group in groups.items()
    }
    assert images == {"drafter": tag, "target": "0.1.0", "gateway": "0.1.0"}
