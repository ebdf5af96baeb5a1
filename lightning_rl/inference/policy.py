"""The weights, with their versions: what turns (row, position, token) into logits.

Invariant: `forward` gives what the model's plain forward pass over the row's tokens would give, to float
rounding; `check` holds a model to it before its first token is served.
"""

import inspect
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_rl.inference import fused
from lightning_rl.inference.adapters import Adapters
from lightning_rl.inference.cache import OTHER_ENGINE, ModelUnfit, SlotCache
from lightning_rl.vision import PlacedFeatures, showing

Ints = NDArray[np.int64]

CHUNK_TOKENS = 4096  # bounds a pass's attention mask to CHUNK_TOKENS x window floats
CHECK_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
CHECK_TOLERANCE_LOW_PRECISION = 0.5


class Policy:
    """A causal language model that goes on writing many rows at once.

    Args:
        model: any transformers causal LM with uniform attention layers; used as it is, on its device.
        max_length: tokens that a row can hold.
        version: the policy version of the model's weights.

    Raises:
        ValueError: the architecture cannot be run from a slot cache; the message says why.
    """

    def __init__(self, model: nn.Module, max_length: int, version: int = 0) -> None:
        self.model = model.eval()
        config = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        _require_plain_attention(model, config, max_length)
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.vocab_size = int(config.vocab_size)
        self.max_length = max_length
        self.n_layers = int(config.num_hidden_layers)
        self.versions = [version]  # of the model's weights, then of each adapter's
        self.torn = False  # the weights belong to no version: an update of all of them has begun and has not ended
        # transformers' name of the argument since 5.24; 5.40 takes no other.
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.decoder = fused.FusedDecoder(model, max_length) if fused.fits(model) else None
        self._columns = torch.arange(max_length, device=self.device)
        self._zero = torch.zeros((), dtype=self.dtype, device=self.device)
        self._hidden = torch.full_like(self._zero, torch.finfo(self.dtype).min)
        self._weights = _distinct_weights(model)
        self.adapters: Adapters | None = None  # from the first one on

    @property
    def for_several_threads(self) -> bool:
        """Whether several threads may compute with it at once, each with a cache of its own, and gain by that."""
        return self.decoder is not None and self.device.type == "cpu"

    def cache(self, max_rows: int) -> SlotCache:
        """A cache for so many rows."""
        return SlotCache(self.n_layers, max_rows, self.max_length)

    def forward(
        self,
        cache: SlotCache,
        tokens: Ints,
        positions: Ints,
        first_row: int,
        places: Ints | None = None,
        shown: Sequence[PlacedFeatures] = (),
        adapters: Ints | None = None,
    ) -> Tensor:
        """Logits after the last column of `tokens`.

        Args:
            cache: has the rows' keys and values, and gets the new ones.
            tokens: [b, q], of rows first_row .. first_row + b.
            positions: [b, q], each token's place in its row; -1 for padding, which stands on the left.
            first_row: the row of tokens[0].
            places: [b, q] or [3, b, q], what the model is told of where tokens stand; by default `positions`.
            shown: the images that stand at some of the tokens.
            adapters: [b], the adapter of each row; 0, and by default: none.

        Returns:
            [b, vocab], in the model's dtype.
        """
        if adapters is None:
            adapters = np.zeros(len(tokens), np.int64)
        step = max(1, CHUNK_TOKENS // tokens.shape[0])
        last = tokens.shape[1] % step or step
        for end in range(last, tokens.shape[1] + 1, step):
            chunk = slice(max(0, end - step), end)
            if (positions[:, chunk] >= 0).any():
                if self.adapters is not None:
                    self.adapters.begin(adapters, tokens[:, chunk].shape[1])
                parts = (part for one in shown if (part := one.within(chunk)) is not None)
                where = None if places is None else places[..., chunk]
                logits = self._pass(cache, tokens[:, chunk], positions[:, chunk], first_row, where, list(parts))
        return logits

    def _pass(
        self,
        cache: SlotCache,
        tokens: Ints,
        positions: Ints,
        first_row: int,
        places: Ints | None,
        shown: Sequence[PlacedFeatures],
    ) -> Tensor:
        cache.place(first_row, positions)
        # Padding looks at column 0, which is always written: a row that sees nothing would be NaN.
        clamped = torch.from_numpy(np.maximum(positions, 0)).to(self.device)
        visible = self._columns[: cache.window] <= clamped[..., None]
        mask = torch.where(visible, self._zero, self._hidden)[:, None]
        inputs = torch.from_numpy(tokens).to(self.device)
        if self.decoder is not None:
            return self.decoder.forward(cache, inputs, clamped, mask)
        with showing(self.model, shown):
            output = self.model(
                input_ids=inputs,
                attention_mask=mask,
                position_ids=clamped if places is None else torch.from_numpy(places).to(self.device),
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_name: cache},
            )
        logits: Tensor = output.logits[:, -1]
        return logits

    def load(self, weights: Mapping[str, Tensor], version: int, *, partial: bool = False) -> None:
        """Copy new weights over the old ones, in place; nothing is changed when a check fails.

        Args:
            weights: a state dict, in any number format; of tied weights, one name is enough.
            version: the policy version of the weights as they are then.
            partial: weights that are not given stay as they are.

        Raises:
            ValueError: names are missing or unknown, a shape differs, tied weights differ, or some are given where an
                update of all has broken off.
        """
        self.require_fitting({name: tuple(tensor.shape) for name, tensor in weights.items()}, partial=partial)
        for names, _ in self._weights:
            present = [name for name in names if name in weights]
            for other in present[1:]:
                _require_tied(present[0], weights[present[0]], other, weights[other])
        self._require_whole(partial)
        self.put(weights)
        self.mend(version)

    def require_fitting(self, shapes: Mapping[str, tuple[int, ...]], *, partial: bool = False) -> None:
        """Raises ValueError where weights of these names and shapes are not those of this model, as `load` does."""
        own_names = {name for names, _ in self._weights for name in names}
        if unknown := sorted(set(shapes) - own_names):
            raise ValueError(f"weights that the engine's model does not have: {_some(unknown)}")
        missing = []
        for names, target in self._weights:
            present = [name for name in names if name in shapes]
            if not present:
                missing.append(names[0])
            for name in present:
                _require_same_shape(name, shapes[name], target)
        if missing and not partial:
            raise ValueError(f"weights missing from the update: {_some(missing)}")

    @torch.no_grad()
    def put(self, weights: Mapping[str, Tensor]) -> None:
        """Copy some weights, which `require_fitting` has seen, over the old ones; between `tear` and `mend`."""
        targets = {name: target for names, target in self._weights for name in names}
        for name, source in weights.items():
            targets[name].copy_(source)

    def tear(self, *, partial: bool) -> None:
        """Weights come piece by piece (`put`): until `mend` they belong to no version."""
        self._require_whole(partial)
        self.torn = True

    def mend(self, version: int) -> None:
        """All pieces have come: the weights are of that version."""
        if self.decoder is not None:
            with torch.no_grad():
                self.decoder.refresh()
        self.torn = False
        self.versions[0] = version

    @torch.no_grad()
    def put_adapter(self, adapter: int, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace an adapter (`Adapters.put`). Raises ValueError where it is not of this model."""
        if self.adapters is None:
            self.adapters = Adapters(self.model)
        self.adapters.put(adapter, weights)
        if self.decoder is None:
            self.adapters.hook()
        else:
            self.decoder.adapt(self.adapters)
        self.versions[adapter] = version

    def _require_whole(self, partial: bool) -> None:
        if self.torn and partial:
            raise ValueError("an update of all weights broke off: give all of them")

    def check(self) -> None:
        """Compare a prompt, given in two pieces, to the model's plain forward pass.

        Raises:
            ModelUnfit: they differ: the model does something that a slot cache does not carry.
        """
        length, cache = min(8, self.max_length), self.cache(1)
        tokens = (np.arange(1, length + 1) * 7919 % self.vocab_size)[None]
        positions = np.arange(length)[None]
        cut = length // 2
        if cut:
            self.forward(cache, tokens[:, :cut], positions[:, :cut], 0)
        got = self.forward(cache, tokens[:, cut:], positions[:, cut:], 0)
        inputs = torch.from_numpy(tokens).to(self.device)
        want = self.model(input_ids=inputs, use_cache=False).logits[:, -1]
        error = (got.float().log_softmax(-1) - want.float().log_softmax(-1)).abs().max().item()
        if not error <= CHECK_TOLERANCE.get(self.dtype, CHECK_TOLERANCE_LOW_PRECISION):
            raise ModelUnfit(
                f"{type(self.model).__name__}: log probabilities of the embedded engine are off by {error:.3g} from "
                f"those of the plain forward pass, so it cannot run this architecture: {OTHER_ENGINE}"
            )


def _require_plain_attention(model: nn.Module, config: object, max_length: int) -> None:
    name = type(model).__name__
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ModelUnfit(f"{name}.forward takes no logits_to_keep: not a current causal LM")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if odd := kinds - {"full_attention", "sliding_attention"}:
        raise ModelUnfit(
            f"{name} has layers of {', '.join(sorted(odd))}, and the embedded engine has attention only: {OTHER_ENGINE}"
        )
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds or not getattr(config, "layer_types", None)
    if window is not None and slides and max_length > window:
        raise ModelUnfit(
            f"{name} attends to a window of {window} tokens, which the embedded engine's context of {max_length} must "
            f"not exceed: set actor_rollout_ref.rollout.max_model_len={window}, or {OTHER_ENGINE}"
        )


def _distinct_weights(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Every weight once, with all the names it goes by."""
    by_place: dict[tuple[int, tuple[int, ...]], tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        by_place.setdefault(key, ([], tensor))[0].append(name)
    return list(by_place.values())


def _require_same_shape(name: str, shape: tuple[int, ...], target: Tensor) -> None:
    if shape != tuple(target.shape):
        raise ValueError(f"weight {name} has shape {shape}, the engine's has {tuple(target.shape)}")


def _require_tied(name: str, first: Tensor, other_name: str, other: Tensor) -> None:
    if first.data_ptr() != other.data_ptr() and not torch.equal(first, other):
        raise ValueError(f"{name} and {other_name} are one weight in the engine, but differ here")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
