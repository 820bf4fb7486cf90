"""Define ops: specification, dispatch, launches, arguments, and GPU architectures."""
