"""Many questions behind one set of worked examples: the examples are computed once, however many questions there are."""

from __future__ import annotations

from radixkv import LLM, SamplingParams

REVIEWS = (
    ("The kettle boils in two minutes and pours without a drip.", "positive"),
    ("After a week the handle came off in my hand.", "negative"),
    ("It arrived on Tuesday in a brown box.", "neutral"),
    ("Best pillow I have ever slept on, and the cover washes well.", "positive"),
    ("The colour looks nothing like the picture and it smells of glue.", "negative"),
    ("The manual has twelve pages, in four languages.", "neutral"),
)
ASKED = (
    "Works exactly as described, and the battery lasts for days.",
    "The zip broke on the first morning.",
    "There are three screws in the bag.",
    "My daughter plays with it every evening and laughs.",
    "Too loud to use while anybody is asleep.",
    "The parcel weighs about two kilograms.",
    "I have bought a second one for my mother.",
    "The lid doesn't close and customer service doesn't answer.",
)
PREFIX = "Say whether each review is positive, negative or neutral.\n\n" + "".join(
    f"Review: {review}\nVerdict: {verdict}\n\n" for review, verdict in REVIEWS
)


def main() -> None:
    llm = LLM("smollm2-135m", kv_cache_tokens=8192)
    prompts = [f"{PREFIX}Review: {review}\nVerdict:" for review in ASKED]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0, stop=("\n",)), use_tqdm=True)
    for review, output in zip(ASKED, outputs, strict=True):
        print(f"{output.text.strip():<10}{review}  ({output.num_cached_tokens} of {output.num_prompt_tokens} prompt tokens cached)")
    print()
    print(llm.report())


if __name__ == "__main__":
    main()
