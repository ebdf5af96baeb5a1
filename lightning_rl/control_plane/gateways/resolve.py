"""A claim's resources as its agent gets them: every `proxy_llm` becomes a plain `llm` of that one attempt."""

import re
from typing import Annotated, Any

import msgspec

from lightning_rl.store.contract import Claim, ResourcesRequest
from lightning_rl.store.errors import Invalid
from lightning_rl_proxy.address import Address, base_url
from lightning_rl_proxy.http.keys import sign_attempt_key

PROXY_LLM = "proxy_llm"
MAIN_LLM = "main_llm"
# The store says whether an attempt is open; this only bounds how long a leaked key could be of use.
_KEY_SECONDS = 7 * 24 * 3600


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What requests are sampled with where they do not say it: what a session lets them override, and nothing else."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stop: list[str] | None = None


class ProxyLLMResource(msgspec.Struct, frozen=True, kw_only=True, tag=PROXY_LLM, forbid_unknown_fields=True):
    """The policy behind the gateway, as it is published. `val_sampling_parameters` hold for val and test;
    `default_sampling_parameters` wherever neither these nor a request say anything.

    Where an agent asks several policies, each has `agents`, a regular expression of whole agents' tags: their calls are
    for it, and so are those at the URL that the resource's own name tags.
    """

    model: str
    sampling_parameters: dict[str, float | int | bool] = {}
    val_sampling_parameters: dict[str, float | int | bool] = {}
    default_sampling_parameters: SamplingDefaults = SamplingDefaults()
    agents: str | None = None

    def sampling(self, mode: str) -> dict[str, float | int]:
        """The sampling parameters of a rollout of this mode."""
        return self.sampling_parameters if mode == "train" else self.val_sampling_parameters

    def defaults(self) -> dict[str, Any]:
        """Those of `default_sampling_parameters` that are given."""
        parameters: dict[str, Any] = msgspec.to_builtins(self.default_sampling_parameters)
        return parameters


def policy_alone(model: str) -> ResourcesRequest:
    """What a server publishes where nobody else has: its policy as `main_llm`."""
    return ResourcesRequest(resources={MAIN_LLM: {"type": PROXY_LLM, "model": model}})


def proxy_llm(resource: dict[str, Any]) -> ProxyLLMResource | None:
    """The resource as a `ProxyLLMResource`, or None when it is of another type."""
    return msgspec.convert(resource, ProxyLLMResource) if resource.get("type") == PROXY_LLM else None


def check_resources(request: ResourcesRequest) -> None:
    """Raises Invalid, naming the resource, for a `proxy_llm` that is not well formed."""
    for name, resource in request.resources.items():
        try:
            published = proxy_llm(resource)
        except msgspec.ValidationError as error:
            raise Invalid(f"resource {name!r}: {error}") from error
        try:
            re.compile("" if published is None else published.agents or "")
        except re.error as error:
            raise Invalid(f"resource {name!r}: agents is no regular expression: {error}") from error


def resolve(claim: Claim, gateway_url: str, secret: bytes) -> Claim:
    """The claim with a base URL and a key of its own for every `proxy_llm`: at the gateway that has the attempt, where
    the claim names one, else at `gateway_url`."""
    rollout, attempt = claim.rollout, claim.attempt
    address = Address(rollout.rollout_id, attempt.attempt_id)
    expires_at = int(attempt.started_at) + _KEY_SECONDS

    def resolved(name: str, resource: dict[str, Any]) -> dict[str, Any]:
        published = proxy_llm(resource)
        if published is None:
            return resource
        tag = None if published.agents is None or name == MAIN_LLM else name
        openai_url = base_url(claim.gateway_url or gateway_url, address._replace(agent=tag))
        return {
            "type": "llm",
            "model": published.model,
            "base_url": openai_url,
            "anthropic_base_url": openai_url.removesuffix("/v1"),
            "api_key": sign_attempt_key(secret, address.rollout_id, address.attempt_id, expires_at),
            "sampling_parameters": published.sampling(rollout.mode),
        }

    resources = {name: resolved(name, resource) for name, resource in claim.resources.items()}
    return msgspec.structs.replace(claim, resources=resources, gateway_url=None)
