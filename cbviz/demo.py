"""The workload that runs when no prompt is given: short stories, laid out over the first steps.

Long and short prompts, early and late ones, so that chunks of prefill, decodes, finishes, waiting
and replacement are all to be seen within seconds, with m = 32 and a handful of running requests.
"""

from __future__ import annotations

from engine.protocol import Add
from engine.request import SamplingParams

_TEMPERATURE = 0.7

# Step at which it arrives, tokens to generate, prompt.
_STORIES: tuple[tuple[int, int, str], ...] = (
    (0, 48, "Once upon a time, there was a little fox"),
    (0, 64, "One day, Lily found a red ball in the garden. She wanted to play with her dog, but "
     "the dog was"),
    (3, 40, "Tom and Mia went to the lake with their dad. The sun was warm and the water was "
     "blue. They had a small boat, a big net and a basket full of bread and jam. Dad said, "
     "\"Sit still in the boat, and look for the fish.\" Tom sat at the front and Mia sat at the "
     "back. Soon they saw something shiny under the water. It was round, it was green, and it "
     "did not swim away. Mia put her hand in the cold water and took it out. It was"),
    (6, 32, "The old bear was very tired. He"),
    (9, 72, "Once upon a time, in a house at the end of the road, there lived a cat who could not "
     "sleep at night. Every evening she"),
    (13, 24, "The bird sang"),
    (17, 56, "Sam had a kite. It was yellow and it had a long tail. The wind blew hard, and the "
     "kite went up, up, up, over the trees and over the hill. Then the string broke. Sam ran "
     "after it and called his friend Anna. \"Help me!\" he said. Anna was fast and she was not "
     "afraid of the dark wood. Together they"),
    (22, 40, "A little girl named Rose had a secret. Under her bed"),
    (28, 90, "It was raining. Ben looked out of the window and felt sad. His mom said, \"We can "
     "bake a cake.\" So they took flour, eggs and milk, and"),
    (34, 36, "Once there was a frog"),
    (40, 48, "The two brothers built a tower of blocks. It was as tall as a chair. Then the baby "
     "came and"),
)  # fmt: skip


def demo_requests() -> list[Add]:
    """About ten story prompts with fixed seeds, in the order in which they arrive."""
    return [
        Add(
            prompt=prompt,
            params=SamplingParams(max_tokens=tokens, temperature=_TEMPERATURE, seed=number),
            at_step=step,
        )
        for number, (step, tokens, prompt) in enumerate(_STORIES)
    ]
