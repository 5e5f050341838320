"""The one schema for a deployed Paceline: what stands under ``args`` of the Serve config file.

Every block forbids keys that it does not know, and every error names the key with its full path
and says what is allowed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from paceline.batching import BatchStrategy
from paceline.config import MAX_DEPTH, MAX_NODES, SpeculationConfig, refused
from paceline.demo import DIFFUSION_DIR, TARGET_DIR
from paceline.deployments.diffusion_plan import (
    DEFAULT_SCHEDULE,
    denoise_plan,
    schedule_of,
    with_schedule,
)
from paceline.deployments.vllm_plan import chain_plan
from paceline.errors import InvalidArgument, ModelNotFound
from paceline.lengths.experience import check_document
from paceline.masked_folder import MASKED_DRAFTERS, masked_kind
from paceline.methods import DRAFTER_PARTS, DRAFTERS, METHODS, VLLM_METHODS, Method
from paceline.model_names import ADAPTER_NAME, default_drafter, pin_model, resolve_model
from paceline.plan import resolve
from paceline.rpc.access import Limits
from paceline.rpc.messages import MAX_MESSAGE_BYTES
from paceline.rpc.tls import ClientTls, ServerTls, check_plain_text
from paceline.rpc.tracing import Tracing, start_tracing

if TYPE_CHECKING:
    from paceline.engine import EngineLimits

CONFIGS_DIR = Path(__file__).parent / "configs"
"""The files that ship with the package: ``demo.yaml`` (actors) and ``colocated.yaml``."""
IMPORT_PATH = "paceline.deployments.app:build"
TENANTS_VARIABLE = "PACELINE_TENANTS"
"""Environment variable with the path of the tenants file, if the config file names none."""
SMALL_MODEL_BYTES = 100e6
"""Up to this size of the weights, a forward is fastest on one thread."""


B = TypeVar("B", bound=BaseModel)


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


_Text = Annotated[str, Field(min_length=1)]


class ModelConfig(_Block):
    """The models and how they are loaded. Without any: the demo pair."""

    name: str = Field("paceline", min_length=1, description="Name of the model that clients see.")
    target: str | None = Field(
        None,
        description="The target: a Hugging Face folder, or a name of a model that each replica "
        "resolves on its node (docs/models.md), for example hf:ORG/NAME@REVISION.",
    )
    drafter: str | None = Field(
        None, description="The drafter: a Hugging Face folder, a GGUF file, or a name of a model."
    )
    heads: str | None = Field(
        None,
        description="Folder of the target's trained heads; null: `heads` in the target's folder.",
    )
    adapters: dict[Annotated[str, Field(pattern=ADAPTER_NAME)], _Text] = Field(
        {},
        description="Adapters (LoRA) of the target by the name that requests give as their model: "
        "folders in PEFT's format (docs/models.md).",
    )
    adapter_drafters: dict[str, _Text] = Field(
        {},
        description="Draft models for sessions with an adapter, by the adapter's name, named as "
        "`drafter`, which drafts for all others. Topology `colocated` only.",
    )
    corpus: list[_Text] = Field(
        [],
        description="Files of text that the methods sam_decoding, sam_token_recycling and "
        "sam_eagle2 copy from, beside a request's own text and earlier outputs.",
    )
    dtype: Literal["float32", "bfloat16", "float16", "q8_0", "q4_0", "int8", "auto"] = Field(
        "float32",
        description="Dtype of weights and activations. q8_0, q4_0 and int8 round the weights at "
        "load; auto keeps the checkpoint's.",
    )
    device: str = Field("auto", description="Device of the target: auto, cpu, cuda or cuda:N.")
    drafter_device: str | None = Field(
        None, description="Device of the draft model and of heads; null: `device`."
    )
    batch_invariant: bool | None = Field(
        None, description="Compute the same bits in any batch; null: where that is the default."
    )
    kv_tokens: int | None = Field(None, ge=16, description="KV entries that all sessions share.")
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="CPU threads of each model; null: 1 for a small target, which is fastest with "
        "that, else one for each CPU that Ray reserves.",
    )


class CallLimits(_Block):
    """What one replica takes from all callers together; it answers the rest RESOURCE_EXHAUSTED."""

    opens_per_second: float | None = Field(
        None, gt=0, description="New sessions a second; null: no limit."
    )
    rounds_per_second: float | None = Field(
        None, gt=0, description="Rounds a second of all verify sessions; null: no limit."
    )
    max_nodes: int = Field(
        MAX_NODES, ge=1, le=MAX_NODES, description="Nodes of a draft in one round."
    )
    max_message_bytes: int = Field(
        MAX_MESSAGE_BYTES, ge=1024, le=MAX_MESSAGE_BYTES, description="Bytes of one message."
    )
    max_calls_per_connection: int = Field(
        4096,
        ge=1,
        le=2**20,
        description="Calls, and so sessions, that one connection may have open.",
    )

    def call_limits(self) -> Limits:
        return Limits(**{name: getattr(self, name) for name in CallLimits.model_fields})


class GatewayLimits(CallLimits):
    """How much one gateway passes on."""

    max_sessions: int | None = Field(
        None, ge=1, description="Sessions and generations that may be open."
    )
    max_calls_per_connection: int = Field(
        256,
        ge=1,
        le=2**20,
        description="Calls, and so sessions, that one connection may have open.",
    )

    def call_limits(self) -> Limits:
        return Limits(**self.model_dump())


class LimitsConfig(CallLimits):
    """How much one target replica takes on."""

    max_sessions: int = Field(64, ge=1, description="Sessions that run at the same time.")
    max_waiting: int = Field(
        64,
        ge=1,
        description="Sessions that may wait for a place. With as many as there are places, no "
        "session waits much longer than a request takes.",
    )
    max_wait_s: float | None = Field(
        30.0,
        gt=0,
        description="Seconds that a request may wait for its first token, by what the replica has "
        "measured: it refuses one that would wait longer (RESOURCE_EXHAUSTED, 429) and says when "
        "to try again; null: no limit but max_waiting.",
    )
    prefill_chunk: int = Field(256, ge=1, description="Prompt tokens that one step computes.")
    prefill_stretch: float | None = Field(
        4.0,
        gt=1,
        description="How many times as long as other steps a step may take that reads prompts "
        "while sessions decode; null: no limit but prefill_chunk.",
    )
    prefix_cache: bool = Field(
        True, description="Keep KV entries of ended sessions for those that begin alike."
    )
    batch_strategy: BatchStrategy = Field(
        "ragged",
        description="Layout of batches; the others are for comparisons, and no faster "
        "(benchmarks/load.py).",
    )
    batch_size: int | None = Field(
        None, ge=1, description="Sessions that one step verifies; null: all that are ready."
    )

    def engine_limits(self) -> EngineLimits:
        from paceline.engine import EngineLimits  # loads torch, which a gateway does without

        return EngineLimits(**self.model_dump(exclude=set(CallLimits.model_fields)))


class GatewayTls(_Block):
    """PEM files; they are read again when they change."""

    cert: str = Field(min_length=1, description="The gateway's certificate, with its chain.")
    key: str = Field(min_length=1, description="Key of that certificate, without password.")
    client_ca: str | None = Field(
        None, description="Authority that signs the certificates of clients."
    )
    require_client_cert: bool = Field(False, description="Refuse clients without one (mTLS).")

    def server(self) -> ServerTls:
        return ServerTls(**self.model_dump(), prefix="gateway.tls.")


class DataPlaneTls(_Block):
    """PEM files with which replicas authenticate one another, always in both directions.

    The authority must sign replicas only: it admits a process with its certificate past the gateway
    and its tenants.
    """

    cert: str = Field(
        min_length=1, description="Certificate of every replica, for its servers and clients."
    )
    key: str = Field(min_length=1, description="Key of that certificate, without password.")
    ca: str = Field(min_length=1, description="Authority that signs the certificates of replicas.")
    server_name: str | None = Field(
        None, description="The name in those certificates; null: the address of each replica."
    )

    def server(self) -> ServerTls:
        return ServerTls(
            cert=self.cert,
            key=self.key,
            client_ca=self.ca,
            require_client_cert=True,
            prefix="data_plane_tls.",
        )

    def client(self) -> ClientTls:
        return ClientTls(**self.model_dump(), prefix="data_plane_tls.")


class Autoscaling(_Block):
    """How many replicas Serve may choose, and how soon it acts."""

    min_replicas: int = Field(1, ge=1, le=1024)
    max_replicas: int = Field(4, ge=1, le=1024)
    upscale_delay_s: float = Field(
        10.0, ge=0, description="Seconds that demand must persist before replicas are added."
    )
    downscale_delay_s: float = Field(
        300.0, ge=0, description="Seconds that low demand must persist before replicas are removed."
    )
    look_back_s: float = Field(
        20.0, gt=10, description="Seconds of measurements that a decision looks back on."
    )
    target_sessions: float = Field(
        8.0, gt=0, description="Sessions per replica to aim at without autoscaling_policy."
    )

    @model_validator(mode="after")
    def _ordered(self) -> Autoscaling:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas must be at least min_replicas, {self.min_replicas}")
        return self


class _Replicas(_Block):
    num_replicas: int = Field(
        1,
        ge=1,
        le=1024,
        description="Number of replicas; with autoscaling, the number at the start.",
    )
    num_cpus: float = Field(0.5, gt=0, description="CPUs that Ray reserves for each replica.")
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {}, description="Custom Ray resources that each replica takes, which place it on nodes."
    )

    autoscaling: Autoscaling | None = Field(None, description="null: as many as num_replicas.")

    @property
    def max_replicas(self) -> int:
        """Most replicas that may run."""
        return self.num_replicas if self.autoscaling is None else self.autoscaling.max_replicas

    def actor_options(self) -> dict[str, Any]:
        """What Ray reserves for each replica."""
        return {"num_cpus": self.num_cpus, "resources": self.resources}


class _GpuReplicas(_Replicas):
    num_gpus: float = Field(0.0, ge=0, description="GPUs that Ray reserves for each replica.")

    def actor_options(self) -> dict[str, Any]:
        return {**super().actor_options(), "num_gpus": self.num_gpus}


class TargetConfig(_GpuReplicas):
    limits: LimitsConfig = LimitsConfig()
    prefix_affinity: bool = Field(
        True,
        description="Prefer the replica that has read the beginning of a prompt before, unless it "
        "is busier than others; false: only load decides.",
    )
    standby: int = Field(
        0,
        ge=0,
        le=1024,
        description="How many of the replicas take sessions only while another one is gone or "
        "full: loaded and warm, so that sessions go on without waiting for a process to start.",
    )
    numerics: Literal["fastest", "portable"] = Field(
        "fastest",
        description="portable: logits have the same bits on any processor, so that sessions may "
        "move between all of them.",
    )
    numerics_mismatch: Literal["refuse", "allow"] = Field(
        "refuse",
        description="What to do with a session whose tokens come from other numerics, if the "
        "request does not say: refuse it, or continue it and say so in the answer.",
    )
    idle_timeout_s: float = Field(
        120.0,
        gt=0,
        description="Seconds without a call after which a replica closes a verify session.",
    )
    drain_s: float = Field(
        10.0, ge=0, description="Seconds that running sessions get to end when a replica stops."
    )


class DrafterConfig(_GpuReplicas):
    method: str | None = Field(
        None,
        description="Method whose drafter the replicas host where there is no draft model, such as "
        "suffix_decoding or eagle3: one that needs nothing but tokens, or a head, to which the "
        "targets send their states.",
    )
    states: Literal["int8", "bfloat16", "float32"] = Field(
        "int8",
        description="How targets encode their states for a head: int8 has a scale for each 32 "
        "numbers.",
    )
    fans: bool = Field(
        True,
        description="While a target verifies, draft for its likeliest verdicts instead of one, "
        "where frames leave the time for it.",
    )
    max_sessions: int = Field(256, ge=1, description="Sessions that one replica may draft for.")
    deadline_s: float = Field(
        2.0,
        gt=0,
        description="Seconds after which a draft counts as lost, and its session continues as AR.",
    )


class HttpConfig(_Block):
    """The OpenAI-compatible API."""

    extra: Literal["forbid", "ignore"] = Field(
        "forbid", description="Keys of requests that nothing here knows: an error, or dropped."
    )
    allow_origins: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        description="Origins whose pages may call the API from a browser (CORS), such as "
        "https://chat.example.com; `*`: all; none by default.",
    )
    model_aliases: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="Further names by which requests may call the model."
    )


class GatewayAutoscaling(Autoscaling):
    target_sessions: float = Field(
        64.0,
        gt=0,
        description="Sessions and generations per gateway to aim at without autoscaling_policy.",
    )


class GatewayConfig(_Replicas):
    """Where clients connect. There is at most one gateway on a node, unless its ports are free ones
    (0), because they are fixed."""

    num_cpus: float = Field(0.25, gt=0, description="CPUs that Ray reserves for each replica.")
    autoscaling: GatewayAutoscaling | None = Field(
        None, description="null: as many as num_replicas."
    )
    host: str = Field("127.0.0.1", min_length=1, description="Interface to listen on.")
    grpc_port: int = Field(
        50051, ge=0, le=65535, description="Port of the gRPC endpoint; 0 picks a free one."
    )
    http_port: int | None = Field(
        8000,
        ge=0,
        le=65535,
        description="Port of the OpenAI-compatible API; 0 picks a free one, null: no HTTP.",
    )
    http: HttpConfig = HttpConfig()
    open_timeout_s: float = Field(
        30.0, gt=0, description="Seconds that a call waits for a target replica that can take it."
    )
    drain_s: float = Field(
        10.0, ge=0, description="Seconds that running calls get to end when a gateway stops."
    )
    max_connection_age_s: float | None = Field(
        None,
        ge=1,
        le=86_400,
        description="Seconds after which a gRPC connection takes no new calls, so that clients "
        "connect again and reach gateways that joined; null: never.",
    )
    max_connection_age_grace_s: float = Field(
        600.0,
        ge=1,
        le=86_400,
        description="Seconds that calls on a connection of that age may still run.",
    )
    tls: GatewayTls | None = Field(None, description="null: plain text, on loopback only.")
    insecure: bool = Field(False, description="Allow plain text on other addresses as well.")
    tenants: str | None = Field(
        None,
        description="File with tenants, their tokens and quotas; null: the one that "
        "PACELINE_TENANTS names; without either, the gateway admits every client.",
    )
    session_keys: str | None = Field(
        None,
        description="File with the keys that sign the ids of verify sessions, one a line: the "
        "first signs, all are accepted; null: gateways share one through Ray.",
    )
    limits: GatewayLimits = GatewayLimits()
    audit_log: str | None = Field(
        None, description="File for opens and refusals; null: the logger paceline.audit."
    )

    @property
    def has_fixed_port(self) -> bool:
        """Whether a second gateway on the same node would find a port in use."""
        return bool(self.grpc_port or self.http_port)


class VllmConfig(_Block):
    """How vLLM runs the target, with ``engine: vllm`` (deployments/engines/vllm.py)."""

    tensor_parallel_size: int = Field(1, ge=1, le=64, description="GPUs that share the model.")
    max_model_len: int | None = Field(
        None, ge=16, description="Tokens of the longest sequence; null: the model's own limit."
    )
    max_speculative_tokens: int = Field(
        16,
        ge=1,
        le=MAX_DEPTH,
        description="Tokens of the longest draft that a request may ask for.",
    )
    draft_deadline_s: float = Field(
        0.05, gt=0, description="Seconds that a step waits for drafter replicas at most."
    )
    enforce_eager: bool = Field(False, description="Run without CUDA graphs and torch.compile.")
    gpu_memory_utilization: float | None = Field(
        None, gt=0, le=1, description="Share of a GPU's memory; null: vLLM's default."
    )
    options: dict[str, Any] = Field(
        {}, description="Further engine arguments of vLLM, by the names in its AsyncEngineArgs."
    )


class OnlineRetention(_Block):
    """How much of the served sessions the learner keeps, and how long; never on a disk."""

    positions: int = Field(4096, ge=1, description="Most rejected positions that are kept.")
    seconds: float = Field(3600.0, gt=0, description="Seconds that one is kept at most.")


class OnlineConfig(_Block):
    """The draft model learns from its rejected tokens as it serves (docs/training.md).

    A tenant's sessions are kept only if the tenants file says ``online_training: true`` of it.
    """

    enabled: bool = Field(False, description="Whether the draft model learns.")
    update_interval: int = Field(
        64, ge=1, description="New rejected positions for each step of training."
    )
    batch: int | None = Field(
        None,
        ge=1,
        description="Positions of a step, with older ones that are still kept; null: the new ones.",
    )
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = Field(
        "forward_kl", description="Distance between draft model and target that a step reduces."
    )
    learning_rate: float = Field(3e-4, gt=0, le=1, description="Learning rate of AdamW.")
    rollout_s: float = Field(
        10.0, gt=0, description="Seconds at least between new weights for the drafters."
    )
    retention: OnlineRetention = OnlineRetention()
    without_tenants: bool = Field(
        False,
        description="Learn from the sessions of a gateway without a tenants file, which are all "
        "the operator's own.",
    )
    max_pending: int = Field(
        1024,
        ge=1,
        description="Rejected positions that wait in a target for the learner; further ones are "
        "dropped.",
    )
    num_cpus: float = Field(1.0, gt=0, description="CPUs that Ray reserves for the learner.")
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {}, description="Custom Ray resources that the learner takes, which place it on nodes."
    )

    @model_validator(mode="after")
    def _ordered(self) -> OnlineConfig:
        batch = self.batch or self.update_interval
        if batch < self.update_interval:
            raise ValueError(f"batch must be at least update_interval, {self.update_interval}")
        if self.retention.positions < batch:
            raise ValueError(f"retention.positions must be at least the batch, {batch}")
        return self

    @property
    def max_replicas(self) -> int:
        """There is one learner."""
        return 1

    def actor_options(self) -> dict[str, Any]:
        """What Ray reserves for the learner."""
        return {"num_cpus": self.num_cpus, "resources": self.resources}


class DirectConfig(_Block):
    """Rounds of devices that reach the targets themselves, past the gateway (docs/protocol.md).

    Certificate, limits and time-outs of the targets' listeners are those of the gateway.
    """

    enabled: bool = Field(
        False, description="Each target listens for devices with a ticket of a gateway."
    )
    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Interface of each target to listen on; clients are told it, or for 0.0.0.0 "
        "and :: the address of its node.",
    )
    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port of each target; 0 picks a free one, any other one means at most one "
        "target on a node.",
    )
    ticket_s: float = Field(60.0, ge=1, le=3600, description="Seconds that a ticket is good for.")
    ticket_tokens: int = Field(
        512,
        ge=1,
        le=1_000_000,
        description="Tokens that one ticket lets a session commit; its tenant's quota pays them "
        "at once, and gets back what is not used.",
    )


class TracingConfig(_Block):
    """OpenTelemetry traces; what is null is taken from the standard OTEL_* variables."""

    exporter: Literal["otlp", "console", "file", "none"] | None = Field(
        None,
        description="Where traces go; null: as OTEL_TRACES_EXPORTER says, else nowhere.",
    )
    endpoint: str | None = Field(None, description="URL of an OTLP collector (HTTP, /v1/traces).")
    folder: str | None = Field(
        None, description="Folder of exporter file, with one file for each process."
    )
    sample: float | None = Field(
        None, ge=0, le=1, description="Share of traces that are kept if the caller has not decided."
    )
    rounds: bool = Field(False, description="Note every round in the span of its session.")

    def start(self, service: str) -> Tracing | None:
        return start_tracing(service, **self.model_dump())


class DeploymentConfig(_Block):
    """A deployment: what stands under ``args``."""

    model: ModelConfig = ModelConfig()
    engine: Literal["paceline", "vllm", "diffusion"] = Field(
        "paceline",
        description="What runs the target; vllm needs vLLM 0.32 in the environment, and diffusion "
        "a masked-diffusion model.",
    )
    topology: Literal["colocated", "actors"] = Field(
        "actors", description="The drafter in the target's process, or in replicas of its own."
    )
    data_plane: Literal["loopback", "node_ip"] = Field(
        "loopback",
        description="Where replicas listen for one another; node_ip is for clusters of several "
        "nodes.",
    )
    data_plane_tls: DataPlaneTls | None = Field(
        None, description="null: plain text between replicas, on loopback only."
    )
    data_plane_insecure: bool = Field(
        False,
        description="Allow plain text with node_ip: every process on that network reaches the "
        "replicas.",
    )
    speculation: SpeculationConfig = Field(
        SpeculationConfig(method="auto"),
        description="Default method and knobs of requests that name none. Empty: auto.",
    )
    experience: str | None = Field(
        None,
        description="What method auto, and trees of measured ranks, know before the first request: "
        "the JSON document that a sweep writes.",
    )
    target: TargetConfig = TargetConfig()
    drafter: DrafterConfig = DrafterConfig()
    gateway: GatewayConfig = GatewayConfig()
    vllm: VllmConfig = VllmConfig()
    online: OnlineConfig = OnlineConfig()
    direct: DirectConfig = DirectConfig()
    tracing: TracingConfig = TracingConfig()

    @field_validator("speculation")
    @classmethod
    def _auto_without_values(cls, speculation: SpeculationConfig) -> SpeculationConfig:
        return speculation if speculation.model_fields_set else SpeculationConfig(method="auto")

    @field_validator("experience")
    @classmethod
    def _document(cls, experience: str | None) -> str | None:
        if experience is not None:
            try:
                check_document(experience)
            except InvalidArgument as error:
                raise ValueError(f"{error.allowed} ({error.value})") from None
        return experience

    @property
    def roles(self) -> list[_Replicas | OnlineConfig]:
        """The blocks of the deployments that there are."""
        drafter = [self.drafter] if self.topology == "actors" else []
        learner = [self.online] if self.online.enabled else []
        return [self.target, *drafter, *learner, self.gateway]

    def num_threads(self, num_cpus: float) -> int:
        """CPU threads of a model in a replica for which Ray reserves ``num_cpus``."""
        if self.model.threads is not None:
            return self.model.threads
        model = resolve_model(self.target_folder, weights=False)
        files = [model] if model.is_file() else model.glob("*.safetensors")
        weights = sum(file.stat().st_size for file in files)
        return 1 if weights <= SMALL_MODEL_BYTES else max(1, int(num_cpus))

    @property
    def target_folder(self) -> str:
        """Folder or name of the target; after :meth:`with_local_models` a path."""
        shipped = DIFFUSION_DIR if self.engine == "diffusion" else TARGET_DIR
        return self.model.target or str(shipped)

    @property
    def drafter_folder(self) -> str | None:
        """Folder or name of the draft model; None: the user's own target has no drafter."""
        if self.engine == "diffusion":
            return None
        shipped = default_drafter(self.model.target)
        return self.model.drafter or (str(shipped) if shipped else None)

    @property
    def hosted_drafter(self) -> str:
        """The catalogue's name of the drafter that drafter replicas host."""
        if self.drafter_folder is not None and (kind := masked_kind(self.drafter_folder)):
            return kind
        if self.drafter_folder is not None or self.drafter.method is None:
            return "draft_model"
        return METHODS[self.drafter.method].drafter or ""

    @property
    def hosts_head(self) -> bool:
        """Whether drafter replicas host a head of the target."""
        return DRAFTER_PARTS[self.hosted_drafter].reads_sent_states

    def with_local_models(self, *, target_weights: bool = True) -> DeploymentConfig:
        """The config with paths in place of models' names; downloads models if needed.

        Args:
            target_weights: False gets only the target's configuration and tokenizer.

        Raises:
            ModelNotFound: a model is not on this node and cannot be downloaded.
        """
        model = self.model
        paths: dict[str, Any] = {}
        if model.target is not None:
            paths["target"] = str(resolve_model(model.target, weights=target_weights))
        drafter = model.drafter or (model.target and self.drafter_folder)
        if drafter is not None:
            paths["drafter"] = str(resolve_model(drafter))
        own = {name: str(resolve_model(each)) for name, each in model.adapter_drafters.items()}
        paths["adapter_drafters"] = own
        return self.model_copy(update={"model": model.model_copy(update=paths)})


def parse_config(args: Mapping[str, Any] | None, *, models_here: bool = True) -> DeploymentConfig:
    """Check untrusted keys and values.

    In the result, models have names that mean the same on all nodes: a folder its absolute path, a
    model of the hub its present commit.

    Args:
        models_here: False leaves it to the replicas to find the models on their nodes.

    Raises:
        InvalidArgument: a wrong key or value; the error names the first one, for example
            ``target.num_cpus``.
        ModelNotFound: a model does not exist.
    """
    try:
        config = DeploymentConfig.model_validate(dict(args or {}))
    except ValidationError as error:
        found = refused(DeploymentConfig, error)
        shown = _shown(found.field, found.value)
        raise InvalidArgument(found.field, shown, found.allowed) from None
    config = _with_secure_ports(config)
    if config.engine == "diffusion":
        _check_diffusion(config, models_here=models_here)
        speculation = with_schedule(config.speculation, DEFAULT_SCHEDULE)
        config = config.model_copy(update={"speculation": speculation})
    if config.engine == "vllm" and config.speculation.method == "auto":
        # Method auto reads the costs of Paceline's own engine.
        own = "draft_model" if config.drafter_folder is not None else "prompt_lookup"
        speculation = config.speculation.model_copy(update={"method": own})
        config = config.model_copy(update={"speculation": speculation})
    try:
        method = _default_method(config)
        if config.engine == "diffusion" and models_here:  # it loads torch
            schedule_of(config.speculation)
    except InvalidArgument as error:
        raise InvalidArgument(f"speculation.{error.field}", error.value, error.allowed) from None
    if config.engine == "vllm" and config.model.dtype in ("q8_0", "q4_0", "int8"):
        raise InvalidArgument(
            "model.dtype", config.model.dtype, "float32, bfloat16, float16 or auto with engine vllm"
        )
    if config.engine != "paceline" and config.target.numerics != "fastest":
        raise InvalidArgument(
            "target.numerics", config.target.numerics,
            f"'fastest' with engine {config.engine}, which adds in an order of its own",
        )  # fmt: skip
    if config.drafter.method is not None:
        _check_hosted(config, config.drafter.method)
    elif config.drafter_folder is None and config.topology == "actors":
        raise InvalidArgument(
            "model.drafter", None,
            "a model with topology 'actors', or a drafter.method, or topology 'colocated'",
        )  # fmt: skip
    _check_online(config)
    if config.drafter_folder is None and method.drafter == "draft_model":
        raise InvalidArgument(
            "speculation.method", method.name,
            "a method that needs no draft model ('prompt_lookup', 'ar'), or a model.drafter",
        )  # fmt: skip
    hosted = config.hosted_drafter
    if hosted in MASKED_DRAFTERS and "draft_model" in (method.drafter, *method.uses):
        allowed = f"a method with {hosted!r} or without a draft model, as model.drafter is masked"
        raise InvalidArgument("speculation.method", method.name, allowed)
    model = config.model
    changes: dict[str, Any] = {}
    for role, name in (("target", model.target), ("drafter", model.drafter)):
        if name is not None:
            try:
                changes[role] = pin_model(name, here=models_here)
            except ModelNotFound as error:
                raise ModelNotFound(f"model.{role}: {error}") from error
    if model.heads is not None and model.heads.startswith("hf:"):
        try:
            changes["heads"] = pin_model(model.heads, here=models_here)
        except ModelNotFound as error:
            raise ModelNotFound(f"model.heads: {error}") from error
    elif model.heads is not None:
        folder = Path(model.heads).expanduser().resolve()
        if models_here and not folder.is_dir():
            raise ModelNotFound(f"model.heads: folder {str(folder)!r} does not exist")
        changes["heads"] = str(folder)
    changes["corpus"] = _corpus_files(config, models_here=models_here)
    changes["adapters"] = _adapter_folders(config, models_here=models_here)
    changes["adapter_drafters"] = _adapter_drafters(config, models_here=models_here)
    return config.model_copy(update={"model": model.model_copy(update=changes)})


def _corpus_files(config: DeploymentConfig, *, models_here: bool) -> list[str]:
    """The corpus with absolute paths. Raises: as :func:`parse_config`."""
    files = [Path(path).expanduser().absolute() for path in config.model.corpus]
    if files and config.engine != "paceline":
        raise InvalidArgument(
            "model.corpus", config.model.corpus,
            f"none with engine {config.engine}: methods of Paceline's engine copy from it",
        )  # fmt: skip
    for file in files:
        if models_here and not file.is_file():
            raise ModelNotFound(f"model.corpus: file {str(file)!r} does not exist")
    return [str(file) for file in files]


def _adapter_folders(config: DeploymentConfig, *, models_here: bool) -> dict[str, str]:
    """The adapters with absolute paths. Raises: as :func:`parse_config`."""
    adapters = config.model.adapters
    if adapters and config.engine != "paceline":
        raise InvalidArgument(
            "model.adapters", list(adapters),
            f"none with engine {config.engine}: Paceline's engine has them",
        )  # fmt: skip
    folders = {}
    for name, path in adapters.items():
        if name in (config.model.name, *config.gateway.http.model_aliases):
            raise InvalidArgument(
                f"model.adapters.{name}", path,
                "another name: this is one of the model's (model.name, gateway.http.model_aliases)",
            )  # fmt: skip
        folder = Path(path).expanduser().absolute()
        if models_here and not folder.is_dir():
            raise ModelNotFound(f"model.adapters.{name}: folder {str(folder)!r} does not exist")
        folders[name] = str(folder)
    return folders


def _adapter_drafters(config: DeploymentConfig, *, models_here: bool) -> dict[str, str]:
    """The adapters' draft models as :func:`parse_config` names models. Raises: as that."""
    drafters = config.model.adapter_drafters
    has_draft_model = config.drafter_folder is not None and config.hosted_drafter == "draft_model"
    if drafters and (config.topology != "colocated" or not has_draft_model):
        raise InvalidArgument(
            "model.adapter_drafters", list(drafters),
            "none, or topology 'colocated' and a draft model as model.drafter",
        )  # fmt: skip
    named = {}
    for adapter, name in drafters.items():
        where = f"model.adapter_drafters.{adapter}"
        if adapter not in config.model.adapters:
            known = ", ".join(config.model.adapters) or "none there"
            raise InvalidArgument(where, name, f"the name of one of model.adapters ({known})")
        try:
            named[adapter] = pin_model(name, here=models_here)
        except ModelNotFound as error:
            raise ModelNotFound(f"{where}: {error}") from error
    return named


def _check_diffusion(config: DeploymentConfig, *, models_here: bool) -> None:
    """Raise InvalidArgument for what a masked-diffusion model has no use for."""
    model = config.model
    if config.topology != "colocated":
        allowed = "'colocated' with engine diffusion: nothing drafts there"
        raise InvalidArgument("topology", config.topology, allowed)
    for name, value, allowed in (
        ("drafter", model.drafter, (None,)),
        ("heads", model.heads, (None,)),
        ("kv_tokens", model.kv_tokens, (None,)),
        ("batch_invariant", model.batch_invariant, (None, True)),
        ("dtype", model.dtype, ("float32",)),
        ("device", model.device, ("auto", "cpu")),
        ("drafter_device", model.drafter_device, (None,)),
    ):
        if value not in allowed:
            known = " or ".join("null" if each is None else str(each) for each in allowed)
            raise InvalidArgument(f"model.{name}", value, f"{known} with engine diffusion")
    folder = Path(config.target_folder)
    if models_here and folder.is_dir() and masked_kind(folder) != "diffuspec":
        raise InvalidArgument(
            "model.target", model.target, "a masked-diffusion model, whose config.json has "
            "mask_token_id, block_size and sub_block_size, with engine diffusion",
        )  # fmt: skip


def _check_online(config: DeploymentConfig) -> None:
    """Raise InvalidArgument if nothing in the deployment can learn."""
    if not config.online.enabled:
        return
    if config.engine != "paceline":
        raise InvalidArgument(
            "online.enabled", True,
            f"false with engine {config.engine}, which tells no target's distributions",
        )  # fmt: skip
    if config.drafter_folder is None or config.hosted_drafter != "draft_model":
        raise InvalidArgument("online.enabled", True, "false without a draft model (model.drafter)")


# Keys that may hold a secret by mistake: errors do not show their values.
_SECRET = re.compile(
    r"(^|\.)(tenants|tokens?|secrets?|passwords?|api_key|session_keys)(\.|$)|_(token|secret)$"
)


class _Hidden:
    def __repr__(self) -> str:
        return "<not shown>"


def _shown(key: str, value: Any) -> Any:
    """A wrong value, as an error shows it: hidden if it may be a secret."""
    return _Hidden() if _SECRET.search(key.lower()) else value


def hosted_methods() -> list[str]:
    """Names of the methods whose drafter a drafter replica can host without a draft model."""
    return [method.name for method in METHODS.values() if _drafts_anywhere(method)]


def _check_hosted(config: DeploymentConfig, name: str) -> None:
    """Raise InvalidArgument unless drafter replicas can host this method without a draft model."""
    hosted = hosted_methods()
    if name not in hosted:
        raise InvalidArgument("drafter.method", name, f"one of {', '.join(hosted)}")
    if config.drafter_folder is not None:
        raise InvalidArgument("drafter.method", name, "null where there is a model.drafter")
    if config.engine != "paceline":
        raise InvalidArgument("drafter.method", name, f"null with engine {config.engine}")


def _drafts_anywhere(method: Method) -> bool:
    """Whether tokens are enough for its drafter, or states of the target that can be sent."""
    if method.drafter not in DRAFTERS or method.uses or method.reads_constraint:
        return False
    return not method.needs or DRAFTER_PARTS[method.drafter].reads_sent_states


def _default_method(config: DeploymentConfig) -> Method:
    """The method that a deployment names, as its engine runs it."""
    speculation = config.speculation
    if config.engine == "paceline":
        return resolve(speculation).method
    if config.engine == "diffusion":
        return denoise_plan(speculation).method
    if speculation.method not in VLLM_METHODS:
        return chain_plan(speculation, config.vllm.max_speculative_tokens).method
    if config.topology == "actors":
        raise InvalidArgument(
            "method", speculation.method, "one of Paceline's methods with topology 'actors', or "
            "topology 'colocated': vLLM drafts in its own worker",
        )  # fmt: skip
    return resolve(speculation, VLLM_METHODS).method


def _with_secure_ports(config: DeploymentConfig) -> DeploymentConfig:
    """The config with absolute paths; raises InvalidArgument if a port is open by mistake."""
    gateway, data = config.gateway, config.data_plane_tls
    if gateway.tls is None and not gateway.insecure:
        check_plain_text(
            gateway.host,
            "gateway.tls",
            "cert and key (`paceline certs` makes some for a trial), gateway.host on loopback, or "
            "gateway.insecure: true",
        )
    _check_direct(config)
    if config.data_plane == "node_ip" and data is None and not config.data_plane_insecure:
        raise InvalidArgument(
            "data_plane_tls",
            None,
            "cert, key and ca (`paceline certs` makes some for a trial) with data_plane: node_ip, "
            "or data_plane_insecure: true",
        )
    if gateway.tls is not None and gateway.tls.require_client_cert and not gateway.tls.client_ca:
        raise InvalidArgument("gateway.tls.client_ca", None, "a file with require_client_cert")
    changes: dict[str, Any] = {}
    if gateway.tls is not None:
        changes["tls"] = _absolute(gateway.tls, "cert", "key", "client_ca")
    if gateway.tenants is None and os.environ.get(TENANTS_VARIABLE):
        gateway = gateway.model_copy(update={"tenants": os.environ[TENANTS_VARIABLE]})
    gateway = _absolute(gateway.model_copy(update=changes), "tenants", "session_keys", "audit_log")
    if data is not None:
        data = _absolute(data, "cert", "key", "ca")
    return config.model_copy(update={"gateway": gateway, "data_plane_tls": data})


def _check_direct(config: DeploymentConfig) -> None:
    """Raise InvalidArgument if targets cannot have a listener for devices, or not that one."""
    if not config.direct.enabled:
        return
    if config.engine != "paceline":
        raise InvalidArgument(
            "direct.enabled", True,
            f"false with engine {config.engine}, which takes no drafts of devices",
        )  # fmt: skip
    if config.gateway.tls is None and not config.gateway.insecure:
        check_plain_text(
            config.direct.host,
            "gateway.tls",
            "cert and key, which targets show as well, direct.host on loopback, or "
            "gateway.insecure: true",
        )


def _absolute(block: B, *names: str) -> B:
    """The block with absolute paths: replicas have another working folder.

    The files may be on the replicas' nodes only, so they are not looked for here.
    """
    given = {name: getattr(block, name) for name in names}
    paths = {n: str(Path(p).expanduser().absolute()) for n, p in given.items() if p is not None}
    return block.model_copy(update=paths)


class AutoscalingPolicy(_Block):
    """Arguments of the policy in ``cluster/autoscaling.py``, which says what they mean."""

    sessions_per_target: float = Field(8.0, gt=0)
    round_ms: float = Field(200.0, gt=0)
    draft_ms: float = Field(50.0, gt=0)
    sessions_per_gateway: float = Field(64.0, gt=0)


class ConfigFile(BaseModel):
    """A Serve config file with one Paceline application.

    Attributes:
        autoscaling_policy: the application's; None: Serve's own.
    """

    model_config = ConfigDict(frozen=True)

    path: Path
    name: str
    route_prefix: str | None
    proxy_location: str
    config: DeploymentConfig
    args: dict[str, Any]
    autoscaling_policy: AutoscalingPolicy | None = None

    def with_args(self, blocks: Mapping[str, Mapping[str, Any]]) -> ConfigFile:
        """The same file with some keys of its blocks changed."""
        args = dict(self.args)
        for name, values in blocks.items():
            args[name] = {**(args.get(name) or {}), **values}
        config = parse_config(args)
        return self.model_copy(update={"args": _with_names(args, config), "config": config})


POLICY_FUNCTION = "paceline.cluster.autoscaling:Policy"
SESSION_POLICY = "paceline.cluster.autoscaling:SessionPolicy"
_APPLICATION_KEYS = {
    "name", "import_path", "route_prefix", "args", "autoscaling_policy", "deployments",
}  # fmt: skip
_FILE_KEYS = {"proxy_location", "applications"}


def read_config_file(path: str | Path) -> ConfigFile:
    """Read the file that `paceline up`, `serve run` and `serve deploy` share.

    Raises:
        InvalidArgument: it is not YAML, or has an unknown key or a wrong value.
        ModelNotFound: a model does not exist.
    """
    path = Path(path)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument("config", str(path), f"a file: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidArgument("config", str(path), f"a YAML file: {error}") from None
    if not isinstance(data, dict):
        raise InvalidArgument("config", str(path), "a mapping with the key 'applications'")
    _only("", data, _FILE_KEYS)
    applications = data.get("applications")
    if not isinstance(applications, list) or len(applications) != 1:
        raise InvalidArgument("applications", applications, "a list with one application")
    (application,) = applications
    if not isinstance(application, dict):
        raise InvalidArgument("applications[0]", application, "a mapping")
    _only("applications[0].", application, _APPLICATION_KEYS)
    if application.get("import_path") != IMPORT_PATH:
        raise InvalidArgument(
            "applications[0].import_path", application.get("import_path"), repr(IMPORT_PATH)
        )
    args = application.get("args") or {}
    if not isinstance(args, dict):
        raise InvalidArgument("applications[0].args", args, "a mapping")
    args = _with_numbers(args, application.get("deployments"))
    config = parse_config(args)
    _check_standby(config.target)
    return ConfigFile(
        path=path,
        name=str(application.get("name", "paceline")),
        route_prefix=application.get("route_prefix", "/"),
        proxy_location=str(data.get("proxy_location", "Disabled")),
        config=config,
        args=_with_names(args, config),
        autoscaling_policy=_policy(application.get("autoscaling_policy"), config),
    )


def _with_names(args: dict[str, Any], config: DeploymentConfig) -> dict[str, Any]:
    """The args with the names of models that mean the same on all nodes."""
    given = {role for role, name in (args.get("model") or {}).items() if name is not None}
    names = {
        role: getattr(config.model, role)
        for role in given & {"target", "drafter", "heads", "adapters", "adapter_drafters"}
    }
    return {**args, "model": {**args["model"], **names}} if names else args


def _with_numbers(args: dict[str, Any], deployments: Any) -> dict[str, Any]:
    """The args with the numbers of replicas that a file gives under Serve's own ``deployments``.

    The chart writes them there, because Serve replaces all replicas when ``args`` change.
    """
    if deployments is None:
        return args
    if not isinstance(deployments, list):
        raise InvalidArgument("applications[0].deployments", deployments, "a list")
    for i, deployment in enumerate(deployments):
        where = f"applications[0].deployments[{i}]"
        if not isinstance(deployment, dict):
            raise InvalidArgument(where, deployment, "a mapping")
        _only(f"{where}.", deployment, {"name", "num_replicas"})
        name = deployment.get("name")
        if name not in ("target", "drafter", "gateway"):
            raise InvalidArgument(f"{where}.name", name, "'target', 'drafter' or 'gateway'")
        block = {**(args.get(name) or {}), "num_replicas": deployment.get("num_replicas")}
        args = {**args, name: block}
    return args


def _check_standby(target: TargetConfig) -> None:
    """Not a validator: Serve may build from ``args`` without the numbers of replicas."""
    scaling = target.autoscaling
    fewest = target.num_replicas if scaling is None else scaling.min_replicas
    if target.standby and target.standby >= fewest:
        name = "num_replicas" if scaling is None else "autoscaling.min_replicas"
        raise InvalidArgument(
            "target.standby", target.standby, f"fewer than target.{name}, {fewest}"
        )


def _policy(given: Any, config: DeploymentConfig) -> AutoscalingPolicy | None:
    """The application's autoscaling policy, in the form that Serve reads."""
    if given is None:
        return None
    where = "applications[0].autoscaling_policy"
    if not isinstance(given, dict):
        raise InvalidArgument(where, given, "a mapping")
    _only(f"{where}.", given, {"policy_function", "policy_kwargs"})
    if given.get("policy_function") != POLICY_FUNCTION:
        raise InvalidArgument(
            f"{where}.policy_function", given.get("policy_function"), repr(POLICY_FUNCTION)
        )
    roles = (config.target, config.drafter, config.gateway)
    if all(role.autoscaling is None for role in roles):
        raise InvalidArgument(
            where, "set", "nothing without target.autoscaling, drafter.autoscaling or "
            "gateway.autoscaling",
        )  # fmt: skip
    try:
        return AutoscalingPolicy.model_validate(given.get("policy_kwargs") or {})
    except ValidationError as error:
        raise refused(AutoscalingPolicy, error, f"{where}.policy_kwargs.") from None


def _only(prefix: str, data: Mapping[Any, Any], known: set[str]) -> None:
    for key in data:
        if key not in known:
            allowed = "one of the keys " + ", ".join(sorted(known))
            raise InvalidArgument(f"{prefix}{key}", data[key], allowed)
