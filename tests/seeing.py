"""Tiny models that see: an architecture of each family with random weights, its tokenizer, chat template and image
processor in a folder, as a real one has them. A token is a byte, so whatever is asked fits."""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoImageProcessor, AutoModelForImageTextToText
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "<tool_call>", "</tool_call>",
)  # fmt: skip
PAD = 256 + SPECIAL.index("<|image_pad|>")  # the id of the placeholder
TEMPLATE = """\
{%- macro shown(content) -%}
{%- if content is string -%}{{ content }}{%- else -%}
{%- for part in content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ shown(message.content) }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""


FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")
_OWN_TEXT = {"qwen3_vl": {"head_dim": 8}}


def _tower(family: str, hidden: int) -> dict[str, Any]:
    """What the families' vision configs call their sizes; `hidden` is the language model's."""
    if family == "qwen2_vl":
        return {"embed_dim": 32, "hidden_size": hidden, "mlp_ratio": 2}
    of_all = {"hidden_size": 32, "out_hidden_size": hidden}
    own = {
        "qwen2_5_vl": {"window_size": 16, "fullatt_block_indexes": [1]},
        "qwen3_vl": {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        "glm4v": {"image_size": 32},
    }
    return of_all | own[family]


def make_folder(
    folder: Path, *, seed: int = 0, template: str = TEMPLATE, family: str = "qwen2_vl", **text: Any
) -> Path:
    """The model in `folder`; `text` replaces values of its text config."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = _tokenizer(folder, template)
    frames = 2 if family == "glm4v" else 1  # whose bounds count the pixels of both
    processor = Glm4vImageProcessorPil if family == "glm4v" else Qwen2VLImageProcessorPil
    size = {"shortest_edge": 8 * 8 * frames, "longest_edge": 8 * 8 * 16 * frames}
    processor(patch_size=4, merge_size=2, temporal_patch_size=2, size=size).save_pretrained(folder)
    ends = {"image_start_token_id": "<|vision_start|>", "image_end_token_id": "<|vision_end|>"}
    if family != "glm4v":
        ends = {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    hidden = text.get("hidden_size", 32)
    config = CONFIG_MAPPING[family](
        text_config={
            "vocab_size": 256 + len(SPECIAL), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
            "bos_token_id": None, "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"],
        } | _OWN_TEXT.get(family, {}) | text,
        vision_config={
            "depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "in_channels": 3, "intermediate_size": 64,
        } | _tower(family, hidden),
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        **{name: ids[token] for name, token in ends.items()},
    )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():  # what stands where must show in the logprobs
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    model.generation_config.eos_token_id = ids["<|im_end|>"]
    model.generation_config.pad_token_id = ids["<|endoftext|>"]
    model.save_pretrained(folder)
    return folder


def picture(seed: int, width: int = 16, height: int = 16) -> bytes:
    """A PNG of random colours."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def turned(data: bytes) -> bytes:
    """The same bytes of pixels, which their EXIF says are to be turned by a quarter."""
    image = Image.open(io.BytesIO(data))
    exif = image.getexif()
    exif[0x0112] = 6
    file = io.BytesIO()
    image.save(file, "PNG", exif=exif)
    return file.getvalue()


def see_through(seed: int, width: int = 16, height: int = 16, mode: str = "RGBA") -> bytes:
    """A PNG of random colours, each of them more or less transparent."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    image = Image.fromarray(pixels)
    file = io.BytesIO()
    (image.convert(mode) if mode != "P" else image.quantize(8)).save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes) -> str:
    """The picture as clients send it."""
    return "data:image/png;base64," + base64.b64encode(data).decode()


def part(data: bytes) -> dict[str, Any]:
    """The picture as a part of a Chat Completions message."""
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def asked(text: str, *pictures: bytes) -> dict[str, Any]:
    """A user's message that shows pictures and then says something."""
    return {"role": "user", "content": [*map(part, pictures), {"type": "text", "text": text}]}


def plain_log_probs(
    folder: Path, model: Any, token_ids: Sequence[int], pictures: Sequence[bytes], temperature: float = 1.0
) -> torch.Tensor:
    """Of each token but the first its log probability, by transformers' own way: its processor's pixels, the model's
    own search for placeholders and its own positions. No token but the pictures' may be a placeholder. [T - 1]"""
    ids = torch.tensor([list(token_ids)])
    given: dict[str, Any] = {}
    if pictures:
        images = [Image.open(io.BytesIO(data)).convert("RGB") for data in pictures]
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        given = dict(processor(images=images, return_tensors="pt"))
        given["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, **given).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def _tokenizer(folder: Path, template: str) -> dict[str, int]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": template})
    )
    return {text: tokenizer.token_to_id(text) for text in SPECIAL}
