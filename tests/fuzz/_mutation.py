"""Damage to the bytes of a valid file."""

import random


def mutate(content: bytes, rng: random.Random) -> bytes:
    """A few random changes: bytes replaced, numbers set to extremes, stretches cut, repeated or swapped."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        if not data:
            return b""
        # Half of the changes hit the first 64 bytes, where most formats keep their header.
        place = rng.randrange(min(len(data), 64)) if rng.random() < 0.5 else rng.randrange(len(data))
        kind = rng.randrange(7)
        if kind <= 1:
            data[place] = rng.randrange(256)
        elif kind == 2:
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 3:
            width = rng.choice((2, 4, 8))
            number = rng.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, rng.getrandbits(64)))
            data[place : place + width] = (number % 256**width).to_bytes(width, "little")
        elif kind == 4:
            del data[place:]
        elif kind == 5:
            del data[place : place + rng.randrange(1, 16)]
        else:
            data[place:place] = data[place : place + rng.randrange(1, 64)] * rng.randrange(1, 4)
    return bytes(data)
