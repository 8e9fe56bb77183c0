"""What stands in a partition's place from call to call: warm-up, capture, launches, failures, counters."""
