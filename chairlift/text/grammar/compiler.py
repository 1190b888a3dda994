"""Compiles grammars, and follows the generated tokens in them. Only this module calls llguidance.

Grammars are compiled under size limits. A schema with a keyword that llguidance would not enforce completely is
refused. Callers cannot change this, because the compiler's options override options inside a schema.
"""

from __future__ import annotations

import importlib.util
import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from chairlift.base.structured_outputs import CANNOT_BE_FOLLOWED, Grammar
from chairlift.errors import RequestError
from chairlift.text.grammar.schemas import checked_schema, checked_tags
from chairlift.text.grammar.structural_tag import TagMarkers, structural_tag_grammar
from chairlift.text.tokenizer.tokenizer import Tokenizer

__all__ = ["Compiled", "Compiler", "GrammarCompiler", "Matcher", "have_llguidance", "markers_of"]

_WHITESPACE: Final = "(?:[ \\t]|\\n(?: {0,16}|\\t{0,8}))?"
"""Regular expression for white space between the parts of a JSON text: nothing, a blank, or a line break with
indentation. With more freedom, small models write blanks and empty lines up to ``max_tokens``."""
_LIMITS: Final[dict[str, Any]] = {
    "max_grammar_size": 20_000,
    "step_max_items": 50_000,
    "max_items_in_row": 1_000,
    "verbose_errors": False,
}
_JSON_ITEMS_IN_ROW: Final = 10_000
"""Maximum number of items in a row of the parser for JSON. An optional property needs four items, so the largest
allowed grammars stay below the limit."""
_FIRST_MASK_SECONDS: Final = 2.0
"""Maximum processor seconds for the first mask. It builds most of the lexer, so it is slower than later masks."""
_MASK_SECONDS: Final = 0.1
"""Maximum processor seconds for each later mask."""
_RUN_SECONDS: Final = 0.005
"""A matcher asks for a whole forced text only where one mask took at most this many processor seconds. The question
takes about as long as the mask, and no other thread runs Python meanwhile."""
_MAX_ERROR: Final = 400
_OF_JSON: Final = ("json_schema", "structural_tag")
"""Kinds of grammars that consist of JSON schemas. The text of such a grammar is JSON."""
_INSTEAD: Final = {
    "not": 'list what is allowed, with "enum", "type" or "anyOf"',
    "uniqueItems": 'leave it out and remove repeated items yourself (a list instead of a set), or use "maxItems" 1',
    "contains": 'leave it out, or describe each position with "prefixItems"',
    "propertyNames": 'name the keys in "properties", or use "patternProperties" with "additionalProperties": false',
    "dependentRequired": 'require the keys, or use "anyOf" with one object for each case',
    "dependentSchemas": 'use "anyOf" with one object for each case',
    "dependencies": 'use "anyOf" with one object for each case',
    "if": 'use "anyOf" with one object for each case',
    "unevaluatedProperties": 'write all properties into one object with "additionalProperties"',
    "unevaluatedItems": 'write all items into one schema with "prefixItems" and "items"',
    "$dynamicRef": 'use "$ref"',
    "$recursiveRef": 'use "$ref"',
}
"""Keyword that cannot be enforced -> what to write instead. The first keyword that a schema has is named."""
_UNIMPLEMENTED: Final = re.compile(r"Unimplemented keys: \[(.*)\]")


class Matcher(Protocol):
    """State of one output in its grammar. Only one thread at a time may use it."""

    num_consumed: int
    """Number of output tokens that the matcher has processed."""
    error: str
    """Description of a permanent error; empty if there is none."""

    @property
    def stopped(self) -> bool:
        """Whether the output must end here."""
        ...

    def consume(self, token_id: int) -> bool:
        """Process the next token. Returns False and sets :attr:`error` if the grammar does not allow it."""
        ...

    def rewind(self, num_consumed: int) -> bool:
        """Return to the state after the first ``num_consumed`` tokens. Returns False and sets :attr:`error` if that
        fails."""
        ...

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Number of leading tokens of ``token_ids`` that the grammar allows next, one after the other. The state does
        not change."""
        ...

    def forced(self, limit: int) -> Sequence[int]:
        """Up to ``limit`` tokens of the text that must come next; empty if the grammar leaves a choice.

        The tokens are a guess: the tokenizer's usual split of this text. The grammar may also allow another split.
        """
        ...

    def mask(self) -> npt.NDArray[np.uint32] | None:
        """Mask of the tokens that may come next, in the form of :data:`~chairlift.base.step_batch.Masks`. It is valid
        until the next call. None after an :attr:`error`."""
        ...


class Compiled(Protocol):
    """A compiled grammar. Its matchers are independent."""

    def matcher(self, stop_token_ids: Sequence[int] = ()) -> Matcher:
        """A matcher at the beginning of an output. ``stop_token_ids`` are allowed wherever the output may end."""
        ...


class Compiler(Protocol):
    """Compiles grammars for one model."""

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile a grammar. Raises RequestError if the grammar is invalid."""
        ...


def have_llguidance() -> None:
    """Raise RequestError with the package to install if llguidance is missing."""
    if importlib.util.find_spec("llguidance") is None:
        raise RequestError(
            "structured_outputs needs llguidance, which is not installed; pip install llguidance, or leave it out"
        )


def markers_of(tokenizer: Tokenizer) -> TagMarkers:
    """The added tokens of a tokenizer, as :class:`TagMarkers`."""
    added = tokenizer.backend.get_added_tokens_decoder()
    special = {token.content: token_id for token_id, token in added.items() if token.special}
    return TagMarkers(special, {token.content: i for i, token in added.items() if not token.special})


class GrammarCompiler:
    """Compiles grammars for a model with ``vocab_size`` logits.

    ``read_tokenizer`` is called for the first grammar, and returns the tokenizer or None. An output ends with one of
    ``eos_token_ids`` or of the tokenizer's own end tokens. The tokenizer's tables are built once, which takes 0.1 to 4
    s and 30 to 370 MB. Several threads may use the object.
    """

    def __init__(
        self, read_tokenizer: Callable[[], Tokenizer | None], vocab_size: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self._read_tokenizer = read_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._tables: tuple[Any, int, tuple[int, ...], TagMarkers] | None = None

    def compile(self, grammar: Grammar) -> _CompiledGrammar:
        """Compile a grammar. Raises RequestError if the grammar is invalid, too large or too slow, or if llguidance or
        a supported tokenizer is missing."""
        have_llguidance()
        tables, width, eos, markers = self._known_tables()
        base, seconds = matcher_for(grammar, tables, markers)
        return _CompiledGrammar(base, width, self._vocab_size, eos, seconds)

    def _known_tables(self) -> tuple[Any, int, tuple[int, ...], TagMarkers]:
        with self._lock:
            if self._tables is None:
                self._tables = self._make_tables()
            return self._tables

    def _make_tables(self) -> tuple[Any, int, tuple[int, ...], TagMarkers]:
        tokenizer = self._read_tokenizer()
        if tokenizer is None:
            raise RequestError("structured_outputs needs the tokenizer, which was not loaded; leave it out")
        width = max(self._vocab_size, tokenizer.vocab_size)
        eos = tuple(sorted({*self._eos_token_ids, *tokenizer.eos_token_ids}))
        if not eos:
            raise RequestError("structured_outputs needs a token that ends the answer, and the model has none")
        if tokenizer.byte_decoding is None:
            raise RequestError(
                "structured_outputs needs a tokenizer whose tokens are bytes of the text (byte-level, or with byte"
                " fallback), and the model's looks at neighbours; leave it out"
            )
        from llguidance import LLTokenizer

        try:
            tables = LLTokenizer(_without_markers(tokenizer), n_vocab=width, eos_token=list(eos))
        except Exception as error:
            reason = " ".join(str(error).split())[:_MAX_ERROR]
            raise RequestError(f"structured_outputs cannot be used with the model's tokenizer: {reason}") from None
        return tables, width, eos, markers_of(tokenizer)


class _CompiledGrammar:
    """Result of :meth:`GrammarCompiler.compile`."""

    def __init__(self, base: Any, width: int, vocab_size: int, eos: tuple[int, ...], mask_seconds: float) -> None:
        self.mask_seconds = mask_seconds
        """Processor seconds of the newest mask that any matcher of this grammar computed."""
        self._base = base
        self._lock = threading.Lock()
        self.width = width
        self.vocab_size = vocab_size
        self.eos = eos

    def matcher(self, stop_token_ids: Sequence[int] = ()) -> Matcher:
        """A matcher at the beginning of an output. ``stop_token_ids`` are allowed wherever the output may end."""
        with self._lock:
            return _LLMatcher(self._base.deep_copy(), self, stop_token_ids)


class _LLMatcher:
    """A :class:`Matcher` that calls llguidance's own matcher."""

    def __init__(self, matcher: Any, compiled: _CompiledGrammar, stop_token_ids: Sequence[int]) -> None:
        self.num_consumed = 0
        self.error = ""
        self._matcher = matcher
        self._eos = compiled.eos
        self._bits = np.zeros(-(-compiled.width // 32), dtype=np.uint32)
        self._address = self._bits.ctypes.data
        self._mask = self._bits[: -(-compiled.vocab_size // 32)]
        self._tail = np.uint32((1 << (compiled.vocab_size % 32 or 32)) - 1)
        self._ends = [i for i in stop_token_ids if 0 <= i < compiled.vocab_size and i not in compiled.eos]
        self._compiled = compiled
        self._run: list[int] = []
        self._run_at = 0
        """Tokens of a forced text, and the position in the output of the first of them. Without them, llguidance would
        tokenize the rest of the text again for each mask."""

    @property
    def stopped(self) -> bool:
        return bool(self._matcher.is_stopped())

    def consume(self, token_id: int) -> bool:
        if self.error:
            return False
        # In an error state llguidance allows only the end. Without this check, an error would look like an output that
        # ended early.
        if not self._matcher.consume_token(token_id) or self._matcher.is_error():
            return self._fail(self._matcher.get_error())
        if self._run and self._forced_here()[:1] not in ([], [token_id]):
            self._run = []
        self.num_consumed += 1
        return True

    def rewind(self, num_consumed: int) -> bool:
        if self.error:
            return False
        if num_consumed < self.num_consumed:
            if not self._matcher.rollback(self.num_consumed - num_consumed) or self._matcher.is_error():
                return self._fail(self._matcher.get_error())
            self.num_consumed = num_consumed
            if num_consumed < self._run_at:
                self._run = []
        return True

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        count = 0 if self.error else int(self._matcher.validate_tokens(list(token_ids)))
        return count if self._is_well() else 0

    def forced(self, limit: int) -> Sequence[int]:
        if not self.error and not self._forced_here(1) and self._compiled.mask_seconds <= _RUN_SECONDS:
            self._find_run()
        return self._forced_here(limit) if self._is_well() else ()

    def _forced_here(self, limit: int = 1) -> list[int]:
        """Up to ``limit`` known tokens of the forced text that come next."""
        begin = self.num_consumed - self._run_at
        return self._run[begin : begin + limit]

    def _find_run(self) -> None:
        """Ask llguidance for the tokens of the text that must come next."""
        found = list(self._matcher.compute_ff_tokens())
        ends = [index for index, token_id in enumerate(found) if token_id in self._eos]
        self._run = found[: ends[0]] if ends else found
        self._run_at = self.num_consumed

    def mask(self) -> npt.NDArray[np.uint32] | None:
        if self.error:
            return None
        if known := self._forced_here():
            self._bits[:] = 0
            self._bits[known[0] // 32] = np.uint32(1 << known[0] % 32)
            return self._mask
        took = self._compute_mask()
        reason = self._matcher.get_error() if self._matcher.is_error() else ""
        if not reason and took > _MASK_SECONDS:
            reason = (
                f"one step took {took:.2g} s of processor time, and {_MASK_SECONDS:g} s are allowed; make the grammar"
                " simpler"
            )
        if reason:
            self._fail(reason)
            return None
        if self._ends and any(_is_set(self._bits, i) for i in self._eos):
            for token_id in self._ends:
                self._bits[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._mask[-1] &= self._tail
        if took <= _RUN_SECONDS and _has_one_bit(self._mask):
            self._find_run()
            if not self._is_well():
                return None
        return self._mask

    def _compute_mask(self) -> float:
        """Let llguidance fill the mask. Returns the processor seconds that it took."""
        begin = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(self._address, self._bits.nbytes)
        took = self._compiled.mask_seconds = time.thread_time() - begin
        return took

    def _is_well(self) -> bool:
        if not self.error and self._matcher.is_error():
            self._fail(self._matcher.get_error())
        return not self.error

    def _fail(self, message: str) -> bool:
        self.error = CANNOT_BE_FOLLOWED + readable(message)
        return False


def _is_set(bits: npt.NDArray[np.uint32], token_id: int) -> bool:
    return bool(int(bits[token_id // 32]) >> token_id % 32 & 1)


def _has_one_bit(bits: npt.NDArray[np.uint32]) -> bool:
    if np.count_nonzero(bits) != 1:  # many times faster than to look for the words
        return False
    word = int(bits[np.flatnonzero(bits)[0]])
    return not word & word - 1


def matcher_for(grammar: Grammar, tables: Any, markers: TagMarkers) -> tuple[Any, float]:
    """(llguidance's matcher for a grammar, processor seconds of its first mask). The first mask is already computed.
    Raises RequestError."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        text = _lowered(grammar, markers)
    except RequestError:
        raise
    except RecursionError:
        raise RequestError(f"{CANNOT_BE_FOLLOWED}it is nested too deeply; make it flatter") from None
    except Exception as error:
        raise RequestError(CANNOT_BE_FOLLOWED + readable(str(error))) from None
    limits = _LIMITS | ({"max_items_in_row": _JSON_ITEMS_IN_ROW} if grammar.kind in _OF_JSON else {})
    matcher = LLMatcher(tables, text, log_level=0, limits=LLParserLimits(**limits))
    problems = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
    if problems:
        raise RequestError(CANNOT_BE_FOLLOWED + readable(problems[0]))
    begin = time.thread_time()
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32)
    took = time.thread_time() - begin
    if matcher.is_error():
        raise RequestError(CANNOT_BE_FOLLOWED + readable(matcher.get_error()))
    if took > _FIRST_MASK_SECONDS:
        raise RequestError(
            f"{CANNOT_BE_FOLLOWED}its first step takes {took:.2g} s of processor time, and {_FIRST_MASK_SECONDS:g} s"
            " are allowed; make it simpler"
        )
    if not bits.any():
        raise RequestError(f"{CANNOT_BE_FOLLOWED}no answer satisfies it; relax it")
    return matcher, took


def _lowered(grammar: Grammar, markers: TagMarkers) -> str:
    """The grammar as text in a form that llguidance accepts."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    options = _json_options(grammar.compact)
    if grammar.kind == "json_schema":
        schema = json.dumps(checked_schema(json.loads(grammar.text)))
        return str(LLMatcher.grammar_from_json_schema(schema, overrides=options))
    if grammar.kind == "regex":
        return str(LLMatcher.grammar_from_regex(grammar.text))
    if grammar.kind == "choice":
        return str(LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(grammar.text)))))
    if grammar.kind == "structural_tag":
        return str(
            LLMatcher.grammar_from_lark(
                structural_tag_grammar(checked_tags(json.loads(grammar.text)), markers, options)
            )
        )
    return str(LLMatcher.grammar_from_lark(gbnf_to_lark(grammar.text) if grammar.kind == "gbnf" else grammar.text))


def _json_options(compact: bool) -> Any:
    fixed = {"lenient": False, "coerce_one_of": False, "item_separator": ",", "key_separator": ":"}
    return fixed | ({"whitespace_flexible": False} if compact else {"whitespace_pattern": _WHITESPACE})


def readable(message: str) -> str:
    """Error message for the caller: the error and the keyword, taken from llguidance's ``message``."""
    if found := _UNIMPLEMENTED.search(message):
        names = found[1].replace('\\"', '"')
        several = "keywords" if "," in names else "keyword"
        instead = next((hint for key, hint in _INSTEAD.items() if f'"{key}"' in names), "write it another way")
        return f"the schema has the {several} {names}, and no answer can be held to that; {instead}"
    if "oneOf constraints" in message:
        return (
            'two alternatives of a "oneOf" may be true for the same value, and no answer can be held to one of them;'
            ' use "anyOf", or give each alternative a required property with a "const" of its own'
        )
    if "look-around" in message:
        return (
            'a "pattern" of the schema has look-around ((?=, (?!, (?<), and no answer can be held to that; write the'
            ' pattern without it, or use "format"'
        )
    if "NoExtensionBias" in message:
        return "a $ref of the schema leads back to itself with nothing between, so it has no meaning; remove it"
    lines = [" ".join(line.split()) for line in message.splitlines()]
    lines = [line for line in lines if line and not set(line) <= set("^|0123456789 ") and "<non-verbose" not in line]
    error_lines = [line for line in lines if line.startswith("error:")]
    first = lines[0] if lines else "it is not understood"
    return (f"{first} {error_lines[0]}" if error_lines and error_lines[0] not in first else first)[:_MAX_ERROR]


def _without_markers(tokenizer: Tokenizer) -> str:
    """``tokenizer.json``, changed so that no text is tokenized as an added token.

    Without the change, a literal that contains the text of an added token could not be generated: llguidance would
    offer the token's id, and then refuse it. Added tokens of the vocabulary that are not special become normal tokens.
    All other added tokens get a random name, so a grammar can refer to them only by id.
    """
    parts = json.loads(tokenizer.backend.to_str())
    nonce = secrets.token_hex(8)
    vocabulary = parts["model"].get("vocab", {})
    pieces = {piece: i for i, (piece, _) in enumerate(vocabulary)} if isinstance(vocabulary, list) else vocabulary
    renamed_tokens = []
    for token in parts.get("added_tokens") or []:
        known = token["content"] in pieces
        if known and not token["special"]:
            continue
        name = f"<|{nonce}:{token['id']}|>"
        if known and isinstance(vocabulary, list):
            vocabulary[pieces[token["content"]]][0] = name
        elif known:
            vocabulary[name] = vocabulary.pop(token["content"])
        renamed_tokens.append({**token, "content": name, "special": True, "normalized": False})
    for rule in ("unk_token",):
        renamed = {token["id"]: token["content"] for token in renamed_tokens}
        if parts["model"].get(rule) in pieces and pieces[parts["model"][rule]] in renamed:
            parts["model"][rule] = renamed[pieces[parts["model"][rule]]]
    parts["added_tokens"], parts["post_processor"] = renamed_tokens, None
    return json.dumps(parts)
