"""Which kernel serves a call: measured when a worker starts, kept in a file, agreed on by ranks."""
