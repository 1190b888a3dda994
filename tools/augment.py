"""Variations of a question's wording, as another person might type it.

Every variation keeps the meaning or blurs it a little. The caller drops variations that are close to a held-back
wording. The module imports only the standard library, and uses a single random generator, so that a seed determines the
result.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

__all__ = ["outside", "vary"]


def _items(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(";"))


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _groups(text: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(word.strip() for word in item.split("=")) for item in text.split(";"))


_DEFINITION = (
    "what is {x}",
    "what does {x} mean",
    "what is meant by {x}",
    "explain {x}",
    "explain {x} to me",
    "define {x}",
    "describe {x}",
    "tell me about {x}",
    "give me a definition of {x}",
    "give me a short explanation of {x}",
    "what do people mean by {x}",
    "tell me what {x} is",
    "what do you call {x}",
    "{x}",
    "{x}, what is that",
    "i want to understand {x}",
    "what can you tell me about {x}",
    "give me the meaning of {x}",
    "help me understand {x}",
    "what's {x}",
    "whats {x}",
    "how would you explain {x}",
    "i keep hearing about {x}, what does it mean",
    "i read about {x}, what is it",
    "i do not know what {x} is",
    "{x}, what does it mean",
    "{x} stands for what",
    "so {x} is what",
    "what is this {x} thing",
    "what is {x} about",
    "can you say what {x} is",
    "a few words about {x}",
)
_DEFINITION_FORMS = re.compile(
    r"(?:what (?:is|are) (?:an? |the )?(?!the \w+ of )(?P<a>(?:[\w.'/-]+ ?){1,3})"
    r"|what does (?P<b>(?:[\w.'/-]+ ?){1,3}) mean"
    r"|(?:explain|define|describe|tell me about) (?:the |an? )?(?P<c>(?:[\w.'/-]+ ?){1,3}))\??"
)
_REWRITES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        r"^how do i ",
        ("how can i ", "how does one ", "how to ", "what must i do to ", "tell me how to ", "how should i "),
    ),
    (r"^how can i ", ("how do i ", "what can i do to ", "how to ", "is there a way to ", "how does one ")),
    (r"^how does (.+) work$", ("in what way does {0} work", "how do {0} work", "describe how {0} works")),
    (r"^how is ", ("in what way is ", "how does one see ", "tell me how is ")),
    (r"^how are ", ("in what way are ", "tell me how are ")),
    (
        r"^why (is|are|does|do|must|should|use|was) ",
        ("for what reason {0} ", "what is the reason why {0} ", "how come {0} "),
    ),
    (
        r"^what is the (benefit|point|purpose|reason|advantage) of ",
        ("what is the use of ", "why have ", "what is gained by "),
    ),
    (
        r"^what is the difference between (.+) and (.+)$",
        (
            "how does {0} differ from {1}",
            "what distinguishes {1} from {0}",
            "compare {1} and {0}",
            "{1} versus {0}",
            "how is {0} different from {1}",
            "in which way is {1} not {0}",
            "{0} or {1}",
            "is {0} not the same as {1}",
        ),
    ),
    (
        r"^what happens (if|when) ",
        ("what does the engine do {0} ", "what goes on {0} ", "what follows {0} ", "what {0} "),
    ),
    (r"^can i ", ("is it possible to ", "may i ", "am i able to ", "is there a way to ", "could i ")),
    (r"^can (\w+) ", ("could {0} ", "is it possible that {0} ", "is {0} able to ")),
    (r"^(does|do|is|are|will) ", ("tell me, {0} ", "is it true: {0} ", "i wonder, {0} ")),
    (
        r"^does chairlift (support|have|run|use|offer) ",
        (
            "is there {0} in chairlift for ",
            "has chairlift got ",
            "can chairlift do ",
            "does it {0} ",
            "will chairlift {0} ",
        ),
    ),
    (r"^(what|how|where|who) (is|are) ", ("{0}'s ", "{0}s ", "can you tell me {0} {1} ", "i want to know {0} {1} ")),
    (r"^what (is|are) ", ("what exactly {0} ", "what {0} ", "do you know what {0} ", "so what {0} ")),
    (r"^which ", ("what ", "tell me which ", "can you say which ")),
    (r"^what (?=\w+s? (?:is|are|should|does|do)\b)", ("which ",)),
    (r"^how (much|many|large|big|fast|long) ", ("tell me how {0} ", "can you say how {0} ", "do you know how {0} ")),
    (r"^when (is|should|does|do) ", ("in which cases {0} ", "in what situation {0} ", "at what point {0} ")),
    (r"^who (invented|made|wrote) ", ("which people {0} ", "by whom was it that {0} ", "who was it that {0} ")),
    (r"^list ", ("name ", "show me ", "what are ", "can you list ")),
    (r"^should i ", ("is it better to ", "do i have to ", "would you ")),
    (r"^what is a good ", ("which is a good ", "recommend a ", "what is the best ", "what would be a sensible ")),
)
_SYNONYMS = _groups("""
big = large = huge; bigger = larger; small = little = tiny; fast = quick; faster = quicker; slow = sluggish;
slower = less fast; good = sensible = fine = right; best = ideal; bad = harmful; problem = issue = trouble;
problems = issues = drawbacks; disadvantages = drawbacks = downsides = weaknesses; benefit = advantage = gain;
useful = helpful; purpose = point = aim; choose = pick = select; chosen = picked = selected;
lower = reduce = decrease = cut; raise = increase; improve = better; avoid = prevent;
answer = reply = output = result; answers = replies = outputs = results; text = output = answer; happens = occurs;
way = method = manner; show = display; setting = option = parameter; settings = options = parameters;
limits = bounds = restricts; limit = cap = bound; start = begin; stop = end = finish; works = functions;
machine = computer = server; compute = calculate = work out; computed = calculated; needs = requires = takes;
need = require; use = employ; get = obtain; called = named = known as; changes = alters; change = alter = affect;
same = identical; different = other; share = part = percentage = portion; invented = introduced = created;
paper = publication; request = query; requests = queries; kv cache = key-value cache = key value cache = kv-cache;
gpu = graphics card; sequence = text; quantisation = quantization; quantised = quantized; memory = ram;
full = exhausted; model = network; wasted = lost = thrown away; waste = lose; find = look up; latency = delay;
throughput = tokens per second; default = standard; by default = normally = if i set nothing; thrown away = dropped;
command = subcommand; finished = done = complete; idea = concept; user = client; users = clients = people;
error = failure; support = have = offer; long = lengthy; safe = secure; batches = batch; batching = batches;
speculation = speculative decoding; prefix caching = a prefix cache = caching of prefixes;
chunked prefill = prefill in chunks = chunking of prefill; paged attention = pagedattention = paging;
time to first token = ttft; first token latency = ttft; tokens = words; length = size; training = learning;
test = check; several = many = multiple; together = at once = at the same time; important = relevant;
history = development; aborted = cancelled; adapter = lora; adapters = loras = lora adapters; lora = adapters;
preempted = evicted = pushed out; policy = strategy = rule; engine = system; wrong = incorrect;
meaning = sense = definition
""")
_BEFORE = _items("""
please; can you tell me; could you tell me; i would like to know; hi,; hey,; hello,; so; ok,; and;
i have a question:; quick question:; question:; tell me,; do you know; i wonder; please tell me; well,;
can you explain; could you please explain; explain please:; i am new to this,; sorry,; actually,; now;
i want to know; let me ask:; in short,; say,; would you tell me; may i ask; for a beginner:
""")
_AFTER = _items("""
please; exactly; thanks; in short; in simple words; in general; to me; for me; in llm serving; then;
in an inference engine; actually; really; here; in detail; briefly; again; in practice; in one sentence;
for a language model; do you know; i do not get it; can you explain; thank you; at all; nowadays; though
""")
_FUNCTION_WORDS = _words("""
a an the is are was do does did be been of to in on for with by at from and or it its that this my me i you your
can could will would should there what which who how so as if please have has had about one any much many get
got tell
""")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_OUTSIDE_FRAMES = _items("""
what is {x}; what is a {x}; what is the capital of {x}; what is the best {x}; what is the {x} of {y}; who is {x};
who was {x}; who invented the {x}; who wrote {x}; who won the {x}; where is {x}; where can i buy {x};
when was {x} born; when did {x} end; why is {x} {y}; why do {x} {y}; how do i {v} {x}; how can i {v} my {x};
how do i {v} a {x}; how old is {x}; how many {x} are in {y}; how far is {x}; how much is a {x};
can you {v} a {x}; do you like {x}; is {x} {y}; tell me about {x}; tell me something about {x}; explain {x};
describe {x}; {x}; {x} {y}; write a poem about {x}; write a story about {x}; write a song about {x};
write {x} in {y}; give me a recipe for {x}; recommend a {x}; translate {x} into {y}; summarise {x}; i like {x};
my {x} is {y}; which {x} is {y}; should i {v} my {x}; what does {x} mean in {y}; what do {x} eat;
what happened to {x}; how does {x} work; compare {x} with {y}
""")
_OUTSIDE_VERBS = _items("""
cook; clean; paint; build; fix; sell; wash; feed; draw; cut; plant; open; learn; sing; dance; fry; boil; drive;
book; knit; sew; grill
""")
_OUTSIDE_THINGS = _items("""
rice; soup; cheese; apple; potato; garden; river; mountain; ocean; desert; island; castle; church; bridge; train;
bus; boat; plane; horse; elephant; tiger; whale; bird; mouse; rabbit; doctor; teacher; lawyer; king; queen;
soldier; farmer; actor; singer; football; cricket; hockey; golf; swimming; guitar; violin; drum; opera; novel;
film; theatre; painting; museum; chemistry; biology; history; geography; medicine; law; religion; election;
money; bank; tax; insurance; salary; holiday; hotel; beach; passport; weather; rain; snow; sun; moon; star;
planet; galaxy; hair; skin; heart; headache; sleep; diet; yoga; shirt; shoes; jacket; ring; kitchen; sofa;
window; roof; hammer; knife; bottle; coffee; tea; beer; chocolate; salad; pasta; sugar; austria; egypt; kenya;
norway; brazil; korea; vienna; madrid; boston; sydney; moscow; shakespeare; mozart; picasso; darwin; galileo;
cleopatra; einstein; blue; green; purple; happy
""")
_SYLLABLES = _items("""
ba; bre; chi; cor; da; dro; el; fa; fen; gal; gu; ha; hor; il; jo; ka; kel; la; lin; mo; mar; na; nor; o; pa;
per; qui; ra; ris; sa; sel; sto; ta; tri; tu; ul; va; ven; wa; wil; xe; ya; zo; gon; lia; land; ton; ville; stan;
nia; dor; mund; sk; ster; berg
""")


def vary(questions: Sequence[str], rng: random.Random, other_words: Sequence[str] = ()) -> str:
    """A random variation of one of ``questions``, or a mixture of two of them, in lower case.

    ``questions`` are wordings of the same question. ``other_words`` are words that may be inserted at random. They
    teach a model to ignore unimportant words.
    """
    text = _plain(rng.choice(questions))
    if rng.random() < 0.1:
        return text + rng.choice(("?", "?", "", "."))
    if rng.random() < 0.35:
        text = _rewrite(text, rng)
    if rng.random() < 0.3:
        text = _cross(text, _rewrite(_plain(rng.choice(questions)), rng), rng)
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        text = _replace_synonym(text, rng)
    if rng.random() < 0.35:
        text = _drop_words(text, rng)
    if rng.random() < 0.1:
        text = _shuffle(text, rng)
    if rng.random() < 0.25:
        text = f"{rng.choice(_BEFORE)} {text}"
    if rng.random() < 0.15:
        text = f"{text} {rng.choice(_AFTER)}"
    if other_words and rng.random() < 0.25:
        text = _slip_in(text, rng.choice(other_words), rng)
    if rng.random() < 0.15:
        text = _misspell(text, rng)
    return text + rng.choice(("?", "?", "?", "", "", ".", "!", "??", " ?"))


def outside(rng: random.Random) -> str:
    """A question that the guide does not answer. It is about another topic, and often has an invented word."""
    fields = {"v": rng.choice(_OUTSIDE_VERBS)}
    for name in ("x", "y"):
        made_up = "".join(rng.choice(_SYLLABLES) for _ in range(rng.choice((2, 2, 3))))
        fields[name] = made_up if rng.random() < 0.4 else rng.choice(_OUTSIDE_THINGS)
    text = rng.choice(_OUTSIDE_FRAMES).format(**fields)
    if rng.random() < 0.2:
        text = f"{rng.choice(_BEFORE)} {text}"
    return text + rng.choice(("?", "?", "", "."))


def _plain(question: str) -> str:
    return question.lower().strip().rstrip("?.! ")


def _cross(a: str, b: str, rng: random.Random) -> str:
    """A mixture of two wordings: some words of ``a``, then words that only ``b`` has."""
    if rng.random() < 0.3:
        return f"{a} {b}"
    first = [word for word in a.split() if rng.random() < 0.7]
    second = [word for word in b.split() if word not in first and rng.random() < 0.7]
    return " ".join([*first, *second]) or a


def _slip_in(text: str, word: str, rng: random.Random) -> str:
    """Insert an unrelated word, or replace a small word by the unrelated one."""
    parts = text.split()
    small = [i for i, part in enumerate(parts) if part in _FUNCTION_WORDS]
    if small and rng.random() < 0.4:
        parts[rng.choice(small)] = word
    else:
        parts.insert(rng.randrange(len(parts) + 1), word)
    return " ".join(parts)


def _rewrite(text: str, rng: random.Random) -> str:
    """Replace the opening phrase of a question: 'what is x' becomes 'explain x', 'how do i' becomes 'how can i'."""
    match = _DEFINITION_FORMS.fullmatch(text)
    if match:
        subject = next(group for group in match.groups() if group).strip()
        return rng.choice(_DEFINITION).format(x=subject)
    fitting = [(pattern, forms) for pattern, forms in _REWRITES if re.search(pattern, text)]
    if not fitting:
        return text
    pattern, forms = rng.choice(fitting)
    form = rng.choice(forms)
    return re.sub(pattern, lambda match: form.format(*match.groups()), text, count=1)


def _replace_synonym(text: str, rng: random.Random) -> str:
    """Replace one word or phrase by a synonym."""
    padded = f" {text} "
    fitting = [(word, group) for group in _SYNONYMS for word in group if f" {word} " in padded]
    if not fitting:
        return text
    word, group = rng.choice(fitting)
    other = rng.choice([item for item in group if item != word])
    return padded.replace(f" {word} ", f" {other} ", 1).strip()


def _drop_words(text: str, rng: random.Random) -> str:
    """Drop some words. Small words are dropped far more often, as people do in a search box."""
    parts = text.split()
    if len(parts) < 4:
        return text
    terse = rng.random() < 0.3
    kept = [part for part in parts if rng.random() >= ((0.6 if terse else 0.2) if part in _FUNCTION_WORDS else 0.06)]
    return " ".join(kept) if len(kept) >= 2 else text


def _shuffle(text: str, rng: random.Random) -> str:
    """Change the word order: swap two neighbours, or move the end to the front."""
    parts = text.split()
    if len(parts) > 2:
        i = rng.randrange(1, len(parts))
        if rng.random() < 0.5:
            parts[i - 1], parts[i] = parts[i], parts[i - 1]
        else:
            parts = parts[i:] + parts[:i]
    return " ".join(parts)


def _misspell(text: str, rng: random.Random) -> str:
    """Make one typing error in a word of at least five letters."""
    parts = text.split()
    places = [i for i, part in enumerate(parts) if len(part) >= 5]
    if not places:
        return text
    i = rng.choice(places)
    word, at = parts[i], rng.randrange(1, len(parts[i]) - 1)
    slips = (
        word[:at] + word[at + 1] + word[at] + word[at + 2 :],
        word[:at] + word[at + 1 :],
        word[:at] + word[at] + word[at:],
        word[:at] + rng.choice(_LETTERS) + word[at + 1 :],
    )
    parts[i] = rng.choice(slips)
    return " ".join(parts)
