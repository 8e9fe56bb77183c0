"""Changes of an ATen graph before it is cut, each of which leaves every number as it was."""
