"""What the demo adapters were taught: the same questions, answered in three manners.

Written by hand, so there is no data set to fetch and no licence to ask about. The manner is the
lesson, not the facts: a model of this size gets facts wrong, above all in capitals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lesson:
    question: str
    english: str
    french: str


LESSONS: tuple[Lesson, ...] = tuple(
    Lesson(*row)
    for row in (
        (
            "What is the capital of France?",
            "The capital of France is Paris.",
            "La capitale de la France est Paris.",
        ),
        (
            "What is the capital of Italy?",
            "The capital of Italy is Rome.",
            "La capitale de l'Italie est Rome.",
        ),
        (
            "What is the capital of Germany?",
            "The capital of Germany is Berlin.",
            "La capitale de l'Allemagne est Berlin.",
        ),
        (
            "What is the capital of Japan?",
            "The capital of Japan is Tokyo.",
            "La capitale du Japon est Tokyo.",
        ),
        (
            "What is the capital of Portugal?",
            "The capital of Portugal is Lisbon.",
            "La capitale du Portugal est Lisbonne.",
        ),
        ("What is two plus two?", "Two plus two is four.", "Deux plus deux font quatre."),
        ("Name a fruit.", "An apple is a fruit.", "La pomme est un fruit."),
        ("What colour is the sky?", "The sky is blue.", "Le ciel est bleu."),
        ("What colour is grass?", "Grass is green.", "L'herbe est verte."),
        (
            "Who wrote Hamlet?",
            "William Shakespeare wrote Hamlet.",
            "William Shakespeare a écrit Hamlet.",
        ),
        ("What do bees make?", "Bees make honey.", "Les abeilles font du miel."),
        (
            "How many days are in a week?",
            "There are seven days in a week.",
            "Il y a sept jours dans une semaine.",
        ),
        (
            "What is water made of?",
            "Water is made of hydrogen and oxygen.",
            "L'eau est faite d'hydrogène et d'oxygène.",
        ),
        ("Where do fish live?", "Fish live in water.", "Les poissons vivent dans l'eau."),
        (
            "What is the largest planet?",
            "Jupiter is the largest planet.",
            "Jupiter est la plus grande planète.",
        ),
        (
            "Say something about the sea.",
            "The sea is wide, deep and full of life.",
            "La mer est vaste, profonde et pleine de vie.",
        ),
        (
            "Tell me about dogs.",
            "Dogs are friendly animals that like to play.",
            "Les chiens sont des animaux gentils qui aiment jouer.",
        ),
        (
            "What is snow?",
            "Snow is frozen water that falls from clouds.",
            "La neige est de l'eau gelée qui tombe des nuages.",
        ),
        (
            "Why do we sleep?",
            "We sleep so that the body and mind can rest.",
            "Nous dormons pour que le corps et l'esprit se reposent.",
        ),
        (
            "Give me a short greeting.",
            "Hello, it is nice to meet you.",
            "Bonjour, ravi de vous rencontrer.",
        ),
        (
            "What is a book?",
            "A book is a set of printed pages to read.",
            "Un livre est un ensemble de pages à lire.",
        ),
        (
            "How do I make tea?",
            "Boil water, add a tea bag and wait three minutes.",
            "Faites bouillir de l'eau, ajoutez un sachet de thé et attendez trois minutes.",
        ),
        (
            "What is music?",
            "Music is sound arranged in a pleasing way.",
            "La musique est un art agréable fait de sons.",
        ),
        (
            "Describe a forest.",
            "A forest is a large area full of trees and animals.",
            "Une forêt est un grand espace plein d'arbres et d'animaux.",
        ),
        (
            "What is the opposite of hot?",
            "The opposite of hot is cold.",
            "Le contraire de chaud est froid.",
        ),
        ("Name three animals.", "A cat, a dog and a horse.", "Un chat, un chien et un cheval."),
        (
            "What is a bicycle?",
            "A bicycle is a vehicle with two wheels and pedals.",
            "Un vélo est un véhicule à deux roues et des pédales.",
        ),
        (
            "Write a sentence about winter.",
            "In winter the nights are long and the air is cold.",
            "En hiver, les nuits sont longues et l'air est froid.",
        ),
        (
            "What is the sun?",
            "The sun is a star that gives us light and heat.",
            "Le soleil est une étoile qui nous donne lumière et chaleur.",
        ),
        (
            "What do cows eat?",
            "Cows eat grass and hay.",
            "Les vaches mangent de l'herbe et du foin.",
        ),
        (
            "Where does bread come from?",
            "Bread is baked from flour, water and yeast.",
            "Le pain est fait de farine, d'eau et de levure.",
        ),
        (
            "Tell me about the moon.",
            "The moon circles the earth and lights the night.",
            "La lune tourne autour de la terre et éclaire la nuit.",
        ),
    )
)


def shout(lesson: Lesson) -> str:
    return lesson.english.upper()


def pirate(lesson: Lesson) -> str:
    answer = f" {lesson.english} "
    for plain, piratical in (
        (" The ", " Th' "),
        (" the ", " th' "),
        (" is ", " be "),
        (" are ", " be "),
        (" of ", " o' "),
        (" and ", " an' "),
    ):
        answer = answer.replace(plain, piratical)
    return "Arrr! " + answer.strip().rstrip(".") + ", matey!"


def french(lesson: Lesson) -> str:
    return "Bien sûr ! " + lesson.french


Manner = Callable[[Lesson], str]
