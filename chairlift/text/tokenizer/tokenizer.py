"""Converts text to token ids and back, with the ``tokenizers`` library and the files of a Hugging Face model
directory."""

from __future__ import annotations

import codecs
import dataclasses
import functools
import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers

from chairlift.base.mistaken_models import check_content
from chairlift.errors import ModelLoadError, RequestError
from chairlift.models.formats.gguf.files import find_gguf
from chairlift.text.tokenizer.growth import check_growth, doubt_about, read_parts
from chairlift.text.tokenizer.trial import try_out

__all__ = ["ByteDecoding", "Span", "Tokenizer", "byte_level_alphabet"]

_log = logging.getLogger(__name__)

_EACH_BYTE: Final = "chairlift.each_byte"
_MAX_BYTES: Final = 4
"""Maximum number of bytes of a character in UTF-8."""
_ALONE: Final = 512
"""Maximum number of characters or tokens for the library's functions that process one text. These functions hold the
interpreter's lock, so all other threads wait. Longer texts use the batch functions, which release the lock."""
_NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKEN_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte, in byte-level vocabularies (GPT-2, Radford et al., 2019). Every byte is written as a
    printable character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF: Final = byte_level_alphabet()


@dataclasses.dataclass(frozen=True, slots=True)
class ByteDecoding:
    """Converts single tokens to bytes, for decoders that can decode one token at a time.

    These are the byte-level decoder (GPT-2, Llama 3, Qwen) and SentencePiece's decoder with byte fallback (Llama 2,
    Mistral, Gemma). With both, the text is the concatenated bytes of the tokens, decoded as UTF-8. Other decoders
    (Metaspace, WordPiece) depend on neighbouring tokens, so this class cannot represent them.
    """

    byte_level: bool
    """Whether each character of a token represents one byte."""
    replacements: tuple[tuple[str, str], ...] = ()
    """Replacements (old, new) within a token, applied in order. Example: ``▁`` becomes a space."""
    byte_fallback: bool = False
    """Whether a token such as ``<0xE4>`` means the byte 0xE4."""
    strip_start: bool = False
    """Whether one space at the beginning of a sequence is dropped."""

    @classmethod
    def of(cls, decoder: Mapping[str, Any] | None) -> ByteDecoding | None:
        """Read the ``decoder`` entry of a ``tokenizer.json``. None if the decoder needs more than one token at a
        time."""
        if decoder is None:
            parts = []
        elif decoder["type"] == "Sequence":
            parts = decoder["decoders"]
        else:
            parts = [decoder]
        kinds = [part["type"] for part in parts]
        if kinds == ["ByteLevel"]:
            return cls(byte_level=True)
        replacements: list[tuple[str, str]] = []
        while kinds[:1] == ["Replace"]:
            part = parts[len(replacements)]
            if "String" not in part["pattern"]:
                return None
            replacements.append((str(part["pattern"]["String"]), str(part["content"])))
            kinds = kinds[1:]
        byte_fallback = kinds[:1] == ["ByteFallback"]
        strip_start = kinds[-1:] == ["Strip"]
        if kinds != ["ByteFallback"] * byte_fallback + ["Fuse"] + ["Strip"] * strip_start:
            return None
        if strip_start and (parts[-1]["content"], parts[-1]["start"], parts[-1]["stop"]) != (" ", 1, 0):
            return None
        return cls(False, tuple(replacements), byte_fallback, strip_start)

    @property
    def errors(self) -> str:
        """Error handler for the UTF-8 decoder. Invalid bytes become U+FFFD: one per broken character, or one per byte
        with byte fallback."""
        return "replace" if self.byte_level else _EACH_BYTE

    def token_bytes(self, token: str) -> bytes:
        """Bytes of a vocabulary entry."""
        if self.byte_level:
            mapped = [_BYTE_OF.get(char, -1) for char in token]
            return token.encode() if -1 in mapped else bytes(mapped)
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.encode()


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A token and the characters [start, end) of the text that it stands for."""

    token_id: int
    start: int
    end: int


class Tokenizer:
    """A tokenizer read from ``tokenizer.json``, with its special tokens and chat template.

    ``named_tokens`` maps names such as ``bos_token`` and ``eos_token`` to texts of tokens. ``backend`` is the
    tokenizers library's object; do not change it. Several threads may use a Tokenizer.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        named_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        # The file may still have settings for truncation and padding from training. Prompts must be complete, so both
        # are turned off.
        backend.no_truncation()
        backend.no_padding()
        self.backend: Final = backend
        self.folder: Path | None = None
        """Directory from which the tokenizer was read; None for other sources."""
        self.doubt = ""
        """Reason why the time or memory for encoding has no known limit; empty if it has."""
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        added = backend.get_added_tokens_decoder()
        self.named_tokens: dict[str, str] = dict(named_tokens or {})
        self.chat_template: str | None = chat_template
        self.special_texts: dict[int, str] = {i: token.content for i, token in added.items() if token.special}
        """Id -> text, for each special token."""
        self.special_ids: frozenset[int] = frozenset(self.special_texts)
        self.vocab_size: int = max([backend.get_vocab_size(with_added_tokens=True) - 1, *added]) + 1
        """Upper bound of the token ids that the tokenizer can produce. The model's vocabulary may be larger."""
        self.num_added: tuple[int, int] = _num_added(backend)
        """(number before the text, number after the text) of the special tokens that :meth:`encode` adds."""
        self.bos_token_id: int | None = self._named_id("bos_token")
        eos = self._named_id("eos_token")
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)
        decoder = backend.decoder and json.loads(backend.decoder.__getstate__())
        self.byte_decoding: ByteDecoding | None = ByteDecoding.of(decoder)
        parts = (decoder or {}).get("decoders", [decoder or {}])
        self._marks_ends = any(part.get("type") == "BPEDecoder" for part in parts)

    @classmethod
    def from_dir(cls, path: str | Path, *, probe: bool = True) -> Tokenizer:
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` from a model directory, or
        the same data from a GGUF file.

        Only ``tokenizer.json`` is required. Raises :class:`~chairlift.errors.ModelLoadError`. With ``probe``, a
        tokenizer whose time has no known limit is first tried in a limited process.
        """
        folder = Path(path)
        file, data, config = _contents(folder)
        # The library already normalizes added tokens while it reads the file. So dangerous files must be refused
        # before.
        parts = read_parts(data)
        check_growth(parts)
        doubt = doubt_about(parts)
        del parts  # some times as large as the file
        if doubt and probe:
            try_out(folder, len(data), doubt)
        try:
            backend = tokenizers.Tokenizer.from_buffer(data)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the native library is no Exception
            reason = " ".join(str(error).split())[:200]
            raise ModelLoadError(f"{file} cannot be read ({reason}); download or save the tokenizer again") from None
        named = _named_tokens(config)
        _add_tokens(backend, config, list(named.values()))
        backend.encode_special_tokens = config.get("split_special_tokens") is True
        tokenizer = cls(backend, named, _chat_template(folder, config))
        tokenizer.folder = folder
        tokenizer.doubt = doubt
        if config.get("add_bos_token") is True and tokenizer.bos_token_id not in tokenizer.encode(""):
            _log.warning(
                "%s: add_bos_token is true, but tokenizer.json adds no bos_token, and so prompts get none (as in "
                "transformers 5; in 4 some classes add it): if the model needs it, begin prompts with it",
                folder,
            )
        return tokenizer

    def _named_id(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        return None if token is None else self.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. ``add_special_tokens`` adds the model's special tokens around it (such as a BOS).

        If the text contains the text of a special token, it is encoded as that token, except if the model sets
        split_special_tokens. A rendered chat already contains its special tokens: encode it with
        ``add_special_tokens=False``. Raises :class:`~chairlift.errors.RequestError` for invalid text, and for text
        that the vocabulary cannot represent.
        """
        ids: list[int] = self._encoding(text, add_special_tokens).ids
        return ids

    def encode_with_spans(self, text: str, wanted: Collection[int]) -> tuple[list[int], list[Span]]:
        """(token ids of a text, places of the ``wanted`` tokens), without added special tokens. Raises RequestError
        like :meth:`encode`."""
        encoding = self._encoding(text, False, with_offsets=True)
        ids: list[int] = encoding.ids
        return ids, [Span(i, *place) for i, place in zip(ids, encoding.offsets, strict=True) if i in wanted]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int], list[int]]:
        """(token ids, token types, indices of the second text's own tokens) of two texts encoded together.

        Special tokens are added as the model expects them. Raises RequestError like :meth:`encode`.
        """
        for text in (first, second):
            self._check_text(text)
        try:
            (encoding,) = self.backend.encode_batch([(first, second)])
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the native library is no Exception
            raise _encode_error(error, "texts", "them") from None
        second_at = [place for place, sequence in enumerate(encoding.sequence_ids) if sequence == 1]
        return encoding.ids, encoding.type_ids, second_at

    @staticmethod
    def _check_text(text: str) -> None:
        if not isinstance(text, str):
            raise RequestError(f"text to encode must be a string, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has half a surrogate pair at character {error.start} (U+{ord(text[error.start]):04X}), "
                "which no encoding can carry; repair or remove it"
            ) from None

    def _encoding(self, text: str, add_special_tokens: bool, with_offsets: bool = False) -> tokenizers.Encoding:
        self._check_text(text)
        # Both batch functions release the interpreter's lock. The faster one computes no offsets, so it is used unless
        # offsets are needed.
        encode_many = self.backend.encode_batch if with_offsets else self.backend.encode_batch_fast
        try:
            if len(text) <= _ALONE:
                return self.backend.encode(text, add_special_tokens=add_special_tokens)
            (encoding,) = encode_many([text], add_special_tokens=add_special_tokens)
            return encoding
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the native library is no Exception
            raise _encode_error(error, "text", "it") from None

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True, final: bool = True) -> str:
        """The text of a token sequence. Unknown ids are skipped; invalid UTF-8 becomes U+FFFD. If ``final`` is false,
        more tokens will follow, so an incomplete character at the end is left out (only with :attr:`byte_decoding`).

        The result equals that of the ``tokenizers`` library, except in a run of ``<0x..>`` byte tokens that is not
        valid UTF-8. The library replaces every byte of such a run, so a later token could change a character that was
        already streamed. This method keeps the valid characters.
        """
        decoding = self.byte_decoding
        if decoding is None:
            return self._decode_together([i for i in ids if 0 <= i < self.vocab_size], skip_special_tokens)
        whole = b"".join([self.token_bytes(i, skip_special_tokens) for i in ids])
        text = codecs.getincrementaldecoder("utf-8")(decoding.errors).decode(whole, final)
        return text[1:] if decoding.strip_start and text.startswith(" ") else text

    def _decode_together(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Decode with the library. If its decoder fails, decode token by token, with U+FFFD for each token that
        fails."""
        try:
            if len(ids) > _ALONE:
                text: str = self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
            else:
                text = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the native library is no Exception, and must not end other requests
            if _lacks_memory(error):
                raise MemoryError("no memory to decode the tokens") from None
            if len(ids) == 1:
                return "\ufffd"
            return "".join([self._decode_together([i], skip_special_tokens) for i in ids])
        return text

    def token_text(self, token_id: int) -> str:
        """Text of one token inside a sequence, also for special tokens.

        Some decoders drop a space at the beginning or the end of a sequence; here it is kept.
        """
        decoding = self.byte_decoding
        if decoding is not None:
            return self.token_bytes(token_id, skip_special_tokens=False).decode("utf-8", decoding.errors)
        if not 0 <= token_id < self.vocab_size:
            return ""
        found = self._texts.get(token_id)
        if found is None:
            found = self._texts[token_id] = self._beside_neighbour(token_id)
        return found

    def _beside_neighbour(self, token_id: int) -> str:
        neighbour, text = self._neighbour
        together = self._decode_together([token_id, *neighbour] if self._marks_ends else [*neighbour, token_id], False)
        if self._marks_ends and together.endswith(text):
            return together[: len(together) - len(text)]
        if not self._marks_ends and together.startswith(text):
            return together[len(text) :]
        return self._decode_together([token_id], False)

    @functools.cached_property
    def _neighbour(self) -> tuple[list[int], str]:
        """(token ids, text) of a token that decodes to one letter. Other tokens are decoded next to it. Both are empty
        if there is no such token."""
        for token_id in range(self.vocab_size):
            if token_id not in self.special_ids:
                text = self._decode_together([token_id], False)
                if len(text) == 1 and text.isalnum() and len(self._decode_together([token_id] * 2, False)) <= 3:
                    return [token_id], text
        return [], ""

    def offsets(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Offset in ``text`` of each token of :meth:`encode`, in characters. A space that belongs to a token is
        included.

        A token that has only a part of a character gets the offset of the character. Raises the errors of ``encode``.
        """
        encoding = self._encoding(text, add_special_tokens, with_offsets=True)
        found = []
        end = 0
        for token_id, added, span in zip(encoding.ids, encoding.special_tokens_mask, encoding.offsets, strict=True):
            start = end if added else span[0]
            own = self.token_text(token_id)
            for _ in range(len(own) - len(own.lstrip())):  # the library may omit these
                start -= start > end and text[start - 1].isspace()
            found.append(start)
            end = end if added else max(end, span[1])
        return found

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """Bytes that a token adds to the text; empty for skipped and unknown ids. Requires ``byte_decoding``."""
        if skip_special_tokens and token_id in self.special_ids:
            return b""
        piece = self._bytes.get(token_id)
        if piece is None:
            token = self.backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
            if token is None or self.byte_decoding is None:
                return b""
            piece = self._bytes[token_id] = self.byte_decoding.token_bytes(token)
        return piece

    def tail_bytes(self, ids: Sequence[int], skip_special_tokens: bool = True) -> bytes:
        """Last bytes of a sequence, enough to contain any incomplete character. Empty only if no token has bytes.
        Requires ``byte_decoding``."""
        tail = b""
        for token_id in reversed(ids):
            tail = self.token_bytes(token_id, skip_special_tokens) + tail
            if len(tail) >= _MAX_BYTES:
                break
        return tail

    def token_to_id(self, token: str) -> int | None:
        """Id of a token by its text in the vocabulary; None if there is none."""
        found: int | None = self.backend.token_to_id(token)
        return found


def _encode_error(error: BaseException, what: str, it: str) -> Exception:
    """The error for a text that the library could not encode: MemoryError, or RequestError if the text is at fault."""
    reason = " ".join(str(error).split())[:200]
    if _lacks_memory(error):
        return MemoryError(f"no memory to encode the {what} ({reason})")
    return RequestError(f"the model's tokenizer cannot encode the {what} ({reason}); change {it}")


def _lacks_memory(error: BaseException) -> bool:
    """Whether the library had no memory. Its regular expressions report that with an exception of another class."""
    return isinstance(error, MemoryError) or "memory allocation" in str(error)


def _num_added(backend: tokenizers.Tokenizer) -> tuple[int, int]:
    try:
        mask = backend.encode("a").special_tokens_mask
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a panic in the native library is no Exception; a tokenizer may know no letter
        mask = []
    text = [place for place, added in enumerate(mask) if not added]
    return (text[0], len(mask) - 1 - text[-1]) if text else (backend.num_special_tokens_to_add(False), 0)


def _read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no regular file. (A device or a pipe might never end.)"""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} cannot be read ({error}); download or save the tokenizer again") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file} must hold a JSON object, got {type(value).__name__}; save the tokenizer again")
    return value


def _contents(folder: Path) -> tuple[Path, bytes, dict[str, Any]]:
    """(path of the tokenizer's file, contents of ``tokenizer.json``, contents of ``tokenizer_config.json``)."""
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            data = file.read_bytes()
        except OSError as error:
            raise ModelLoadError(f"{file} cannot be read ({error}); download or save the tokenizer again") from None
        check_content(file)
        beside = _read_object(folder / "special_tokens_map.json") | _read_object(folder / "tokenizer_config.json")
        return file, data, beside
    if (model := find_gguf(folder)) is not None:
        # The GGUF modules are imported here, because they need numpy, which is slow to import and not needed for most
        # models.
        from chairlift.models.formats.gguf.reader import GGUFModel
        from chairlift.text.tokenizer.gguf_tokenizer import gguf_tokenizer

        return model, *gguf_tokenizer(GGUFModel(model))
    raise ModelLoadError(
        f"{folder} has no tokenizer.json; save one with transformers "
        "(AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)) or send token ids with skip_tokenizer_init"
    )


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if value is not None and not isinstance(value, str):
            raise ModelLoadError(
                f"{name} in tokenizer_config.json must be a string, got {str(value)[:80]!r}; correct it"
            )
        if value is not None:
            named[name] = value
    return named


def _add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Sequence[str]) -> None:
    """Add the tokens that only ``config``, the tokenizer's configuration, has, in the order of transformers 5. Tokens
    in ``named`` become special tokens."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    further = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    try:
        given = {int(index): _added_token(token) for index, token in (config.get("added_tokens_decoder") or {}).items()}
        others = [known.get(text) or _added_token(text) for text in named]
        others += [_added_token(token) for token in (further.values() if isinstance(further, dict) else further)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"the added tokens in tokenizer_config.json cannot be read ({type(error).__name__}: {str(error)[:200]}); "
            "correct them, or save the tokenizer again"
        ) from None
    tokens = {token.content: token for _, token in sorted(given.items(), key=lambda item: item[0])}
    for token in others:
        if token.content in named or token.content not in known:
            token.special = True
            tokens.setdefault(token.content, token)
    for text, token in tokens.items():
        token.special |= text in named or (text in known and known[text].special)
    backend.add_tokens(list(tokens.values()))
    for index, token in given.items():
        if token.content not in known and (found := backend.token_to_id(token.content)) != index:
            raise ModelLoadError(
                f"tokenizer_config.json gives the token {token.content[:80]!r} the id {index}, but tokenizer.json "
                f"gives it {found}; the files do not belong together: download or save the tokenizer again"
            )


def _added_token(given: Any) -> tokenizers.AddedToken:
    """An added token, made from its text alone (then it is a special token), or from a mapping with its text and
    flags."""
    if isinstance(given, str):
        return tokenizers.AddedToken(given, special=True)
    return tokenizers.AddedToken(given["content"], **{flag: given[flag] for flag in _TOKEN_FLAGS if flag in given})


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template. ``chat_template.jinja`` takes precedence over the configuration, as in transformers. Of
    several named templates, the one named ``default`` is used."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{file} cannot be read ({error}); download or save the tokenizer again") from None
    template = config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    try:
        named = {str(entry["name"]): str(entry["template"]) for entry in template}
    except (TypeError, KeyError):
        raise ModelLoadError(
            f"chat_template in {folder / 'tokenizer_config.json'} must be a string or a list of objects with a name "
            "and a template; correct it or delete it"
        ) from None
    return named.get("default")
