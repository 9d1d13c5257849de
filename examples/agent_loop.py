"""An agent whose history grows turn by turn: each turn computes only what the turn before has not seen."""

from __future__ import annotations

import json

from radixkv import LLM, SamplingParams

SYSTEM_PROMPT = """You plan day trips. Answer in one or two short sentences.
Tools: weather(city) gives tomorrow's forecast; trains(city) gives the next departures; museums(city) lists what is open.
Results of tools come in messages that begin with 'Result'. Prefer trains to cars, and do not plan walks in the rain."""


def weather(city: str) -> dict[str, object]:
    return {"city": city, "forecast": "rain until noon, then sunny", "high": 14}


def trains(city: str) -> dict[str, object]:
    return {"to": city, "departures": ["08:12", "09:12", "10:42"], "minutes": 55}


def museums(city: str) -> dict[str, object]:
    return {"city": city, "open": ["Museum of Clocks", "Harbour Gallery"], "until": "18:00"}


def main() -> None:
    llm = LLM("smollm2-135m", kv_cache_tokens=8192)
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": "I would like to visit Bergen tomorrow. What do you suggest?"},
    ]
    # Which tool comes next is scripted: a model this small can't be trusted to choose.
    for tool in (weather, trains, museums):
        (output,) = llm.chat(messages, SamplingParams(max_tokens=40, temperature=0))
        print(f"agent ({output.num_cached_tokens} of {output.num_prompt_tokens} prompt tokens cached): {output.text.strip()}")
        result = f"Result of {tool.__name__}: {json.dumps(tool('Bergen'))}. What do you suggest now?"
        print(f"  {result}")
        messages += [{"role": "assistant", "content": output.text}, {"role": "user", "content": result}]
    print()
    print(llm.report())


if __name__ == "__main__":
    main()
