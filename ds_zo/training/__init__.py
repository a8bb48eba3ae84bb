"""The training job of `ds-zo train`, `python -m ds_zo.training` and launch/train.py."""
