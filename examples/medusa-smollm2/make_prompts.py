"""Prompts for training Medusa heads of a chat model: arithmetic, summaries, questions about passages, and the like.

    python make_prompts.py --questions gsm8k-train.jsonl --passages articles.txt --out prompts.jsonl

`--questions`: JSON lines with a "question" each (GSM8K's training split). `--passages`: plain text, a paragraph a line;
long enough ones are given to be summarized and asked about. The rest is made of the lists below. Heads learn from what
the model answers, so a prompt only has to be of the kind that the model will be asked. None is a benchmark's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

TOPICS = """
coral reefs; the printing press; photosynthesis; interest rates; the French Revolution; bicycles; machine learning;
vaccines; volcanoes; jazz; the Roman aqueducts; black holes; recycling; chess; the Silk Road; plate tectonics; supply
and demand; bees; the Industrial Revolution; poetry; sleep; electric cars; the water cycle; ancient Egypt; democracy;
climate change; the human heart; tea; mountain climbing; space travel; public libraries; remote work; antibiotics;
the moon landing; football; gardening; the stock market; bread; whales; robots; the Renaissance; music theory; rivers;
coffee; the immune system; castles; friendship; deserts; computer networks; the periodic table; markets; winter
""".replace("\n", " ").split(";")
TASKS = [
    "Explain {} to a child of ten.",
    "Write a short blog post about {}.",
    "What are the advantages and disadvantages of {}?",
    "Give me five interesting facts about {}.",
    "Write a poem about {}.",
    "Describe the history of {} in a few paragraphs.",
    "How does {} affect our daily life?",
    "Write an outline of an essay on {}.",
    "What would a beginner have to know about {}?",
    "Write a dialogue between two friends who talk about {}.",
    "Compose a polite email that invites a colleague to a lecture on {}.",
    "Pretend to be a museum guide and tell visitors about {}.",
    "Speak as a radio presenter and introduce a programme about {}.",
    "What is the most common misunderstanding about {}, and why is it wrong?",
    "Who contributed most to what we know about {}?",
    "Imagine a world without {}. What would be different?",
    "Write three multiple-choice questions about {} with their answers.",
    "Summarize what is known about {} in three sentences.",
]
PROGRAMS = """
reverses a string; finds the largest number in a list; checks whether a word is a palindrome; counts the vowels of a
text; sorts a list of names by length; computes the greatest common divisor of two numbers; reads a CSV file and prints
its columns; removes duplicates from a list; converts temperatures; prints the first n prime numbers; merges two sorted
lists; counts how often each word occurs in a file; checks whether brackets are balanced; rotates a matrix; computes a
factorial with recursion; finds the second largest element of an array; implements a stack; implements binary search
""".replace("\n", " ").split(";")
LANGUAGES = ["Python", "JavaScript", "C++", "Java"]
WHO = ["Der alte Lehrer", "Meine Schwester", "Die Bürgermeisterin", "Ein junger Arzt", "Unser Nachbar", "Die Firma"]
DID = [
    "hat gestern ein neues Haus gekauft", "erzählte uns eine lange Geschichte", "wartet seit einer Stunde auf den Zug",
    "will im nächsten Jahr nach Italien reisen", "hat das Buch noch nicht gelesen", "arbeitet an einem neuen Projekt",
    "freut sich über das schöne Wetter", "musste die Sitzung verschieben",
]  # fmt: skip
WHY = [
    ", weil das Wetter schlecht war.", ", obwohl niemand damit gerechnet hatte.", " und kam deshalb zu spät.", ".",
    ", wie die Zeitung am Montag berichtete.", ", ohne es jemandem zu sagen.",
]  # fmt: skip
PASSAGE_TASKS = [
    "Summarize: {}",
    "{}\n\nWhat is this text about? Answer in two sentences.",
    "Read the passage and list its main points.\n\n{}",
    "{}\n\nBased on the text above, what happened, and who took part in it?",
    "Extract all names of persons and places from this text:\n{}",
]


def written_prompts() -> Iterator[str]:
    """Those that are made of the lists."""
    topics = [topic.strip() for topic in TOPICS]
    yield from (task.format(topic) for task, topic in itertools.product(TASKS, topics))
    for program, language in itertools.product(PROGRAMS, LANGUAGES):
        yield f"Write a {language} program that {program.strip()}."
    for who, did, why in itertools.product(WHO, DID, WHY):
        yield f"Translate German to English: {who} {did}{why}"


def passage_prompts(passages: list[str], count: int) -> Iterator[str]:
    """Tasks about one to five neighbouring passages that are together long enough to say something about."""
    starts = list(range(len(passages)))
    random.shuffle(starts)
    for start in starts[:count]:
        text = " ".join(passages[start : start + random.randint(1, 5)])
        if len(text) > 300:
            yield random.choice(PASSAGE_TASKS).format(text[:3000])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--passages", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num-questions", type=int, default=2000)
    parser.add_argument("--num-passages", type=int, default=1500)
    args = parser.parse_args()
    random.seed(0)
    questions = [json.loads(line)["question"] for line in args.questions.read_text().splitlines()]
    passages = [line.strip() for line in args.passages.read_text().splitlines() if len(line) > 200]
    prompts = [
        *random.sample(questions, min(args.num_questions, len(questions))),
        *passage_prompts(passages, args.num_passages),
        *written_prompts(),
    ]
    random.shuffle(prompts)
    args.out.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    print(f"{len(prompts)} prompts in {args.out}")


if __name__ == "__main__":
    main()
