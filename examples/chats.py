"""Chats of many turns behind one system prompt: a turn sends the whole chat again, and computes only the newest message."""

from __future__ import annotations

from radixkv import LLM, SamplingParams

SYSTEM_PROMPT = """You are the guide of a small museum of clocks and watches. Answer in one or two short sentences.
Opening hours: ten to six, on Thursdays until nine, closed on Mondays. Tickets are 8 euros, children pay half.
The tower clock in the hall is from 1608 and strikes at noon. The workshop on the second floor shows how watches are repaired.
Photographs are allowed without a flash. The café in the garden serves soup, cakes and coffee."""
CHATS = {
    "Amara": (
        "Hello! How old is the clock in the hall?",
        "Who built it?",
        "When does it strike?",
        "How does a pendulum keep the time?",
        "And what did people use before there were pendulums?",
        "Thank you. Where can I have a coffee?",
    ),
    "Bogdan": (
        "Good morning. When are you open on a Thursday?",
        "What do two adults and two children pay?",
        "Is there anything that children may touch?",
        "My daughter likes to draw. Which clock is the most beautiful?",
        "May she take photographs, too?",
        "Then we will come on Thursday. What should we see first?",
    ),
    "Chiara": (
        "I repair watches myself. What does your workshop show?",
        "Which tools does one need to begin with?",
        "Why does an old watch lose a minute a day?",
        "How often should it be oiled?",
        "What is the hardest part to replace?",
        "Could I watch somebody at work tomorrow?",
    ),
}


def main() -> None:
    llm = LLM("smollm2-135m", kv_cache_tokens=8192)
    chats = {name: [{"role": "system", "content": SYSTEM_PROMPT}] for name in CHATS}
    # Everybody's turn at once, as a server would have it.
    for turn, questions in enumerate(zip(*CHATS.values(), strict=True), start=1):
        for messages, question in zip(chats.values(), questions, strict=True):
            messages.append({"role": "user", "content": question})
        outputs = llm.chat(list(chats.values()), SamplingParams(max_tokens=40, temperature=0.7, top_p=0.9, seed=3))
        for (name, messages), question, output in zip(chats.items(), questions, outputs, strict=True):
            messages.append({"role": "assistant", "content": output.text})
            cached = f"{output.num_cached_tokens} of {output.num_prompt_tokens} prompt tokens cached"
            print(f"{name}, turn {turn} ({cached}): {question}\n  {' '.join(output.text.split())}")
    print()
    print(llm.report())


if __name__ == "__main__":
    main()
