"""Where an ATen graph is cut, and what is remembered of each part when the graph is gone."""
