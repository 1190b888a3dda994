"""Texts that say why images, audio, video and files in requests are not read, and what to send instead."""

from __future__ import annotations

from typing import Final

__all__ = ["IMAGE_PART", "SEEING", "advice"]

SEEING: Final = (
    *("gemma3", "idefics3", "internvl", "llava", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe"),
    *("qwen3_vl", "qwen3_vl_moe", "smolvlm"),
)
"""``model_type`` of the families that read images."""
IMAGE_PART: Final = "{'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,...'}}"
"""How an image is sent over HTTP, for errors."""
_FAMILIES: Final = ", ".join(SEEING)


def advice(kind: str) -> str:
    """Advice for a refused content part of type ``kind``, such as ``input_audio``. Empty for a kind that does not name
    an image, audio, video or file."""
    name = kind.lower()
    if "audio" in name:
        return "no model reads audio here: send a transcript as text"
    if "video" in name:
        return f"no model reads video here: send frames as images to a model of {_FAMILIES}"
    if "image" in name:
        who = f"models of {_FAMILIES} on the native CPU kernels"
        return f"only {who} read images, as {IMAGE_PART}: use one of them, or leave the image out"
    if "file" in name or "document" in name:
        return "files are not read: send their text"
    return ""
