"""Several answers sampled from one prompt: the prompt is computed once and its blocks are shared by all of them."""

from __future__ import annotations

from radixkv import LLM, SamplingParams

QUESTION = "Suggest a name for a small bakery on a harbour, and say in one sentence why it fits."


def main() -> None:
    llm = LLM("smollm2-135m", kv_cache_tokens=8192)
    prompt = llm.render_chat([{"role": "user", "content": QUESTION}])
    # The same seed gives the same answer again, whatever else is in the batch.
    params = [SamplingParams(max_tokens=48, temperature=0.8, top_p=0.95, seed=seed) for seed in range(4)]
    for i, output in enumerate(llm.generate([prompt] * len(params), params)):
        print(f"{i}: {' '.join(output.text.split())}")
        print(f"   {output.num_cached_tokens} of {output.num_prompt_tokens} prompt tokens shared, ended by {output.finish_reason}")
    print()
    print(llm.report())


if __name__ == "__main__":
    main()
