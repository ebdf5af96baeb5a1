"""The fields of sampling, as every dialect spells them, and the sampling parameters that they ask for."""

from operator import attrgetter
from typing import Annotated, Any

import msgspec

from lightning_rl_proxy.dialects.wire.engine_fields import unsupported
from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.sampling import Sampling

_MAX = 2**31
Count = Annotated[int, msgspec.Meta(ge=1, lt=_MAX)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=_MAX)]
_Word = Annotated[str, msgspec.Meta(min_length=1)]


class SamplingWire(msgspec.Struct, kw_only=True):
    """The fields of sampling that every dialect spells alike; those that are not its API's own come as extra fields."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=1e-6, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=_MAX)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, msgspec.Meta(ge=-100, le=100)]] | None = None
    seed: int | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, lt=_MAX)] | None = None
    bad_words: list[_Word] | None = None
    allowed_token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)] | None = None
    priority: Annotated[int, msgspec.Meta(gt=-_MAX, lt=_MAX)] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[_Word], msgspec.Meta(min_length=1)] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None

    def sampling(self, **spelt_otherwise: Any) -> Sampling:
        """These fields as they are, and what the dialect has other words for."""
        values = dict(zip(_ALIKE, _alike(self), strict=True)) | spelt_otherwise
        if any(value is not None for value in _constraining(self)):
            values |= self._constraint(values.get("json_schema"))
        values |= {name: values[name] or None for name in ("stop_token_ids", "min_tokens", "bad_words", "priority")}
        if values["min_tokens"] and values.get("stop"):
            raise GatewayError(
                400,
                "min_tokens holds the model's own end back, not stop strings; leave one of the two out",
                param="min_tokens",
                kind="unsupported_parameter",
            )
        return Sampling(**values)

    def _constraint(self, json_schema: dict[str, Any] | None) -> dict[str, Any]:
        """What the answer must fit, as `Sampling` says it. Raises GatewayError(400) where that is several things."""
        constraints: list[tuple[str, str, Any]] = (
            [] if json_schema is None else [("response_format", "json_schema", "")]
        )
        for field, name in _CONSTRAINTS.items():
            if (value := getattr(self, field)) is not None:
                constraints.append((field, name, value))
        if self.guided_json_object:
            constraints.append(("guided_json_object", "json_schema", {}))
        for inner, value in (self.structured_outputs or {}).items():
            if value is None or value is False or inner == "disable_any_whitespace":
                continue
            if inner not in _STRUCTURED:
                raise unsupported(f"structured_outputs.{inner}", value)
            constraints.append(
                (f"structured_outputs.{inner}", _STRUCTURED[inner], {} if inner == "json_object" else value)
            )
        if len(constraints) > 1:
            fields = ", ".join(field for field, _, _ in constraints)
            raise GatewayError(400, f"an answer fits one constraint, not {fields}; leave one", param=constraints[-1][0])
        if json_schema is not None or not constraints:
            return {}
        [(field, name, value)] = constraints
        return {name: _constraint_of(field, name, value)}


_CONSTRAINTS = {
    "guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
    "regex": "regex", "ebnf": "grammar",
}  # fmt: skip
_STRUCTURED = {
    "json": "json_schema", "json_object": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"
}  # fmt: skip
_constraining = attrgetter(*_CONSTRAINTS, "guided_json_object", "structured_outputs")
_NO_SAMPLING = ("guided_json_object", "structured_outputs", "chat_template_kwargs", "enable_thinking")
_ALIKE = tuple(name for name in SamplingWire.__struct_fields__ if name not in _CONSTRAINTS and name not in _NO_SAMPLING)
_alike = attrgetter(*_ALIKE)


def _constraint_of(field: str, name: str, value: Any) -> Any:
    """A constraint's value. Raises GatewayError(400) for one of another form than its kind has."""
    if name == "json_schema" and isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise GatewayError(400, f"{field} is no JSON: {error}", param=field) from error
    form = {"json_schema": dict[str, Any], "choice": list[str]}.get(name, str)
    try:
        return msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        raise GatewayError(400, f"{field}: {error}", param=field) from error
