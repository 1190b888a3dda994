"""Fields of messages and records that say whether to learn from them, in the formats of several trainers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from chairlift.errors import ConfigError

__all__ = ["MARKS", "PER_TOKEN", "check_pairs", "leaves_out", "message_mark", "sequence_weight"]

MARKS: Final = ("weight", "train", "training", "loss", "loss_scale", "mask", "masked")
"""Keys of a message that say whether it is learnt: ``weight`` (OpenAI, Mistral), ``train`` and ``training`` (axolotl),
``loss`` and ``loss_scale`` (ms-swift, XTuner); ``mask`` and ``masked`` (torchtune) say the opposite."""
_OPPOSITE: Final = ("mask", "masked")
_OF_PARTS: Final = ("train_detail", "training_detail", "loss_mask")
PER_TOKEN: Final = ("labels", "loss_weight", "loss_mask", "completion_mask", "assistant_masks")
"""Fields of a record of token ids with one number per token."""
_OF_RECORDS: Final = ("label", "kto_tag", "train", "training", "loss")
"""Fields of a record that exclude it if they are false. The first two are those of KTO: a bad answer."""
_KTO: Final = ("label", "kto_tag")
_USERS: Final = ("user", "human", "system")


def message_mark(message: dict[str, Any], where: str) -> bool | None:
    """Remove the keys :data:`MARKS` from a message. Returns whether it is to be learnt; None if it does not say so.

    Raises ConfigError for values other than true, false, 0 and 1, for two keys that contradict each other, and for
    marks of parts of a message.
    """
    if parts := next((key for key in _OF_PARTS if message.get(key)), None):
        raise ConfigError(f"{where}.{parts} marks parts of a message, which cannot be learnt separately; remove it")
    found: dict[str, bool] = {}
    for key in MARKS:
        value = message.pop(key, None)
        if value is None:
            continue
        if value not in (0, 1) or (key == "weight" and isinstance(value, bool)):
            if key == "weight":
                raise ConfigError(f"the weight of a message is 0 or 1, got {str(value)[:60]!r}")
            raise ConfigError(
                f"{where}.{key} must be true, false, 0 or 1 (whether to learn the message), got {str(value)[:60]!r}; "
                "remove it, or rename it"
            )
        found[key] = bool(value) != (key in _OPPOSITE)
    if len(set(found.values())) > 1:
        raise ConfigError(f"{where} has {' and '.join(found)}, which contradict each other; keep one of them")
    learnt = next(iter(found.values()), None)
    if learnt and message.get("role") != "assistant" and set(found) - {"weight"}:
        raise ConfigError(
            f"{where}.{next(iter(found))} asks to learn a message of {str(message.get('role'))[:40]!r}, but only an "
            "assistant's are learnt; remove the key, and set train_on: all if every token is to be learnt"
        )
    return learnt


def leaves_out(record: Mapping[str, Any], *, is_text: bool) -> str | None:
    """The field that excludes the whole record, such as KTO's ``label: false``. None if there is none.

    ``is_text``: whether the record is a plain text. Then its ``label`` is a class, not a mark.

    Raises ConfigError for a mark that cannot be obeyed.
    """
    for name in _OF_RECORDS[len(_KTO) if is_text else 0 :]:
        value = record.get(name)
        if name in _KTO and isinstance(value, int) and not isinstance(value, bool) and value in (0, 1):
            raise ConfigError(
                f"{name} is {value}, which may mean a bad answer (KTO: true or false) or a class; give true or false, "
                f"or rename the field (data.columns: {{{name}: class}})"
            )
        if value is False:
            return f"{name}: false"
    mask = record.get("mask")
    if isinstance(mask, str) and mask.lower() not in _USERS:
        raise ConfigError(
            f"mask names the speaker whose messages are not learnt, got {mask[:60]!r}; only {', '.join(_USERS)} can be"
            " masked: give the other messages weight: 0"
        )
    if "input_ids" not in record and (names := [name for name in PER_TOKEN if record.get(name) is not None]):
        raise ConfigError(f"{names[0]} has one number per token, so it needs input_ids; give them, or remove the field")
    if "input_ids" not in record and sequence_weight(record) == 0:
        return "weight: 0"
    return None


def sequence_weight(record: Mapping[str, Any]) -> float:
    """Factor of the loss of a whole record, from its field ``weight``; 1 if it has none. Raises ConfigError."""
    value = record.get("weight")
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < float("inf"):
        raise ConfigError(
            f"weight must be a number (a factor of the record's loss), got {str(value)[:60]!r}; correct it, or rename "
            "the field (data.columns)"
        )
    return float(value)


def check_pairs(record: Mapping[str, Any], last_role: Any) -> None:
    """Raise ConfigError if the answer of a chat is not in its messages, but in a field of preference data."""
    if record.get("chosen") and last_role != "assistant":
        raise ConfigError(
            "the chat ends without an answer, and has a pair of answers in chosen and rejected: add the chosen answer "
            "to the messages to learn it"
        )
