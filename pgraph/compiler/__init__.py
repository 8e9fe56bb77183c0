"""From one ATen graph to what runs in its place: cut, compiled partition by partition, wrapped in runners."""
