"""Conversations for a small chat model.

Questions, code, arithmetic, summaries, extraction from a text, translation, and dialogues of
several turns. The first four are short ones, of which one has a short answer and one copies itself.
"""

from __future__ import annotations

from paceline.chat import encode_chat
from paceline.tokenizer import ChatTemplate, Tokenizer

_REPORT = (
    "The harbour of Velsund froze over on the second of January, for the first time in nineteen "
    "years. Two ferries stayed at their berths, and the island of Moen had no mail until the "
    "ninth. The icebreaker Ragna opened a channel on the eleventh. The town paid the crew a bonus "
    "of 400 crowns each, and the baker gave them cinnamon buns for a week."
)
_MINUTES = (
    "Present: Ines, Tomasz, Oluwaseun. The heating in room 4 is broken again; Tomasz calls the "
    "company on Monday. The library stays open until eight in the evening from March. Ines asked "
    "for three new chairs, which cost 85 euros each. The next meeting is on 14 February at 10:30."
)
_RECIPE = (
    "Soak 200 g of red lentils for ten minutes. Fry an onion in two spoons of oil, add cumin and a "
    "chopped tomato, then the lentils and 700 ml of water. Cook for twenty minutes, add salt and "
    "the juice of half a lemon, and eat it with flat bread."
)
_ORDER = (
    "Hello, this is Bram de Wit. On 3 May I ordered two blue enamel kettles, order 77-1043, for 58 "
    "euros together. One came with a dent. Please send another one to Lijsterlaan 12, Utrecht, or "
    "call me at 030 555 0147."
)
_LOG = (
    "09:14:02 worker-3 started\n09:14:07 worker-3 read 1200 rows\n09:14:09 worker-1 lost its "
    "connection\n09:14:11 worker-1 connected again\n09:15:30 worker-3 wrote 1187 rows\n"
    "09:15:31 worker-3 finished"
)
_BIOGRAPHY = (
    "Amara Okoye was born in Enugu in 1931. She studied chemistry in Ibadan and in Leeds, came "
    "home in 1958 and opened a laboratory for clean drinking water. Her filter of sand and "
    "charcoal was used in 300 villages. She wrote two books and died in 2009."
)
_CODE = (
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n"
)
_BUGGY = (
    "def is_prime(n):\n    for i in range(2, n):\n        if n % i == 0:\n"
    "            return False\n    return True\n"
)

# Speakers take turns, the user first and last.
_TALKS: tuple[tuple[str, ...], ...] = (
    ("Why do leaves turn red and yellow in autumn? Explain it to a child.",),
    ("Write a Python function that counts the vowels in a string, with a docstring.",),
    ("Repeat this list, then sort it: pear, apple, fig, cherry, banana, plum, kiwi, lemon.",),
    ("What is the capital of Portugal? Answer with one word.",),
    ("A train leaves at 9:40 and takes 2 hours and 35 minutes. When does it arrive? Show steps.",),
    (f"Summarise this text in two sentences.\n\n{_REPORT}",),
    (f"List every person, date and price in these minutes as bullet points.\n\n{_MINUTES}",),
    ('Translate into French: "The shop around the corner is closed on Sundays."',),
    (
        "I would like to grow tomatoes on my balcony.",
        "That is a fine idea! How much sun does your balcony get?",
        "About five hours a day.",
        "That is enough for cherry tomatoes. Do you have large pots?",
        "Only small ones. What should I buy, and when do I plant?",
    ),
    ("What is the difference between weather and climate?",),
    (f"Add type hints and a check for an empty list to this function.\n\n```python\n{_CODE}```",),
    ("Anna has 24 marbles. She gives a third to Ben and then finds 5. How many has she now?",),
    (f"Summarise in one sentence what happened to worker-1 and worker-3.\n\n{_LOG}",),
    (f"Extract name, order number, address and telephone number as JSON.\n\n{_ORDER}",),
    ('Translate into Spanish: "My sister bought a green bicycle and two books yesterday."',),
    (
        "Can you name three rivers in Europe?",
        "Of course: the Danube, the Rhine and the Volga.",
        "Which of them is the longest, and where does it end?",
    ),
    ("Name three things that float on water and three that sink.",),
    ("How does a refrigerator keep food cold? Answer in three short paragraphs.",),
    (f"Find the mistake in this function and write it correctly.\n\n```python\n{_BUGGY}```",),
    ("Compute 17 * 23 step by step, then check the result with a division.",),
    (f"Rewrite this recipe as a numbered list of steps.\n\n{_RECIPE}",),
    (f"Which ingredients does this recipe need, and how much of each?\n\n{_RECIPE}",),
    ('Translate into German, then explain each word: "Good morning, where is the station?"',),
    (
        "Let us play a game: I say a word, you say one that begins with its last letter. Apple!",
        "Elephant!",
        "Tiger!",
        "Rabbit!",
        "Table! And please tell me the rules once more.",
    ),
    ("Write a short poem about a lighthouse in the fog.",),
    ("Why do we have leap years? Which of 1900, 2000 and 2024 were leap years?",),
    ("Write an SQL query that returns the ten customers with the most orders. Explain it.",),
    ("The sides of a rectangle are 7 cm and 12 cm. What are its area and its perimeter?",),
    (f"Write a headline and a summary of 30 words for this text.\n\n{_BIOGRAPHY}",),
    (f"Answer from the text alone: when was she born, where did she study?\n\n{_BIOGRAPHY}",),
    ('Translate into Italian: "It will rain tomorrow, so take an umbrella with you."',),
    (
        "My laptop does not start any more.",
        "I am sorry to hear that. Does a light come on when you press the power button?",
        "Yes, a white one, and the fan turns. The screen stays black.",
    ),
)
NUM_PROMPTS = len(_TALKS)


def chat_prompts(tokenizer: Tokenizer, template: ChatTemplate, count: int) -> list[list[int]]:
    """Token ids of the first ``count`` conversations, up to where the model answers."""
    roles = ("user", "assistant")
    return [
        encode_chat(
            tokenizer, template,
            [{"role": roles[i % 2], "content": text} for i, text in enumerate(talk)],
        )
        for talk in _TALKS[:count]
    ]  # fmt: skip
