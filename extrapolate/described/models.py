"""Turns the description of a transformer (GPT, Llama or mixture-of-experts family) into parameters, FLOP and messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from scaletrace.errors import InputError, UsageError
from scaletrace.parse.small import read_yaml

FAMILIES = ("gpt", "llama", "moe")
LARGEST_SIZE = 10_000_000
"""No dimension of a model is larger; beyond it a number is a slip of the pen."""
_BUILT_IN = Path(__file__).parent / "models.yaml"


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder-only transformer.

    gpt    MLP of two matrices, biases, tied embedding unless said otherwise
    llama  gated MLP of three matrices, grouped-query attention, no biases
    moe    llama with `experts` gated MLPs a layer, `experts_per_token` of them active, and a router
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    ffn: int = 0
    kv_heads: int = 0
    vocab: int = 51200
    seq: int = 2048
    tied: bool = True
    experts: int = 1
    experts_per_token: int = 1

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise UsageError(f"model {self.name}: unknown family {self.family!r}; one of {', '.join(FAMILIES)}")
        for name in ("layers", "hidden", "heads", "vocab", "seq", "experts", "experts_per_token", "ffn", "kv_heads"):
            least = 0 if name in ("ffn", "kv_heads") else 1
            if not least <= getattr(self, name) <= LARGEST_SIZE:
                raise UsageError(
                    f"model {self.name}: {name} is {getattr(self, name)}; at least {least} and at most {LARGEST_SIZE:,}"
                )
        if self.hidden % self.heads:
            raise UsageError(f"model {self.name}: hidden {self.hidden} is not a multiple of heads {self.heads}")
        if self.kv_heads and self.heads % self.kv_heads:
            raise UsageError(f"model {self.name}: kv_heads {self.kv_heads} do not divide heads {self.heads}")
        if self.experts_per_token > self.experts:
            raise UsageError(
                f"model {self.name}: {self.experts_per_token} experts a token of {self.experts}; not more than there are"
            )

    @property
    def mlp_width(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def mlp_matrices(self) -> int:
        return 2 if self.family == "gpt" else 3

    @property
    def kv_width(self) -> int:
        return (self.kv_heads or self.heads) * (self.hidden // self.heads)

    @property
    def attention_parameters(self) -> int:
        """Query, key, value and output matrices of one layer."""
        return 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_width

    @property
    def expert_parameters(self) -> int:
        """One MLP (one expert) of one layer."""
        return self.mlp_matrices * self.hidden * self.mlp_width

    @property
    def layer_parameters(self) -> int:
        """All weights of one layer, norms and biases included."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        small = 2 * self.hidden
        if self.family == "gpt":
            small = 4 * self.hidden + (3 * self.hidden + self.hidden + self.mlp_width + self.hidden)
        return self.attention_parameters + self.experts * self.expert_parameters + router + small

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        copies = 1 if self.tied else 2
        positions = self.seq * self.hidden if self.family == "gpt" else 0
        return self.layers * self.layer_parameters + copies * self.embedding_parameters + positions + self.hidden

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets: all but the experts that it is not sent to."""
        return self.parameters - self.layers * (self.experts - self.experts_per_token) * self.expert_parameters

    @property
    def layer_matrices(self) -> int:
        """Matrix weights of one layer that one token meets."""
        return self.attention_parameters + self.experts_per_token * self.expert_parameters

    @property
    def head_in_layers(self) -> float:
        """FLOP of the language-model head in units of one layer's at this sequence length."""
        return 2.0 * self.embedding_parameters / self.layer_forward_flop(1, self.seq)

    def resized(self, layers: int = 0, hidden: int = 0) -> Model:
        """The model with another depth or width, 0 = as it is: heads keep their size and grow in number, the MLP and
        the heads of keys in proportion. Raises UsageError where no whole number of heads fills the width."""
        wide = hidden or self.hidden
        if (wide * self.heads) % self.hidden:
            raise UsageError(f"hidden={wide} is no multiple of the {self.hidden // self.heads} of each head")
        times = wide / self.hidden
        return replace(
            self,
            layers=layers or self.layers,
            hidden=wide,
            heads=wide * self.heads // self.hidden,
            ffn=round(self.ffn * times),
            kv_heads=max(1, round(self.kv_heads * times)) if self.kv_heads else 0,
        )

    def layer_forward_flop(self, tokens: float, seq: int, causal: bool = False) -> float:
        """Forward FLOP of one layer for `tokens` tokens in sequences of `seq`; causal counts half of the scores."""
        scores = 4.0 * seq * self.hidden * (0.5 if causal else 1.0)
        return tokens * (2.0 * self.layer_matrices + scores)

    def step_flop(self, tokens: float, seq: int | None = None) -> float:
        """Model FLOP (forward and backward, no recomputation) of one step over `tokens` tokens."""
        forward = (
            self.layers * self.layer_forward_flop(tokens, seq or self.seq) + 2.0 * tokens * self.embedding_parameters
        )
        return 3.0 * forward


def load_model(name_or_path: str) -> Model:
    """A built-in model by name (the catalog's spelling with underscores too), or the one in a YAML file. Raises InputError and UsageError naming the remedy."""
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml"):
        return _from_mapping(_read(path), str(path))
    known = _read(_BUILT_IN)
    name = name_or_path.lower().replace("_", "-")
    if name not in known:
        raise UsageError(f"no model {name_or_path!r}; give a YAML file or one of: {', '.join(sorted(known))}")
    return _from_mapping({"name": name, **known[name]}, name)


def model_names() -> tuple[str, ...]:
    """Names of the built-in models."""
    return tuple(sorted(_read(_BUILT_IN)))


def _read(path: Path) -> dict[str, Any]:
    document = read_yaml(path, "give a YAML file with a model")
    if not isinstance(document, dict):
        raise InputError(f"{path}: holds no mapping; write `family: llama`, `layers: 32`, …")
    return document


def _from_mapping(document: Mapping[str, Any], source: str) -> Model:
    known = {field.name: field for field in fields(Model)}
    document = {key: value for key, value in document.items() if key != "source"}
    unknown = sorted(map(str, set(document) - set(known)))  # YAML's keys may be of any type
    if unknown:
        raise UsageError(f"{source}: unknown key {unknown[0]!r}; a model has {', '.join(known)}")
    missing = [key for key in ("family", "layers", "hidden", "heads") if key not in document]
    if missing:
        raise UsageError(f"{source}: {missing[0]} is missing; a model needs family, layers, hidden and heads")
    values = {"name": Path(source).stem, **document}
    for key, value in values.items():
        wanted: type = str if key in ("name", "family") else bool if key == "tied" else int
        if type(value) is not wanted:
            raise UsageError(f"{source}: {key} is {_shown(value)}; it must be {wanted.__name__}")
        if isinstance(value, int) and abs(value) > LARGEST_SIZE:  # thousands of digits can't even be printed
            raise UsageError(f"{source}: {key} is too large; no size of a model is above {LARGEST_SIZE:,}")
    return Model(**values)


def _shown(value: Any) -> str:
    """The value as a person wrote it, or of what kind it is where that would fill the screen."""
    shown = repr(value) if isinstance(value, str | float | bool | None) else f"a {type(value).__name__}"
    return shown if len(shown) <= 80 else f"{shown[:80]}…"
