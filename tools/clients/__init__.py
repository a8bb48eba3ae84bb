"""Unmodified training programs of other projects, run with the JSONs of ds_zo: a module for each.

`bash tools/clients.sh` runs them. A module holds a `Client` (client.py), and CLIENTS in __main__.py names it.
"""
