"""Turns the YAML files of devices, networks and clusters into checked values, each number with its source."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from scaletrace.errors import InputError, UsageError
from scaletrace.extrapolate.cluster import Cluster, Device, Link, Tier

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1.5)]
S = TypeVar("S", bound="_Spec")
CATALOG = resources.files("scaletrace.extrapolate") / "catalog"


class _Spec(BaseModel):
    """What all entries share: no unknown keys, a source for the entry and, where it differs, for single numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    source: str = "given by the user"
    sources: dict[str, str] = Field(default_factory=dict)

    def all_sources(self) -> dict[str, str]:
        """The source of every number that is set."""
        numbers = [name for name in self.model_fields_set if name not in ("source", "sources")]
        return {name: self.sources.get(name, self.source) for name in numbers}


class DeviceSpec(_Spec):
    """A device as YAML: TFLOPS dense, GB, GB/s, W."""

    generation: Literal["volta", "ampere", "hopper", "blackwell", "cdna2", "cdna3", "cdna4", "cpu", "other"]
    bf16_tflops: Positive
    memory_GB: Positive
    memory_GBps: Positive
    link_GBps: Positive
    power_W: Positive | None = None
    fp32_tflops: Positive | None = None
    tf32_tflops: Positive | None = None
    fp8_tflops: Positive | None = None
    measured_bf16_tflops: Positive | None = None
    measured_fp8_tflops: Positive | None = None
    sms: int | None = None
    memory_efficiency: Share = 0.85
    overlap_slowdown: Annotated[float, Field(ge=0)] = 0.19

    def build(self, name: str) -> Device:
        tera = {key: getattr(self, key) for key in self.model_fields_set if key.endswith("_tflops")}
        return Device(
            name=name,
            memory_bytes=self.memory_GB * 1e9,
            memory_Bps=self.memory_GBps * 1e9,
            link_Bps=self.link_GBps * 1e9,
            **{key.removesuffix("tflops") + "flops": value and value * 1e12 for key, value in tera.items()},
            **{
                key: getattr(self, key)
                for key in ("generation", "power_W", "sms", "memory_efficiency", "overlap_slowdown")
            },
            sources=self.all_sources(),
        )


class TierSpec(_Spec):
    """A tier as YAML: GB/s of one rank in one direction, µs, ranks."""

    name: str
    kind: Literal["nvlink", "pci", "network", "tcp"]
    domain: Annotated[int, Field(ge=0)]
    bandwidth_GBps: Positive
    efficiency: Share = 1.0
    latency_us: Annotated[float, Field(ge=0)] = 0.0
    oversubscription: Annotated[float, Field(ge=1)] = 1.0

    def build(self) -> Tier:
        return Tier(
            self.name,
            Link(self.kind),
            self.domain,
            self.bandwidth_GBps * 1e9,
            self.efficiency,
            self.latency_us * 1e-6,
            self.oversubscription,
            self.all_sources(),
        )


class ClusterSpec(_Spec):
    """A cluster as YAML: a device (name in the catalog, or its own entry) and tiers from the innermost out."""

    device: str | DeviceSpec
    tiers: Annotated[list[TierSpec], Field(min_length=1)]
    description: str = ""
    backend: Literal["nccl", "gloo"] = "nccl"
    nccl_version: Annotated[str, Field(pattern=r"^\d+\.\d+(\.\d+)?$")] = "2.30"
    cpu: Literal["intel", "amd", "other"] = "intel"
    nvls: bool = False

    def build(self, name: str) -> Cluster:
        device = load_device(self.device) if isinstance(self.device, str) else self.device.build(name)
        tiers = tuple(tier.build() for tier in self.tiers)
        sizes = [tier.domain for tier in tiers]
        if 0 in sizes[:-1] or any(b % a or b <= a for a, b in pairwise(sizes) if b):
            raise InputError(
                f"cluster {name}: domains must grow by whole factors and only the last may be 0, got {sizes}"
            )
        return Cluster(
            name, device, tiers, self.backend, self.nccl_version, self.cpu, self.nvls, self.description,
            self.all_sources(),
        )  # fmt: skip


class NetworkSpec(_Spec):
    """A network generation as YAML: the rate of one port and its latency where the vendor publishes it."""

    port_Gbps: Positive
    latency_us: Positive | None = None
    description: str = ""

    @property
    def port_Bps(self) -> float:
        return self.port_Gbps / 8 * 1e9


class ModelSpec(_Spec):
    """A model as YAML: the sizes from which parameters and FLOP follow."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    parameters: Positive
    description: str = ""


@lru_cache(maxsize=8)
def _entries(file: str) -> Mapping[str, Any]:
    """One shipped file, as a mapping from name to entry."""
    answer: Mapping[str, Any] = yaml.safe_load((CATALOG / file).read_text(encoding="utf-8"))
    return answer


def _check(kind: type[S], entry: Any, where: str) -> S:
    """The entry as a checked spec, or one sentence that names the file, the field and what is wrong."""
    try:
        return kind.model_validate(entry)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole entry"
        raise InputError(
            f"{where}: {place}: {first['msg']} (see `scaletrace catalog clusters` for examples)"
        ) from error


def names(what: str) -> tuple[str, ...]:
    """Names in the catalog of "devices", "networks", "clusters" or "models"."""
    if what not in ("devices", "networks", "clusters", "models"):
        raise UsageError(f"the catalog has devices, networks, clusters and models, not {what!r}")
    return tuple(_entries(f"{what}.yaml"))


def entry(what: str, name: str) -> dict[str, Any]:
    """One checked entry as plain values, with `source` and `sources` beside its numbers (see names)."""
    kinds: dict[str, type[_Spec]] = {
        "devices": DeviceSpec,
        "networks": NetworkSpec,
        "clusters": ClusterSpec,
        "models": ModelSpec,
    }
    if what not in kinds:
        raise UsageError(f"the catalog has {', '.join(kinds)}, not {what!r}")
    return _check(kinds[what], _find(what, name), f"{what}.yaml, {name}").model_dump(mode="json", exclude_unset=True)


def load_device(name: str) -> Device:
    """A device of the catalog."""
    return _check(DeviceSpec, _find("devices", name), f"devices.yaml, {name}").build(name)


def load_network(name: str) -> NetworkSpec:
    """A network generation of the catalog."""
    return _check(NetworkSpec, _find("networks", name), f"networks.yaml, {name}")


def load_model(name: str) -> ModelSpec:
    """A model of the catalog."""
    return _check(ModelSpec, _find("models", name), f"models.yaml, {name}")


def load_cluster(name_or_path: str | Path) -> Cluster:
    """A cluster of the catalog by name, or from a YAML file that holds one entry."""
    text = str(name_or_path)
    if isinstance(name_or_path, str) and not text.endswith((".yaml", ".yml")):
        return _check(ClusterSpec, _find("clusters", text), f"clusters.yaml, {text}").build(text)
    path = Path(name_or_path)
    try:
        entry = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: not a readable cluster description: {str(error).splitlines()[0]}") from error
    return _check(ClusterSpec, entry, str(path)).build(path.stem)


def _find(what: str, name: str) -> Any:
    entries = _entries(f"{what}.yaml")
    if name not in entries:
        raise UsageError(f"no {what[:-1]} {name!r} in the catalog; known: {', '.join(entries)}")
    return entries[name]
