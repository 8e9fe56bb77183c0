"""What of a program is captured, what is not, why, and what to change first."""
