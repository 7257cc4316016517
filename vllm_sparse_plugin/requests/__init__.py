"""What requests say about their own attention: arguments, their check, and their rows in a batch."""
