"""Fields of the OpenAI API that are no members of this server's request structs: what happens to each.

None is ignored in silence: a field is taken because it says nothing about the answer, or because it asks for what happens anyway;
every other value of it is refused by name.
"""

from __future__ import annotations

from typing import Any

from radixkv.server.errors import InvalidRequest

TAKEN = {
    "user": "names an end user, for the operator of a service",
    "safety_identifier": "names an end user, for the operator of a service",
    "metadata": "labels an answer that is kept, and none is kept",
    "prompt_cache_key": "a hint for finding the machine that has a prefix, and here there is one",
}
"""Fields that change nothing about an answer, and why they don't."""

ONLY: dict[str, tuple[object, ...]] = {
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "background": (False,),
    "reasoning": ({}, {"effort": "none"}),
    "truncation": ("disabled",),
}
"""Fields of which these values ask for what happens anyway."""

REFUSED = {
    "suffix": "the models served here were not trained to fill in a middle",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "modalities": "only text is generated",
    "audio": "only text is generated",
    "moderation": "answers are not moderated",
    "prediction": "no draft is taken from a request",
    "reasoning_effort": "the chat template alone decides whether the model thinks aloud",
    "verbosity": "ask for it in the messages",
    "service_tier": "all requests are served alike",
    "store": "answers are not kept",
    "prompt_cache_options": "the cache finds every prefix by itself; see retention",
    "web_search_options": "this server searches nothing",
    "access_programs": "there are none",
    "background": "a client that goes away has its request ended",
    "background_options": "a client that goes away has its request ended",
    "context_management": "a conversation is used as it is given",
    "conversation": "nothing is kept: give it whole in input",
    "image": "only text is read",
    "max_tool_calls": "the client calls the tools",
    "previous_response_id": "nothing is kept: give the conversation whole in input",
    "prompt": "no prompts are kept: give instructions and input",
    "reasoning": "the chat template alone decides whether the model thinks aloud",
    "truncation": "a conversation that does not fit is refused",
}
"""Why a value of a field of the API is refused."""


def drop_unneeded(fields: dict[str, Any], known: frozenset[str]) -> None:
    """Take out of ``fields`` what needs no doing.  Raises ``InvalidRequest`` for a field of the API that this server can't honour.

    Fields that are ``known`` are left; so are those that are nobody's, which the struct refuses.
    """
    for name in [*fields]:
        if name in known:
            continue
        allowed = ONLY.get(name, ())
        # By type too: JSON's 0 is not its false.
        if name in TAKEN or any(type(value) is type(fields[name]) and value == fields[name] for value in allowed):
            del fields[name]
        elif name in REFUSED:
            needed = f"must be left out or {' or '.join(map(repr, allowed))}" if allowed else "is not supported"
            raise InvalidRequest(f"{name} {needed}: {REFUSED[name]}", param=name)
