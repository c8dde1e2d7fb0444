"""Prompts for training Medusa heads of a chat model, most of them written by the model itself.

    python make_prompts.py --questions gsm8k-train.jsonl --avoid spec_bench.jsonl --out prompts.jsonl

A chat model that is given its template up to where a user would speak writes what users say (Xu et al., Magpie,
arXiv:2406.08464). The first words are given for each kind of task, so all kinds are there in the shares below; what
tasks are about, news and articles, the model writes as well. Heads learn from what the model answers, so a prompt only
has to be of the kind that the model will be asked, not good.

`--questions`: JSON lines with a "question" each (GSM8K's training split). `--avoid`: JSON lines with "turns" each (as
Spec-Bench has them): a prompt that has eight words in a row in common with any of them is left out. `--number 40` is
enough to see it work on a CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_turbo
from hf_turbo.sample_models import sample_model


def words(text: str) -> list[str]:
    """The parts of a text between semicolons."""
    return [part.strip() for part in " ".join(text.split()).split(";")]


#: Kind -> its share, and the first words of its prompts. A prompt without any is what the model makes of it.
WRITTEN = {
    "any": (8, [""]),
    "writing": (6, words("""
        Write a; Compose a; Draft a professional email; Write a persuasive; Describe a; Write a descriptive paragraph
        about; Could you write a short story; Craft an; Help me write; Edit the following paragraph; Write an opening
        paragraph for; Imagine you are writing a blog post; Create a character; Write a letter to; Write a poem about;
        Write a speech; Write a product description; Rewrite the following; Write an essay on; Write a dialogue between
        """)),
    "roleplay": (6, words("""
        Pretend to be; Play the role of; Imagine yourself as a; Take on the role of a; You are a; Please be; Act as
        a; Suppose you are; Now you are; Speak as; I want you to act as; You are an expert in; Pretend to be a
        famous; Speak as if you were; Let's play a game. You are; From now on you are; Answer as a
        """)),
    "reasoning": (6, words("""
        Imagine you are; If; One morning; Anna has; Is it true that; Which word does not belong; Suppose that; Read
        the following and; There are five people; Tom is taller than; Someone is; You can see; What could be the
        reasons; Which of these; How would you decide; Three friends; Why would; A man walks; My neighbour; Every;
        Can you think of a reason why; A farmer has to
        """)),
    "math": (6, words("""
        A triangle has; A company invests; In a survey of; When rolling; A bus; Given that f(x) =; Find the; Solve
        for x:; What is the probability; How many; If x +; Maria went to; When a number; What is the area; Calculate
        the; Simplify the expression; A train; The sum of; Evaluate; Let; A rectangle; A bag holds; Two numbers;
        What is the value of; A shop sells
        """)),
    "coding": (6, words("""
        Write a Python program; Write a C++ program; Write a Python function; Write a website in HTML; Write a
        function to; Implement a; Here is a Python function; Given an array of; Given a string; Write a program to
        find; Write a JavaScript; How do I; Fix the bug in; Write a SQL query; Write a Java; Explain what this code
        does; Implement a program to; Write a regular expression; Write a bash script; Create a class; Write code
        that; What is wrong with this code
        """)),
    "stem": (6, words("""
        In the field of; Consider a; What is the; What is the central; Describe the process of; Describe; How did;
        You have to design; Explain the; What are the main; Could you describe; Why do; How does; What is the
        difference between; Explain how; What causes; In physics,; A chemist; In chemistry,; In biology,; How can
        engineers; What happens to; Give an example of; A machine
        """)),
    "humanities": (6, words("""
        Explain why; How do; Discuss; Create a lesson plan; Suggest; Share ideas for; Write a business plan; Can you
        suggest; How are; What are some; Explain the significance of; Describe how; What was the role of; Compare;
        Analyze the; What techniques do; Who was; How has; In what ways; Why was; What did; What is the relation
        between; Name some
        """)),
    "questions": (8, words("""
        Who; Who is the; Who wrote; Who played; Who sings; Who won the; When; When did; When was the; When is; Where;
        Where is the; Where did; Where does; What; What is the name of; What year did; What does; What kind of; Which;
        How many; How long; What was; Name the; In which; who is; when was; where was; what is the; how many
        """)),
}  # fmt: skip
#: Kind -> its share, and the words before and after an article or several; the model writes on from there.
ABOUT_ARTICLES = {
    "summarization": (7, [("Summarize: ", None)] * 4 + [("", "\n\nSummarize the above in two sentences.")]),
    "rag": (7, [("", f"\n{word}") for word in words("""
        Who; When; Where; What; How many; Who was; When did; Where is; What is; Who sings; Which; Where did; How; Why
        """)]),
    "extraction": (6, [(f"{task}\n", None) for task in words("""
        Extract all names of persons and places from this text.; List the main points of the following text.; Rate
        the following text from 1 to 10.; Who are the persons in the text below, and what did they do?; Read this
        passage and say what happened.; Extract from the following text: name, year, place. Output one a line.;
        Given the following text, find the largest number in it.; Which word is the most common in this text?; What
        is the topic of the following text? Answer in one word.; Put each sentence of this text into one of the
        categories politics, sport and science.; Turn this text into JSON.
        """)] + [("", f"\n\n{word}") for word in words("Based on the text; Who; Extract; What; List all; Return")]),
}  # fmt: skip
TRANSLATION_SHARE, QUESTIONS_SHARE, BEGUN_QUESTIONS_SHARE, FOLLOW_UPS_SHARE = 8, 12, 4, 10
WHO = words("""
    Police; A mother of three; Scientists; The mayor; A 34-year-old man; Thousands of fans; The government; A court;
    Doctors; A former soldier; The coach of the national team; Firefighters; An airline; Two teenagers; A new study by
    researchers; The president; A teacher; Protesters; A family; The owner of a small bakery; A group of climbers; The
    captain of the football club; A pop star; An elephant; The bank; Officials; A farmer; The company
    """)
WHERE = words("""
    London; New York; Sydney; Georgia; Berlin; Mumbai; Texas; Paris; Manchester; California; Tokyo; Nigeria; Florida;
    Madrid; Toronto; Moscow; Scotland; Brazil; Chicago; Kenya; Dublin; Mexico City; Liverpool; Los Angeles; Beijing;
    South Africa; Rome; Wales; Alaska; New Zealand; Istanbul; Boston; Egypt; Sweden; Ohio; Cornwall
    """)
SUBJECTS = words("""
    coral reefs; the printing press; photosynthesis; interest rates; the French Revolution; bicycles; vaccines;
    volcanoes; jazz; the Roman aqueducts; black holes; chess; the Silk Road; plate tectonics; bees; the Industrial
    Revolution; electric cars; ancient Egypt; the human heart; tea; the moon landing; football; the stock market; bread;
    whales; robots; the Renaissance; coffee; the immune system; castles; deserts; the periodic table; a famous song; a
    novel; a television series; a river in Europe; an American president; the Olympic Games; a rock band; a film of the
    1980s; a war; a queen of England; a basketball team; a city in India; a national park; an island; a religion; a
    holiday; a bridge; a university; a scientist; a painter; a comic book hero; an airport; a train; a disease; a
    planet; a language; a dance; a dish from Asia; a football player; an actress; the Constitution; a lake; a battle
    """)
GERMAN_WHO = words("""
    Der alte Lehrer; Meine Schwester; Die Bürgermeisterin; Ein junger Arzt; Unser Nachbar; Die Firma; Die Polizei;
    Das Hotel; Der Trainer; Ein Sprecher der Stadt; Die Regierung; Der Präsident; Die Europäische Union; Unsere
    Zimmer; Der FC Bayern; Eine Gruppe von Schülern; Das Gericht; Die Besucher; Professor Schmidt; Die Feuerwehr;
    Viele Menschen; Der Vorsitzende der Partei; Das Unternehmen aus München; Ein 45-jähriger Mann; Die Zahl der
    Touristen; Der amerikanische Außenminister; Eine neue Studie; Die Mannschaft; Der Flughafen; Das kleine
    Restaurant am Hafen; Die Gewerkschaft; Der Film; Die Königin; Ein Team von Forschern; Die russische Armee; Der
    Verein; Der Autor des Buches; Das Museum
    """)
GERMAN_DID = words("""
    hat gestern ein neues Haus gekauft; erzählte uns eine lange Geschichte; wartet seit einer Stunde auf den Zug;
    liegt nur wenige Minuten vom Bahnhof entfernt; hat das Buch noch nicht gelesen; arbeitet an einem neuen Projekt;
    freut sich über das schöne Wetter; musste die Sitzung verschieben; will im nächsten Jahr mehr Geld ausgeben;
    sucht nach Zeugen des Unfalls; bietet den Gästen ein Frühstück; gewann das Spiel mit 3:1; sprach am Montag mit
    der Presse; feierte im Sommer ein großes Fest; kann die Kosten nicht mehr bezahlen; kam kurz nach Mitternacht
    an; fordert ein neues Gesetz; steht seit Jahren in der Kritik; stieg im letzten Quartal um fünf Prozent; wird am
    Samstag im Stadion erwartet; verfügt über einen großen Garten und ein Schwimmbad; wurde bei einem Unfall auf der
    Autobahn schwer verletzt; hat die Vorwürfe zurückgewiesen; verlor am Sonntag gegen den Tabellenführer; zeigt,
    dass immer mehr junge Leute auf dem Land leben wollen; soll bis 2020 fertig werden; hat 200 Mitarbeiter
    entlassen; wurde 1895 gegründet; kündigte weitere Gespräche an; kostet zwischen 30 und 50 Euro; will die Steuern
    senken; kämpft mit einer schweren Krankheit; blieb wegen des Streiks geschlossen; erhielt einen wichtigen Preis
    """)
GERMAN_WHY = words("""
    , weil das Wetter schlecht war; , obwohl niemand damit gerechnet hatte; und kam deshalb zu spät; ; , wie die
    Zeitung am Montag berichtete; , ohne es jemandem zu sagen; und hofft auf bessere Zeiten; , sagte eine
    Sprecherin; , um den Kindern zu helfen; in der Nähe von Hamburg; trotz der hohen Preise; , aber die Straße war
    gesperrt; seit dem Krieg; , teilte ein Sprecher mit; im Rahmen der Konferenz; , die erst im Mai begonnen hatte;
    nach Angaben der Behörden; , während in anderen Ländern das Gegenteil geschieht; und bedankte sich bei allen
    Helfern
    """)
#: German sentences around a sentence.
GERMAN_FRAMES = ("{}",) * 3 + (
    "„ {} “ , sagte er .",
    "Das Problem ist folgendes : {}",
    "{} Das ist keine Überraschung .",
)
#: Tokens of what the model writes, at most: a user's message (the rest of one), a report or an article, an answer.
MESSAGE, ARTICLE, ANSWER = 96, 512, 192
#: Stands for a user's message in a template.
MARK = "\x00"


class Prompt(NamedTuple):
    """A user's message of a kind, perhaps after a first message and its answer.

    Attributes:
        kind: a benchmark's category or something like it.
        text: the message.
        before: turns before it, `{"role": ..., "content": ...}`.
    """

    kind: str
    text: str
    before: tuple[dict[str, str], ...] = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*self.before, {"role": "user", "content": self.text}]


class Writer:
    """Lets a chat model write: what users say, and what it answers itself."""

    def __init__(self, model: Any, tokenizer: Any, batch_size: int) -> None:
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        tokenizer.padding_side = "left"

    def messages(self, begun: Sequence[Prompt]) -> list[str]:
        """The rest of users' messages whose first words are known: sampled, up to the last whole sentence."""
        chats = [self._chat(prompt._replace(text=MARK)).rpartition(MARK)[0] + prompt.text for prompt in begun]
        rests = self._write(chats, MESSAGE, "messages", do_sample=True, temperature=0.9, top_k=50)
        return [rest if is_whole else whole_sentences(rest) for rest, is_whole in rests]

    def articles(self, asked: Sequence[Prompt], starts: Sequence[str]) -> list[str]:
        """Long answers that begin with given words: sampled."""
        chats = [self._chat(prompt) + start for prompt, start in zip(asked, starts, strict=True)]
        found = self._write(chats, ARTICLE, "articles", do_sample=True, temperature=0.9, top_k=50)
        return [" ".join(f"{start} {text}".split()) for start, (text, _) in zip(starts, found, strict=True)]

    def answers(self, asked: Sequence[Prompt]) -> list[str | None]:
        """The likeliest answers; None where one does not come to its end."""
        found = self._write([self._chat(prompt) for prompt in asked], ANSWER, "answers", do_sample=False)
        return [text.strip() if is_whole else None for text, is_whole in found]

    def _chat(self, prompt: Prompt) -> str:
        """The chat template up to where the answer begins."""
        return str(self.tokenizer.apply_chat_template(prompt.messages, tokenize=False, add_generation_prompt=True))

    def _write(self, texts: Sequence[str], new_tokens: int, label: str, **choice: Any) -> list[tuple[str, bool]]:
        """What comes after each text, and whether it came to an end within so many tokens."""
        written = [("", False)] * len(texts)
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))  # batches of them need few pads
        for start in tqdm(range(0, len(order), self.batch_size), label):
            places = order[start : start + self.batch_size]
            chosen = [texts[place] for place in places]
            inputs = self.tokenizer(chosen, return_tensors="pt", padding=True, add_special_tokens=False)
            out = self.model.generate(**inputs.to(self.model.device), max_new_tokens=new_tokens, **choice)
            said = self.tokenizer.batch_decode(out[:, inputs.input_ids.shape[1] :])
            for place, row in zip(places, said, strict=True):
                text, end, _ = row.partition(self.tokenizer.eos_token)
                written[place] = (text, bool(end))
        return written


def make_prompts(writer: Writer, number: int, questions: Sequence[str], avoid: Sequence[str]) -> list[Prompt]:
    """About `number` prompts in random order, no two of them the same."""
    reports, articles = write_articles(writer, max(4, number // 20))
    made: list[Prompt] = []
    begun: list[Prompt] = []  # the model is to write the rest
    for kind, (share, starts) in WRITTEN.items():
        begun += [Prompt(kind, random.choice(starts)) for _ in range(number * share // 100)]
    for kind, (share, frames) in ABOUT_ARTICLES.items():
        for _ in range(number * share // 100):
            before, after = random.choice(frames)
            is_whole = after is None or after.endswith(".")
            text = before + about_articles(kind, reports, articles) + (after or "")
            (made if is_whole else begun).append(Prompt(kind, text))
    for sentence in german_sentences(number * TRANSLATION_SHARE // 100):
        text = "Translate German to English: " + sentence
        if random.random() < 0.5:
            made.append(Prompt("translation", text))
        else:
            begun.append(Prompt("translation", text[: random.randint(45, 65)].rpartition(" ")[0]))
    asked = random.sample(questions, min(number * QUESTIONS_SHARE // 100, len(questions)))
    made += [Prompt("math_reasoning", question) for question in asked]
    again = random.choices(questions, k=number * BEGUN_QUESTIONS_SHARE // 100)
    begun += [Prompt("math", beginning(question)) for question in again]
    made += completed(writer, begun)
    random.shuffle(made)
    first = list(distinct(made, avoid))
    return first + list(distinct(follow_ups(writer, first[: number * FOLLOW_UPS_SHARE // 100]), avoid))


def completed(writer: Writer, begun: Sequence[Prompt]) -> Iterator[Prompt]:
    """Those that the model has written something to."""
    for prompt, rest in zip(begun, writer.messages(begun), strict=True):
        if rest:
            yield prompt._replace(text=(prompt.text + rest).strip())


def follow_ups(writer: Writer, prompts: Sequence[Prompt]) -> Iterator[Prompt]:
    """What a user says next, after answers that came to their ends."""
    talks = []
    for prompt, answer in zip(prompts, writer.answers(prompts), strict=True):
        if answer is not None:
            talks.append(Prompt("follow_up", "", (*prompt.messages, {"role": "assistant", "content": answer})))
    return completed(writer, talks)


def write_articles(writer: Writer, number: int) -> tuple[list[str], list[str]]:
    """News, and articles of an encyclopedia: half of `number` each."""
    starts = [f"{random.choice(WHO)} in {random.choice(WHERE)}" for _ in range(number // 2)]
    asked = [Prompt("", "Write a long newspaper report about what happened this week.")] * len(starts)
    subjects = random.choices(SUBJECTS, k=len(starts))
    asked += [Prompt("", f"Write the article of an encyclopedia about {subject}.") for subject in subjects]
    texts = writer.articles(asked, starts + [""] * len(subjects))
    return texts[: len(starts)], [text for text in texts[len(starts) :] if text]


def about_articles(kind: str, reports: Sequence[str], articles: Sequence[str]) -> str:
    """What a task is about: a report or two, passages of several articles, or a part of one."""
    if kind == "summarization":
        return " ".join(random.choices(reports, k=random.choice((1, 1, 2))))[:6000]
    if kind == "rag":
        return " ".join(a_part(text, 650) for text in random.choices(articles, k=5))
    return a_part(random.choice([*reports, *articles]), random.randint(300, 1600))


def a_part(text: str, length: int) -> str:
    start = random.randint(0, max(0, len(text) - length))
    return text[start : start + length]


def german_sentences(number: int) -> Iterator[str]:
    for _ in range(number):
        parts = [random.choice(GERMAN_WHO), random.choice(GERMAN_DID), random.choice(GERMAN_WHY)]
        sentence = " ".join(parts).replace(" ,", random.choice((",", " ,"))).strip() + random.choice((".", " ."))
        yield random.choice(GERMAN_FRAMES).format(sentence)


def beginning(question: str) -> str:
    """Its first words: six at least, and not all of them."""
    told = question.split()
    return " ".join(told[: random.randint(6, max(6, len(told) // 2))])


def whole_sentences(text: str) -> str:
    """Up to the last full stop, exclamation or question mark."""
    return text[: 1 + max(text.rfind(mark) for mark in ".?!")]


def distinct(prompts: Iterable[Prompt], avoid: Sequence[str]) -> Iterator[Prompt]:
    """Prompts of three words or more, each once, that share no eight words in a row with what is to be avoided."""
    forbidden = {run for text in avoid for run in runs(text)}
    seen: set[tuple[str, ...]] = set()
    for prompt in prompts:
        found = tuple(word for message in prompt.messages for word in words_of(message["content"]))
        if len(words_of(prompt.text)) >= 3 and found not in seen and forbidden.isdisjoint(runs(prompt.text)):
            seen.add(found)
            yield prompt


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def runs(text: str, length: int = 8) -> Iterator[tuple[str, ...]]:
    """All runs of so many words; the whole text where it has fewer."""
    found = words_of(text)
    for start in range(max(1, len(found) - length + 1)):
        yield tuple(found[start : start + length])


def read_lines(path: Path, take: Callable[[dict[str, Any]], Any]) -> list[Any]:
    """What is taken of each of a file's JSON lines."""
    with path.open(encoding="utf-8") as file:  # not `splitlines`, which divides at what a JSON string may hold
        return [take(json.loads(line)) for line in file]


def load(model: str | None) -> tuple[Any, Any]:
    """A patched model and its tokenizer, on a GPU if there is one."""
    source = model or sample_model("smollm2-135m-instruct")
    on_gpu = torch.cuda.is_available()
    dtype, device = (torch.bfloat16, "cuda") if on_gpu else (torch.float32, "cpu")
    loaded = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device).eval()
    return hf_turbo.patch(loaded), AutoTokenizer.from_pretrained(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or an id of the Hub (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--avoid", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--number", type=int, default=56000)
    parser.add_argument("--batch-size", type=int, default=512, help="rows that are written at once")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    questions = read_lines(args.questions, lambda line: line["question"])
    avoid = [turn for turns in read_lines(args.avoid, lambda line: line["turns"]) for turn in turns]
    prompts = make_prompts(Writer(*load(args.model), args.batch_size), args.number, questions, avoid)
    lines = [json.dumps({"kind": prompt.kind, "messages": prompt.messages}) for prompt in prompts]
    args.out.write_text("".join(line + "\n" for line in lines))
    print(f"{len(prompts)} prompts in {args.out}:", dict(Counter(prompt.kind for prompt in prompts)))


if __name__ == "__main__":
    main()
