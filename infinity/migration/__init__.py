"""Settings of other engines, read and explained."""
