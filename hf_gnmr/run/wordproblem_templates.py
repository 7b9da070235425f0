"""The words and templates of the generated word problems; `wordproblems` fills them in.

``{name}``, ``{other}``, ``{thing}``, ``{place}``, ``{holder}`` and ``{holders}`` take words, ``{a}`` to ``{d}`` whole
numbers; ``[x=a+b]`` is a step to compute.  Every change here changes the generated text: raise
`wordproblems.RECIPE_VERSION` with it.
"""

from __future__ import annotations

NAMES = (
    "Abel",
    "Bruna",
    "Cyril",
    "Dilys",
    "Edda",
    "Femi",
    "Gwen",
    "Hari",
    "Ines",
    "Jory",
    "Kaya",
    "Lorcan",
    "Mirel",
    "Nuno",
    "Odile",
    "Pavel",
    "Quin",
    "Rosa",
    "Sami",
    "Tilda",
    "Umar",
    "Vesna",
    "Wim",
    "Yara",
)
THINGS = (
    "apples",
    "pears",
    "shells",
    "buttons",
    "stamps",
    "marbles",
    "beads",
    "pencils",
    "stickers",
    "coins",
    "cards",
    "plums",
    "nuts",
    "candles",
    "ribbons",
    "tickets",
    "postcards",
    "figs",
    "lemons",
    "badges",
)
HOLDERS = ("box", "bag", "basket", "jar", "crate", "tin", "drawer", "tray")
PLURALS = {h: ("boxes" if h == "box" else h + "s") for h in HOLDERS}
PLACES = ("shop", "farm", "library", "museum", "bakery", "school", "garden", "harbour", "market", "station")

Template = tuple[str, ...]
"""(question, worked sentence, ...)."""

ONE_STEP: tuple[Template, ...] = (
    ("{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?", "{name} has [x=a+b] {thing} now."),
    (
        "{name} finds {a} {thing} and {other} finds {b} {thing}. How many {thing} do they find together?",
        "Together they find [x=a+b] {thing}.",
    ),
    (
        "There are {a} {thing} in a {holder}. {name} puts in {b} more. How many {thing} are in the {holder}?",
        "The {holder} has [x=a+b] {thing}.",
    ),
    (
        "A {place} sold {a} {thing} in the morning and {b} in the evening. How many {thing} were sold?",
        "The {place} sold [x=a+b] {thing}.",
    ),
    ("{name} is {a} years old. How old will {name} be in {b} years?", "{name} will be [x=a+b] years old."),
    (
        "{name} has {a} {thing} and gives {b} to {other}. How many {thing} does {name} have left?",
        "{name} has [x=a-b] {thing} left.",
    ),
    ("There are {a} {thing} in a {holder}. {name} takes out {b}. How many {thing} remain?", "Then [x=a-b] {thing} remain."),
    (
        "{name} has {a} {thing} and {other} has {b}. How many more {thing} does {name} have than {other}?",
        "{name} has [x=a-b] more {thing}.",
    ),
    ("A {place} had {a} {thing} and lost {b} of them. How many {thing} remain?", "Then [x=a-b] {thing} remain."),
    (
        "{name} needs {a} {thing} but has only {b}. How many more {thing} does {name} need?",
        "{name} needs [x=a-b] more {thing}.",
    ),
    (
        "There are {a} {holders} with {b} {thing} in each. How many {thing} are there in all?",
        "In all there are [x=a*b] {thing}.",
    ),
    ("{name} buys {a} {thing} for {b} dollars each. How many dollars does {name} pay?", "{name} pays [x=a*b] dollars."),
    ("Each day {name} makes {a} {thing}. How many {thing} does {name} make in {b} days?", "{name} makes [x=a*b] {thing}."),
    ("A {place} has {a} rows of {b} {thing}. How many {thing} does the {place} have?", "The {place} has [x=a*b] {thing}."),
    (
        "{name} shares {a} {thing} among {b} friends. How many {thing} does each friend get?",
        "Each friend gets [x=a/b] {thing}.",
    ),
    (
        "{name} packs {a} {thing} into {b} {holders}, the same number in each. How many {thing} are in one {holder}?",
        "One {holder} has [x=a/b] {thing}.",
    ),
    ("{name} pays {a} dollars for {b} {thing}. How many dollars does one cost?", "One costs [x=a/b] dollars."),
)

SHORT_CHAINS: tuple[Template, ...] = (
    (
        "{name} has {a} {thing}, gets {b} more and gives {c} to {other}. How many {thing} does {name} have left?",
        "{name} has [x=a+b] {thing}.",
        "Then [y=x-c] {thing} remain.",
    ),
    (
        "{name} buys {a} {thing} for {b} dollars each and has {c} dollars left. How many dollars did {name} have?",
        "{name} pays [x=a*b] dollars.",
        "In all there are [y=x+c] dollars.",
    ),
    (
        "A {place} had {a} {thing}, lost {b} of them and puts the rest into {c} {holders}. "
        "How many {thing} are in one {holder}?",
        "Then [x=a-b] {thing} remain.",
        "One {holder} has [y=x/c] {thing}.",
    ),
)

SUMS: tuple[Template, ...] = (
    ("What is {a} plus {b}?", "The sum is [x=a+b]."),
    ("What is {a} minus {b}?", "The difference is [x=a-b]."),
    ("What is {a} times {b}?", "The product is [x=a*b]."),
    ("What is {a} divided by {b}?", "The quotient is [x=a/b]."),
)

# Worked from left to right, hence no product or quotient after a sum or difference.
LONG_SUMS: tuple[Template, ...] = (
    ("What is {a} plus {b} plus {c}?", "First [x=a+b].", "Then [y=x+c]."),
    ("What is {a} plus {b} minus {c}?", "First [x=a+b].", "Then [y=x-c]."),
    ("What is {a} minus {b} plus {c}?", "First [x=a-b].", "Then [y=x+c]."),
    ("What is {a} minus {b} minus {c}?", "First [x=a-b].", "Then [y=x-c]."),
    ("What is {a} times {b} plus {c}?", "First [x=a*b].", "Then [y=x+c]."),
    ("What is {a} times {b} minus {c}?", "First [x=a*b].", "Then [y=x-c]."),
    ("What is {a} times {b} divided by {c}?", "First [x=a*b].", "Then [y=x/c]."),
    ("What is {a} divided by {b} plus {c}?", "First [x=a/b].", "Then [y=x+c]."),
    ("What is {a} divided by {b} minus {c}?", "First [x=a/b].", "Then [y=x-c]."),
)

MANY_STEPS: tuple[Template, ...] = (
    (
        "{name} picked {a} {thing} on Monday and {b} on Tuesday, then handed {c} of them to {other}. "
        "How many {thing} does {name} still have?",
        "{name} picked [x=a+b] {thing}.",
        "Then [y=x-c] {thing} remain.",
    ),
    (
        "A {place} kept {a} {thing}. In spring {b} of them were thrown away, and in summer {c} new ones came. "
        "How many {thing} did the {place} have after summer?",
        "After spring there are [x=a-b] {thing}.",
        "After summer there are [y=x+c] {thing}.",
    ),
    (
        "{name} fills {a} {holders} with {b} {thing} each, and {c} {thing} do not fit. "
        "How many {thing} does {name} have altogether?",
        "The {holders} have [x=a*b] {thing}.",
        "In all there are [y=x+c] {thing}.",
    ),
    (
        "Every one of {a} {holders} holds {b} {thing}. {name} sells {c} of the {thing}. How many are unsold?",
        "The {holders} have [x=a*b] {thing}.",
        "Then [y=x-c] {thing} remain.",
    ),
    (
        "{name} collected {a} {thing} and {other} collected {b}. They split them evenly over {c} {holders}. "
        "How many {thing} go into a {holder}?",
        "Together they have [x=a+b] {thing}.",
        "One {holder} gets [y=x/c] {thing}.",
    ),
    (
        "From a pile of {a} {thing}, {name} removed {b} broken ones and dealt the others out to {c} children. "
        "How many {thing} did each child receive?",
        "Then [x=a-b] {thing} remain.",
        "Each child gets [y=x/c] {thing}.",
    ),
    (
        "At the {place}, {thing} cost {a} dollars each. {name} takes {b} of them and hands over {c} dollars. "
        "How much change does {name} receive?",
        "{name} pays [x=a*b] dollars.",
        "The change is [y=c-x] dollars.",
    ),
    (
        "{other} owns {a} {thing}. {name} owns {b} times as many and one {holder} with {c} on top. "
        "How many {thing} belong to {name}?",
        "The first part is [x=a*b] {thing}.",
        "{name} has [y=x+c] {thing}.",
    ),
    (
        "{name} sorted {a} {thing} into {b} equal groups and then added {c} {thing} to one group. "
        "How many {thing} are in that group?",
        "One group has [x=a/b] {thing}.",
        "Then the group has [y=x+c] {thing}.",
    ),
    (
        "{name} wants {a} {thing}. So far {b} came from {other} and {c} from the {place}. How many {thing} are missing?",
        "{name} has [x=b+c] {thing}.",
        "{name} needs [y=a-x] more {thing}.",
    ),
    (
        "On each of {a} days {name} makes {b} {thing} and keeps only {c} of them in the end. "
        "How many {thing} did {name} give away?",
        "{name} makes [x=a*b] {thing}.",
        "Then [y=x-c] {thing} were given away.",
    ),
    (
        "{name} brought {a} {thing}, {other} brought {b}, and the {place} sent {c}. {d} {thing} were lost. "
        "How many {thing} are left over?",
        "Together they have [x=a+b] {thing}.",
        "In all there are [y=x+c] {thing}.",
        "Then [z=y-d] {thing} remain.",
    ),
)

MIX: dict[str, tuple[tuple[float, tuple[Template, ...]], ...]] = {
    "pretrain": ((0.50, ONE_STEP), (0.15, SUMS), (0.15, LONG_SUMS), (0.20, SHORT_CHAINS)),
    "train": ((1.0, MANY_STEPS),),
    "test": ((1.0, MANY_STEPS),),
}
"""The share of each kind of template in a split."""
