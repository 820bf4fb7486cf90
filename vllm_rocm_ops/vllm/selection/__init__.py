"""Select the kernel for each call: timed when a worker starts, recorded in a file, agreed on by the ranks."""
