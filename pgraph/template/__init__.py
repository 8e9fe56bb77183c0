"""What two recordings prove: which words are addresses, in which order, in how much memory. Plain data."""
