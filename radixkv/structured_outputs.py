"""StructuredOutputs: the form an output must have, as a request says it."""

from __future__ import annotations

import json
from typing import Any

import msgspec

MAX_GRAMMAR_LENGTH = 262144
"""Characters of a schema, expression or grammar."""
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON is spaced as by Python's ``json.dumps``: with free spacing small models end in endless blanks, and little is forced."""
COMBINING = ("allOf", "oneOf", "not", "if", "$dynamicRef", "dependentSchemas", "unevaluatedProperties")
"""Keywords by which one part of a schema depends on what another part allows."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One of these; the output is never anything else, except cut short by ``max_tokens`` or a stop string.

    The names are vLLM's.
    """

    json: dict[str, Any] | str | None = None
    """A JSON schema, as an object or as its text."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression in Rust's syntax, which has no look-around; it must match the whole output."""
    choice: list[str] | None = None
    """The output is one of these."""
    grammar: str | None = None
    """A context-free grammar in Lark's syntax as llguidance reads it (rule ``start``), or in GBNF (rule ``root``)."""
    lenient: bool = False
    """Leave keywords of a ``json`` schema that can't be enforced unenforced, rather than refuse the schema.

    And where an object names its properties, but not whether others are allowed, there are no others: a small model would go on
    inventing some until ``max_tokens``.
    """

    @property
    def kind_and_text(self) -> tuple[str, str]:
        """As ``llguidance.grammar_from`` takes them.  Raises ``ValueError`` naming the member and its limit."""
        given = [name for name in ("json", "json_object", "regex", "choice", "grammar") if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                "structured_outputs must have one of json, json_object, regex, choice and grammar, "
                f"got {' and '.join(given) or 'none'}"
            )
        kind = given[0]
        if kind == "choice" and not self.choice:
            raise ValueError("structured_outputs.choice must hold at least 1 text, got none")
        if kind in ("json", "json_object"):
            kind, text = "json_schema", self._schema()
        elif kind == "choice":
            text = json.dumps(self.choice)
        else:
            text = (self.regex if kind == "regex" else self.grammar) or ""
        if len(text) > MAX_GRAMMAR_LENGTH:
            raise ValueError(f"structured_outputs.{given[0]} must be at most {MAX_GRAMMAR_LENGTH} characters, got {len(text)}")
        return kind, text

    def _schema(self) -> str:
        schema: Any = {"type": "object"} if self.json_object else self.json
        try:
            if isinstance(schema, str):
                schema = json.loads(schema)
            if not isinstance(schema, dict):
                raise ValueError(f"got {type(schema).__name__}")
            return spaced(schema, lenient=self.lenient)
        except (ValueError, RecursionError) as error:  # of the text, too
            raise ValueError(f"structured_outputs.json must be a JSON schema, an object: {error}") from None


def spaced(schema: dict[str, Any], *, lenient: bool) -> str:
    """A JSON schema as text that also says how to space the output.  Raises ``ValueError`` where it is nested too deeply."""
    try:
        text = json.dumps(schema)
        if lenient and not any(f'"{keyword}"' in text for keyword in COMBINING):
            schema = _closed(schema)
        return json.dumps(schema | {"x-guidance": COMPACT | {"lenient": lenient}})
    except RecursionError:
        raise ValueError("a schema must be nested less deeply") from None


def _closed(schema: Any) -> Any:
    """A copy whose objects have no properties but those named; what follows it follows ``schema`` too."""
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    properties = schema.get("properties")
    for keyword in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(keyword), dict):
            copy[keyword] = {name: _closed(member) for name, member in schema[keyword].items()}
    for keyword in ("items", "additionalProperties"):
        copy |= {keyword: _closed(schema[keyword])} if keyword in schema else {}
    # A branch beside properties says only a part of what the object may have.
    for keyword in ("prefixItems",) if properties else ("prefixItems", "anyOf"):
        if isinstance(schema.get(keyword), list):
            copy[keyword] = [_closed(member) for member in schema[keyword]]
    open_to = {"additionalProperties", "patternProperties", "anyOf", "$ref", "minProperties"} & schema.keys()
    required = schema.get("required", [])
    if isinstance(properties, dict) and not open_to and isinstance(required, list) and all(name in properties for name in required):
        copy["additionalProperties"] = False
    return copy
