"""Published optimizers in their plain form, which the backends are compared with: MeZO and GaLore."""
