"""Where an ATen graph is cut, and what is remembered of each partition when the graph is gone."""
