"""Turns the YAML files of devices, networks and clusters into checked values, each number with its source."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from scaletrace.errors import InputError, UsageError
from scaletrace.extrapolate.cluster import Cluster, Device, Link, Tier
from scaletrace.extrapolate.interference import prior
from scaletrace.parse.small import read_yaml


def _no_truth(value: Any) -> Any:
    """YAML reads yes, no, on and off as truth values, which pydantic would take for 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_needed", "a number is needed, not yes or no")
    return value


_NUMBER = BeforeValidator(_no_truth)
Positive = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False), _NUMBER]
NotNegative = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False), _NUMBER]
Share = Annotated[float, Field(gt=0, le=1.5, allow_inf_nan=False), _NUMBER]
Count = Annotated[int, Field(ge=1, le=10**9), _NUMBER]
LARGEST_FILE = 1 << 20
"""Bytes of a description; the catalog's own file of 20 clusters is 15 kB."""
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
    sms: Count | None = None
    memory_efficiency: Share = 0.85
    overlap_slowdown: NotNegative | None = None

    def build(self, name: str) -> Device:
        tera = {key: getattr(self, key) for key in self.model_fields_set if key.endswith("_tflops")}
        return Device(
            name=name,
            memory_bytes=self.memory_GB * 1e9,
            memory_Bps=self.memory_GBps * 1e9,
            link_Bps=self.link_GBps * 1e9,
            **{key.removesuffix("tflops") + "flops": value and value * 1e12 for key, value in tera.items()},
            **{key: getattr(self, key) for key in ("generation", "power_W", "sms", "memory_efficiency")},
            overlap_slowdown=prior(self.generation)[0] if self.overlap_slowdown is None else self.overlap_slowdown,
            sources=self.all_sources(),
        )

    def all_sources(self) -> dict[str, str]:
        """The source of every number, with that of the prior for overlap where the entry gives none."""
        found = {"overlap_slowdown": prior(self.generation)[1]} if self.overlap_slowdown is None else {}
        return _Spec.all_sources(self) | found


class TierSpec(_Spec):
    """A tier as YAML: GB/s of one rank in one direction, µs, ranks."""

    name: str
    kind: Literal["nvlink", "pci", "network", "tcp"]
    domain: Annotated[int, Field(ge=0, le=10**9), _NUMBER]
    bandwidth_GBps: Positive
    efficiency: Share = 1.0
    latency_us: NotNegative = 0.0
    oversubscription: Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False), _NUMBER] = 1.0

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


def _quoted(value: Any) -> Any:
    """2.30 without quotes is the number 2.3, which is another version."""
    if isinstance(value, int | float):
        raise PydanticCustomError("quotes_needed", 'a version goes in quotes, as "2.30"')
    return value


class ClusterSpec(_Spec):
    """A cluster as YAML: a device (name in the catalog, or its own entry) and tiers from the innermost out."""

    device: str | DeviceSpec
    tiers: Annotated[list[TierSpec], Field(min_length=1)]
    description: str = ""
    backend: Literal["nccl", "gloo"] = "nccl"
    nccl_version: Annotated[str, Field(pattern=r"^\d{1,4}\.\d{1,4}(\.\d{1,4})?$"), BeforeValidator(_quoted)] = "2.30"
    cpu: Literal["intel", "amd", "other"] = "intel"
    nvls: bool = False

    def build(self, name: str, where: str) -> Cluster:
        """The cluster; `where` names the file in errors."""
        try:
            device = load_device(self.device) if isinstance(self.device, str) else self.device.build(name)
        except UsageError as error:
            raise InputError(f"{where}: device: {error}") from error
        tiers = tuple(tier.build() for tier in self.tiers)
        sizes = [tier.domain for tier in tiers]
        if 0 in sizes[:-1] or any(b % a or b <= a for a, b in pairwise(sizes) if b):
            raise InputError(
                f"{where}: tiers: domains must grow by whole factors from the innermost out, and only the last may be 0 "
                f"(all ranks), got {sizes}"
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

    layers: Count
    hidden: Count
    heads: Count
    vocabulary: Count
    parameters: Positive
    description: str = ""


@lru_cache(maxsize=8)
def _entries(file: str) -> Mapping[str, Any]:
    """One shipped file, as a mapping from name to entry."""
    answer: Mapping[str, Any] = yaml.safe_load((CATALOG / file).read_text(encoding="utf-8"))
    return answer


def _check(kind: type[S], entry: Any, where: str) -> S:
    """The entry as a checked spec, or one sentence that names the file, the field and what is wrong."""
    if not isinstance(entry, dict):
        found = "nothing" if entry is None else f"a {type(entry).__name__}"
        raise InputError(f"{where}: {found} where an entry of keys and values is needed; {_EXAMPLES}")
    try:
        return kind.model_validate(entry)
    except ValidationError as error:
        raise InputError(f"{where}: {_in_words(error)}; {_EXAMPLES}") from error


_EXAMPLES = "`scaletrace catalog clusters NAME` shows an example"


def _in_words(error: ValidationError) -> str:
    """The place and the reason of the first thing that is wrong, and how many more there are."""
    errors = error.errors(include_url=False, include_context=False)
    # `device` may be a name or an entry; for an entry what is wrong inside it is what helps.
    inner = [each for each in errors if "DeviceSpec" in each["loc"] and each["type"] != "model_type"]
    first = next(iter(inner or errors))
    place = ".".join(str(part) for part in first["loc"] if part not in ("DeviceSpec", "str")) or "the whole entry"
    reason = {"extra_forbidden": "no such key", "missing": "is missing"}.get(first["type"], first["msg"])
    others = len({each["loc"] for each in (inner or errors)}) - 1
    return f"{place}: {reason}" + (f" (and {others} more)" if others else "")


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
    spec = _check(kinds[what], _find(what, name), f"{what}.yaml, {name}")
    found = spec.model_dump(mode="json", exclude_unset=True)
    if isinstance(spec, DeviceSpec) and spec.overlap_slowdown is None:
        kappa, source = prior(spec.generation)
        found["overlap_slowdown"] = round(kappa, 3)
        found["sources"] = {**found.get("sources", {}), "overlap_slowdown": source}
    return found


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
    known = isinstance(name_or_path, str) and text in _entries("clusters.yaml")
    path = Path(name_or_path)
    if known or not (isinstance(name_or_path, Path) or text.endswith((".yaml", ".yml")) or path.is_file()):
        where = f"clusters.yaml, {text}"
        return _check(ClusterSpec, _find("clusters", text), where).build(text, where)
    return _check(ClusterSpec, read_yaml(path, _EXAMPLES, LARGEST_FILE), text).build(path.stem, text)


def _find(what: str, name: str) -> Any:
    entries = _entries(f"{what}.yaml")
    if name not in entries:
        raise UsageError(f"no {what[:-1]} {name!r} in the catalog; known: {', '.join(entries)}")
    return entries[name]
