"""What the backends share: their interface, the module's state, and helpers."""
