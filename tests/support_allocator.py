"""PyTorch's caching allocator as numbers."""

from __future__ import annotations

MB = 1 << 20


class Memory:
    """Memory as PyTorch's allocator hands it out: the smallest free block that is large enough.

    A segment has 2 MB for what is small, 20 MB for what has less than 10 MB, and else its size. Neighbours
    within one are joined.
    """

    def __init__(self) -> None:
        self.free: list[tuple[int, int, bool]] = []  # bytes, address, small
        self.taken: dict[int, tuple[int, bool]] = {}
        self.segments = 0
        self.reserved = 0

    def take(self, nbytes: int) -> int:
        nbytes = -(-nbytes // 512) * 512
        small = nbytes <= MB
        if not any(of_small == small and size >= nbytes for size, _, of_small in self.free):
            self.segments += 1
            large = 20 * MB if nbytes < 10 * MB else -(-nbytes // (2 * MB)) * 2 * MB
            whole = 2 * MB if small else large
            self.reserved += whole
            self.free.append((whole, self.segments << 40, small))
        size, address, _ = block = min(one for one in self.free if one[2] == small and one[0] >= nbytes)
        self.free.remove(block)
        if size - nbytes >= (512 if small else MB + 512):
            self.free.append((size - nbytes, address + nbytes, small))
            size = nbytes
        self.taken[address] = size, small
        return address

    def give(self, address: int) -> None:
        size, small = self.taken.pop(address)
        for other in list(self.free):
            if other[1] in (address + size, address - other[0]):
                self.free.remove(other)
                size, address = size + other[0], min(address, other[1])
        self.free.append((size, address, small))
