"""Code that all backends share: their interface, access to a module's weights, and helpers."""
