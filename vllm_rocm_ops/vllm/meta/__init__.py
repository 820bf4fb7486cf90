"""Have vLLM build a model without memory on a simulated GPU, and list the launches of its step, in a process for nothing else."""
