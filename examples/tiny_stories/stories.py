"""Stories from a small grammar.

A story keeps its facts: the hero's pronouns follow from the name, the creature met follows from the place, the thing
that is lost is the thing that is found. So a model that has learned the grammar is easily told from one that has not.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Character:
    name: str
    kind: str
    subject: str  # he, she
    object: str  # him, her
    possessive: str  # his, her


def _he(name: str, kind: str) -> Character:
    return Character(name, kind, "he", "him", "his")


def _she(name: str, kind: str) -> Character:
    return Character(name, kind, "she", "her", "her")


CHARACTERS = [
    _she("Mia", "girl"),
    _she("Lily", "girl"),
    _she("Nora", "rabbit"),
    _she("Bella", "cat"),
    _she("Rosa", "duck"),
    _she("Pearl", "mouse"),
    _he("Tom", "boy"),
    _he("Ben", "boy"),
    _he("Finn", "fox"),
    _he("Max", "dog"),
    _he("Otto", "bear"),
    _he("Hugo", "frog"),
]

# Where a story may happen, and the creature that lives there.
PLACES = {
    "in the forest": "owl",
    "by the river": "fish",
    "on the hill": "goat",
    "in the garden": "bee",
    "at the beach": "crab",
    "on the farm": "horse",
}

COLOURS = ["red", "blue", "green", "yellow", "silver"]
TOYS = ["red ball", "blue kite", "green boat", "yellow hat", "silver bell", "little drum"]
FOODS = ["cake", "soup", "bread", "pie", "jam"]
MOODS = ["brave", "kind", "shy", "clever", "sleepy"]
GAMES = ["sing", "dance", "run", "climb", "draw"]


def tell_story(rng: random.Random) -> str:
    """One story as words and punctuation, separated by spaces; names are capitalised, nothing else is."""
    hero, friend = rng.sample(CHARACTERS, 2)
    place = rng.choice(list(PLACES))
    event = rng.choice([_lost_toy, _hungry_creature, _sudden_storm, _cooking_together])
    return " ".join([*_opening(rng, hero, place), *event(rng, hero, friend, place), "the end ."])


def tell_stories(count: int, seed: int) -> list[str]:
    """`count` different stories: the same ones for the same seed, and the first n of them for a smaller count."""
    rng = random.Random(seed)
    stories: dict[str, None] = {}  # a set that keeps the order
    while len(stories) < count:
        stories[tell_story(rng)] = None
    return list(stories)


def _opening(rng: random.Random, hero: Character, place: str) -> list[str]:
    mood = rng.choice(MOODS)
    sentences = [
        rng.choice(
            [
                f"once there was a {mood} {hero.kind} named {hero.name} .",
                f"{hero.name} was a {mood} {hero.kind} .",
            ]
        )
    ]
    if rng.random() < 0.5:
        sentences.append(f"{hero.subject} loved to {rng.choice(GAMES)} {place} .")
    else:
        sentences.append(f"one day {hero.subject} went to {rng.choice(GAMES)} {place} .")
    return sentences


def _lost_toy(rng: random.Random, hero: Character, friend: Character, place: str) -> list[str]:
    toy = rng.choice(TOYS)
    sentences = [f"{hero.name} had a {toy} .", f"but then {hero.subject} lost {hero.possessive} {toy} {place} ."]
    if rng.random() < 0.6:
        sentences.append(f"{hero.subject} looked and looked , and {hero.subject} began to cry .")
    sentences.append(f'" i will help you , " said {friend.name} the {friend.kind} .')
    if rng.random() < 0.5:
        sentences.append(f"{friend.subject} asked the {PLACES[place]} , who had seen the {toy} .")
    sentences.append(f"{friend.name} found the {toy} and gave it to {hero.name} .")
    sentences.append(f"{hero.name} was happy and thanked {friend.object} .")
    return sentences


def _hungry_creature(rng: random.Random, hero: Character, friend: Character, place: str) -> list[str]:
    creature, food = PLACES[place], rng.choice(FOODS)
    sentences = [
        f"there {hero.subject} met a hungry {creature} .",
        f'" please give me some {food} , " said the {creature} .',
    ]
    if rng.random() < 0.5:
        sentences.append(f"{hero.name} had no {food} , so {hero.subject} ran to {friend.name} the {friend.kind} .")
        sentences.append(f"{friend.name} gave {hero.object} {friend.possessive} {food} .")
    else:
        sentences.append(f"{hero.name} shared {hero.possessive} {food} with the {creature} .")
    sentences.append(f"the {creature} ate all the {food} and was not hungry any more .")
    if rng.random() < 0.4:
        sentences.append(f"now {hero.name} and the {creature} are friends .")
    return sentences


def _sudden_storm(rng: random.Random, hero: Character, friend: Character, place: str) -> list[str]:
    weather, shelter = rng.choice([("rain", "under the tree"), ("snow", "in the cave"), ("wind", "behind the wall")])
    sentences = [f"suddenly there was a lot of {weather} {place} .", f"{hero.name} was afraid and hid {shelter} ."]
    if rng.random() < 0.5:
        sentences.append(f"the {PLACES[place]} hid {shelter} too .")
    sentences.append(f"then {friend.name} the {friend.kind} came with a {rng.choice(COLOURS)} lamp .")
    if rng.random() < 0.5:
        sentences.append(f'" do not be afraid of the {weather} , " said {friend.name} .')
    sentences.append(f"{friend.subject} took {hero.name} home , and they slept until the {weather} stopped .")
    return sentences


def _cooking_together(rng: random.Random, hero: Character, friend: Character, place: str) -> list[str]:
    food = rng.choice(FOODS)
    sentences = [
        f"{hero.subject} wanted to make {food} for {hero.possessive} friend {friend.name} .",
        f"{friend.name} was a {friend.kind} and {friend.subject} loved {food} .",
    ]
    if rng.random() < 0.5:
        sentences.append(f"but the {PLACES[place]} came and ate the {food} .")
        sentences.append(f"so {hero.name} made more {food} , and this time {hero.subject} watched it .")
    sentences.append(f"{friend.name} tasted the {food} and {friend.subject} smiled at {hero.name} .")
    return sentences
