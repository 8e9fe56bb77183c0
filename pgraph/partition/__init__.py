"""Where an ATen graph is cut, how partitions are cut out of it, and the facts about each that outlive it."""
