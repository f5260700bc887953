"""What a timeline says: where the GPU's time went, which host code asked for it, and what it waited for."""
