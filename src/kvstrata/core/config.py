"""Every setting of KVStrata: one frozen model.

Where values come from, and which source wins, is ``kvstrata.core.load``. Whether the machine can
hold what is asked for is ``kvstrata.core.limits``.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from kvstrata.core.addresses import http_url, listening_address
from kvstrata.core.blend_fields import BlendFields
from kvstrata.core.errors import ConfigError
from kvstrata.core.event_fields import topic, zmq_address
from kvstrata.core.pipeline import directory_segment, host_segment, url_segment
from kvstrata.core.tier_fields import Count, absolute, refuse_bool
from kvstrata.core.tiers import DiskTier, HostTier, LowestTier, SharedTier, Tier, Tiers
from kvstrata.core.units import parse_bytes

__all__ = [
    "Config",
    "Contradiction",
    "Contradictions",
    "config_from_json",
    "config_to_json",
    "pipeline_string",
    "quota_pairs",
]

_ONE_DAY_SECONDS: Final = 86_400
_SOCKET_PATH_BYTES: Final = 107  # what fits in sun_path, less its closing zero


def _socket_path(path: Path) -> Path:
    length_bytes = len(bytes(absolute(path)))
    if length_bytes > _SOCKET_PATH_BYTES:
        raise ConfigError(
            f"the path is {length_bytes} bytes long and a socket's holds {_SOCKET_PATH_BYTES}"
        )
    return path


def quota_pairs(value: object) -> object:
    """Return the pairs of a mapping, or of one in a line: ``a=0.5, b=0.25``, ``{a: 0.5, b: 0.25}``.

    What is neither comes back as it is.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _flow_mapping(value)
    if isinstance(value, str):
        parts = [part.partition("=") for part in value.split(",") if part.strip()]
        return tuple((name.strip(), number.strip()) for name, _, number in parts)
    return tuple(value.items()) if isinstance(value, Mapping) else value


def _flow_mapping(text: str) -> object:
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise ConfigError(
            "what begins with '{' is read as a mapping in YAML, and is not one",
            hint="write {llama-8b: 0.25}, with a blank after the colon, or llama-8b=0.25",
        ) from e
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else found


Share = Annotated[float, BeforeValidator(refuse_bool), Field(gt=0, le=1)]
Seconds = Annotated[
    float,
    BeforeValidator(refuse_bool),
    Field(gt=0, le=_ONE_DAY_SECONDS, allow_inf_nan=False),
]


_DEFAULT_TIERS: Final = (HostTier(),)


class Contradiction(NamedTuple):
    """Settings that are each valid and cannot hold together."""

    keys: tuple[str, ...]
    message: str
    hint: str


class Contradictions(ConfigError):
    """All contradictions of one configuration."""

    def __init__(self, found: tuple[Contradiction, ...]) -> None:
        super().__init__("; ".join(each.message for each in found))
        self.found = found


class Config(BlendFields):
    """What an operator can set."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    tiers: Tiers = Field(
        default=_DEFAULT_TIERS,
        description=(
            "Where blocks are kept below device memory, fastest first: exactly one host tier, then "
            "at most one disk tier, then at most one that several nodes share. A pipeline string or "
            "a list of mappings."
        ),
        examples=["host:8GiB | disk:/var/cache/kv:200GiB"],
    )
    tokens_per_block: Count | None = Field(
        default=None,
        description=(
            "Tokens in one block; a multiple of the engine's block size, in every KV cache group of "
            "the model, no more than its sliding window and a divisor of its attention chunks. "
            "Unset: the smallest such multiple that is at least 64."
        ),
        examples=["64"],
    )
    block_format: Literal["exact", "int8"] = Field(
        default="exact",
        description=(
            "How tiers below host memory keep blocks. `int8`: with loss, 8 bits an element, in half "
            "the room of bf16 and a quarter of float32. Such blocks have a namespace of their own "
            "and are never found by an engine that wants exact ones. Alike on engine and server."
        ),
        examples=["int8"],
    )
    server: Literal["embedded", "attached"] = Field(
        default="embedded",
        description=(
            "`embedded`: the engine starts a cache server of its own, which ends with it. "
            "`attached`: the engine joins the server that `socket` names."
        ),
        examples=["attached"],
    )
    socket: Annotated[Path, AfterValidator(_socket_path)] | None = Field(
        default=None,
        description=(
            "Absolute path of the server's unix socket. Needed with `server: attached`, refused "
            "with `server: embedded`."
        ),
        examples=["/run/kvstrata/kvstrata.sock"],
    )
    weights_fingerprint: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description=(
            "Text that names these model weights and no others; blocks are shared where it is "
            "equal. Unset: computed from the weight files."
        ),
        examples=["llama-3.1-8b-2024-07-23"],
    )
    attention_hook: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = Field(
        default=None,
        description=(
            "`package.module:Class` of an attention hook, which sees what each attention layer is "
            "given and may change it (docs/extending.md). Only with `kv_connector: DirectConnector` "
            "and `--enforce-eager`."
        ),
        examples=["my_hooks:OutputNorms"],
    )
    load_mode: Literal["auto", "blockwise", "layerwise"] = Field(
        default="auto",
        description=(
            "When a request runs whose blocks are to be loaded. `auto` is right for most. "
            "`blockwise`: once they are loaded; others are computed meanwhile. "
            "`layerwise`: at once; each layer of a forward waits for its own share of the blocks, as "
            "does every other request of that step. Needs synchronous scheduling "
            "(`--no-async-scheduling`; vLLM on a CPU has no other), vLLM's first model runner "
            "(`VLLM_USE_V2_MODEL_RUNNER=0`), one pipeline stage, a model with full attention alone, and "
            "no other connector beside KVStrata; CUDA graphs become piecewise. A load that fails "
            "empties vLLM's prefix cache. "
            "`auto`: on a GPU the same as `blockwise`. Where vLLM computes on a CPU, under the "
            "conditions of `layerwise`, up to 128 MiB a step are copied before its forward, which runs "
            "their requests; all else is `blockwise`."
        ),
        examples=["layerwise"],
    )
    lookup_wait_seconds: Seconds = Field(
        default=0.001,
        description=(
            "Seconds for which the engine's scheduler waits for the reply to a lookup before it "
            "goes on and asks again; four times as long where it has no other request, and 16 times "
            "for tokens that are to be blended. At most `lookup_timeout_seconds`."
        ),
        examples=["0.001"],
    )
    lookup_timeout_seconds: Seconds = Field(
        default=0.1,
        description="Seconds after which the server is too slow: a lookup is a miss, a save is given up.",
        examples=["0.1"],
    )
    remote_lookup_seconds: Seconds = Field(
        default=0.05,
        description=(
            "Longest time in seconds that a request waits for the tier that nodes share to say what it has; "
            "then only what this node knows is loaded."
        ),
        examples=["0.05"],
    )
    load_timeout_seconds: Seconds = Field(
        default=2.0,
        description=(
            "Longest time in seconds that a request waits for blocks to come from below host "
            "memory, and then for them to be copied into the device; then it is computed instead. "
            "What came too late stays in the cache."
        ),
        examples=["2"],
    )
    save_timeout_seconds: Seconds = Field(
        default=5.0,
        description=(
            "Seconds after which an unfinished save is abandoned and its device blocks are let go."
        ),
        examples=["5"],
    )
    recompute: Literal["auto", "never"] = Field(
        default="auto",
        description=(
            "`auto`: blocks that the engine is expected to compute sooner than they could be read "
            "from below host memory, or that would come after `load_timeout_seconds`, are "
            "computed. `never`: all that is found is loaded. The server's to decide."
        ),
        examples=["never"],
    )
    quotas: Annotated[tuple[tuple[str, Share], ...], BeforeValidator(quota_pairs)] = Field(
        default=(),
        description=(
            "A mapping from the name of a model to the largest share of the host tier, and of the "
            "disk tier, that its blocks may take. The name is that on the hub, or the last part of "
            "the model's folder: `kvstrata inspect` shows it. A model at its quota makes room among "
            "its own blocks. Models that are not named share the whole tier. The server's to decide."
        ),
        examples=["llama-8b=0.25", "{llama-8b: 0.25}"],
    )
    start_timeout_seconds: Seconds = Field(
        default=20.0,
        description=(
            "Seconds for which an engine waits at its start for its embedded server. Then it goes on "
            "without a cache, and uses the server once it serves. If some workers have not come so "
            "long after its scheduler has, it logs how many have."
        ),
        examples=["20"],
    )
    reconnect_seconds: Seconds = Field(
        default=1.0,
        description="Pause in seconds between attempts to reach a server that has gone away.",
        examples=["1"],
    )
    drain_timeout_seconds: Seconds = Field(
        default=5.0,
        description="Seconds for which a stopping server writes what is not yet on disk.",
        examples=["5"],
    )
    max_saving_blocks: Count = Field(
        default=4096,
        description=(
            "Largest number of the engine's KV blocks that saves in flight keep from reuse; "
            "beyond it, saves wait for a later step. What has left a sliding window by then is not "
            "saved."
        ),
        examples=["4096"],
    )
    prefault: bool = Field(
        default=True,
        description=(
            "Touch all of the host tier's memory at start: a slower start, and no page faults and "
            "no surprise about memory later."
        ),
        examples=["true"],
    )
    event_log: Annotated[Path, AfterValidator(absolute)] | None = Field(
        default=None,
        description=(
            "Absolute path of a file to which every lookup, how much of it was found, and every save is "
            "written, for `kvstrata replay`: keys of blocks, no tokens. One file a server, which refuses to start where "
            "it could not be written. When it cannot be written later, or another server writes it, "
            "there is no more log, with a warning, and the cache goes on. Unset: no log. The "
            "server's to decide."
        ),
        examples=["/var/log/kvstrata/events.jsonl"],
    )
    event_log_bytes: Annotated[int, BeforeValidator(parse_bytes), Field(ge=16 << 20)] = Field(
        default=1 << 30,
        description=(
            "Most bytes of the event log, 16 MiB at least. At half of it the file is renamed to end in `.1`, in the "
            "place of an older one, and a new one begins."
        ),
        examples=["1GiB"],
    )
    kv_events: Annotated[str, AfterValidator(zmq_address)] | None = Field(
        default=None,
        description=(
            "Address at which the server publishes KV events over ZMQ, as vLLM does, for routers: "
            "hashes of blocks, no tokens. `tcp://HOST:PORT` or `ipc:///PATH`; whoever reaches it can "
            "listen. Needs pyzmq. Unset: none. The server's to decide."
        ),
        examples=["tcp://127.0.0.1:5557"],
    )
    kv_events_topic: Annotated[str, AfterValidator(topic)] = Field(
        default="",
        description=(
            "Topic of these events. `{model}` in it becomes the name of the model, `{namespace}` the "
            "namespace in hexadecimal digits."
        ),
        examples=["kv@node-7@{model}"],
    )
    kv_events_hashes: Literal["int", "bytes"] = Field(
        default="int",
        description=(
            "How these events name blocks: `int`, the last 64 bits of a hash, as vLLM does unless "
            "`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`, or `bytes`, all of it."
        ),
        examples=["bytes"],
    )
    kv_events_replay: Annotated[str, AfterValidator(zmq_address)] | None = Field(
        default=None,
        description=(
            "Address at which subscribers can ask for events that they have lost. Only with "
            "`kv_events`. Unset: none."
        ),
        examples=["tcp://127.0.0.1:5558"],
    )

    metrics: Annotated[str, AfterValidator(listening_address)] | None = Field(
        default=None,
        description=(
            "`HOST:PORT` at which the server answers `GET /metrics` for Prometheus; whoever reaches it "
            "can read. An embedded server's metrics are in vLLM's own `/metrics` already. Unset: none. "
            "The server's to decide."
        ),
        examples=["127.0.0.1:9464"],
    )

    otlp_traces_endpoint: Annotated[str, AfterValidator(http_url)] | None = Field(
        default=None,
        description=(
            "URL of an OpenTelemetry collector, to which the engine sends spans of lookups, promotions, "
            "loads and saves over OTLP/HTTP. Below vLLM's traces where its `--otlp-traces-endpoint` is set "
            "too. Needs `kvstrata[otel]`. Unset: none. The engine's to decide."
        ),
        examples=["http://127.0.0.1:4318/v1/traces"],
    )

    @property
    def host_tier(self) -> HostTier:
        """The first tier; there is always one."""
        return next(tier for tier in self.tiers if isinstance(tier, HostTier))

    @property
    def disk_tier(self) -> DiskTier | None:
        """The tier on this node's disks, if there is one."""
        return next((tier for tier in self.tiers if isinstance(tier, DiskTier)), None)

    @property
    def lasting_tiers(self) -> tuple[Tier, ...]:
        """The tiers whose blocks outlive the process: their keys must mean the same afterwards."""
        return tuple(tier for tier in self.tiers if not isinstance(tier, HostTier))

    @property
    def lowest_tier(self) -> LowestTier | None:
        """The tier that this node shares with others, if there is one."""
        return next((tier for tier in self.tiers if isinstance(tier, LowestTier)), None)

    @model_validator(mode="after")
    def _agree(self) -> "Config":
        found = tuple(check for each in _CHECKS if (check := each(self)) is not None)
        if found:
            raise Contradictions(found)
        return self


def _server_and_socket(config: Config) -> Contradiction | None:
    if config.server == "attached" and config.socket is None:
        return Contradiction(
            ("server", "socket"),
            "server is 'attached' and socket is not set",
            "set socket to the server's socket, or server to 'embedded'",
        )
    if config.server == "embedded" and config.socket is not None:
        return Contradiction(
            ("server", "socket"),
            f"server is 'embedded' and socket is {str(config.socket)!r}",
            "set server to 'attached' to join that server, or take socket away",
        )
    return None


def _tiers_of_the_server(config: Config) -> Contradiction | None:
    if config.server == "embedded" or config.tiers == _DEFAULT_TIERS:
        return None
    return Contradiction(
        ("server", "tiers"),
        "server is 'attached' and tiers are set, which are the server's to decide",
        "give tiers to `kvstrata server` and take them away here",
    )


def _wait_within_timeout(config: Config) -> Contradiction | None:
    if config.lookup_wait_seconds <= config.lookup_timeout_seconds:
        return None
    return Contradiction(
        ("lookup_wait_seconds", "lookup_timeout_seconds"),
        f"lookup_wait_seconds is {config.lookup_wait_seconds} and longer than "
        f"lookup_timeout_seconds, {config.lookup_timeout_seconds}",
        "make lookup_wait_seconds shorter or lookup_timeout_seconds longer",
    )


def _replay_of_events(config: Config) -> Contradiction | None:
    replay, events = config.kv_events_replay, config.kv_events
    if replay is None or events not in {None, replay}:
        return None
    remedy = "set kv_events, to another address" if events is None else "give each its own address"
    return Contradiction(
        ("kv_events", "kv_events_replay"),
        f"kv_events_replay is {replay!r} and kv_events is {events!r}",
        f"{remedy}, or take kv_events_replay away",
    )


def _one_form(config: Config) -> Contradiction | None:
    lowest = config.lowest_tier
    if config.block_format == "exact" or lowest is None or not lowest.compress:
        return None
    return Contradiction(
        ("block_format", "tiers"),
        f"block_format is 'int8' and the {lowest.kind} tier is to compress, which gains nothing more",
        f"take compress away from the {lowest.kind} tier",
    )


_CHECKS: Final[tuple[Callable[[Config], Contradiction | None], ...]] = (
    _server_and_socket,
    _tiers_of_the_server,
    _wait_within_timeout,
    _one_form,
    _replay_of_events,
)


def config_to_json(config: Config) -> str:
    """Return *config* as JSON; ``config_from_json`` gives an equal one back."""
    return config.model_dump_json()


def config_from_json(text: str | bytes) -> Config:
    """Return the configuration that ``config_to_json`` wrote; anything else is a ConfigError."""
    try:
        return Config.model_validate_json(text)
    except ValidationError as e:
        faults = "; ".join(_one_line(fault) for fault in e.errors(include_input=False))
        raise ConfigError(f"this is not a configuration in JSON: {faults}") from None


def _one_line(fault: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    return f"{where}: {fault['msg']}" if where else str(fault["msg"])


def pipeline_string(tiers: tuple[Tier, ...]) -> str:
    """Return the pipeline string that says *tiers*; what it cannot say is a ConfigError."""
    text = " | ".join(_segment(tier) for tier in tiers)
    if Config.model_validate({"tiers": text}).tiers != tiers:
        raise ConfigError(
            f"{text!r} does not say all of these tiers",
            hint="give the tiers as a list of mappings",
        )
    return text


def _segment(tier: Tier) -> str:
    if isinstance(tier, HostTier):
        return host_segment(tier.capacity)
    if isinstance(tier, DiskTier | SharedTier):
        paths = tier.paths if isinstance(tier, DiskTier) else [tier.path]
        return directory_segment(tier.kind, paths, tier.capacity)
    return url_segment(tier.url, tier.model_dump(exclude={"kind", "url"}, exclude_defaults=True))
