"""From one ATen graph to what runs in its place: cut, compiled part by part, wrapped in runners."""
