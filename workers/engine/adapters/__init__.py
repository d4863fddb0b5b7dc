"""LoRA adapters: their names, the weights in memory, and which of them the next step computes with."""
