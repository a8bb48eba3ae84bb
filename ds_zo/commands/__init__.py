"""The commands of `ds-zo`, a module each. `add` of a module describes its command to argparse."""
