"""What constructors do to tensors without memory, recorded in order and done later."""
