"""What every op is made of: its specification, its call, launches, arguments, and the architectures."""
