"""What is known of ops and of FX nodes, and the rules that say which of them may be captured."""
