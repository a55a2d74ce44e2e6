"""What a machine can do for training beyond memory, and what to change. `infinity doctor` is its command."""
